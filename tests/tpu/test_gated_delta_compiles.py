"""The TPU's own compiler accepts gated delta nets, and changes their states in place."""

import itertools

import jax.numpy as jnp
import pytest

from sgl_jax.core.layer_configs import conv_state_shape
from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.layers.kernels import kernels_of
from sgl_jax.planner.topology import CHIPS
from tests.tpu.compiling import (
    check_states_in_place,
    compile_on,
    generations,
    num_bytes,
    struct,
)

KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 16, 32, 128, 4  # of Qwen3-Next-80B-A3B
KEY_HEADS_BY_CHANNEL = 32  # of Kimi-Linear-48B-A3B
LAYERS, SLOTS, ROWS, SNAPSHOTS = 2, 2048, 64, 16
CALLS = kernels_of("tpu", "pallas")


def compile_calls(mesh, tp, tokens, max_drafts=0, state_dtype=jnp.float32, by_channel=False):
    """Convolution and recurrence of a layer on one chip of tp; also the states' bytes."""
    keys = (KEY_HEADS_BY_CHANNEL if by_channel else KEY_HEADS) // tp
    values = VALUE_HEADS // tp
    channels = (2 * keys + values) * DIM
    states = struct(state_dtype, LAYERS, SLOTS, values, DIM, DIM)
    conv_states = struct(jnp.bfloat16, LAYERS, SLOTS, *conv_state_shape(WIDTH, channels))

    def run(u, weight, log_decay, beta, states, conv_states, layer, *rows):
        batch = StateBatch.build(*rows, tokens, max_drafts)
        u, conv_states = CALLS.causal_conv(u, weight, conv_states, layer, batch)
        q, k, v = jnp.split(u.reshape(tokens, -1, DIM), (keys, 2 * keys), axis=1)
        inputs = DeltaInputs(q, k, v, log_decay, beta)
        out, states = CALLS.gated_delta(inputs, states, layer, batch)
        return out, states, conv_states

    decays = struct(jnp.float32, tokens, values, DIM if by_channel else 1)
    betas, row = struct(jnp.float32, tokens, values), struct(jnp.int32, ROWS)
    compiled, seconds = compile_on(
        mesh,
        run,
        struct(jnp.bfloat16, tokens, channels),
        struct(jnp.bfloat16, WIDTH, channels),
        decays,
        betas,
        states,
        conv_states,
        struct(jnp.int32),
        *[row] * 2,
        struct(jnp.int32, SNAPSHOTS, 3),
        *[row] * 2,
        struct(jnp.int32),
        donated=(4, 5),
    )
    return compiled, seconds, num_bytes(states), num_bytes(conv_states)


def check(mesh, *shape, **others):
    compiled, seconds, state_bytes, conv_bytes = compile_calls(mesh, *shape, **others)
    # Activations alone, and no copy of either kind of state.
    check_states_in_place(compiled, seconds, state_bytes + conv_bytes, conv_bytes / 2)


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 8])
def test_every_generation_compiles_a_mixed_step(tp, generation, tpu_mesh):
    check(tpu_mesh(generation), tp, 512)


OTHERS = {
    "decode rows alone": {"tp": 1, "tokens": 64},
    "drafts": {"tp": 4, "tokens": 256, "max_drafts": 3},
    "bfloat16 states": {"tp": 2, "tokens": 512, "state_dtype": jnp.bfloat16},
    "decays by channel": {"tp": 1, "tokens": 512, "by_channel": True},
    "decays by channel, a chip of eight": {"tp": 8, "tokens": 512, "by_channel": True},
    "a chip of four": {"tp": 4, "tokens": 2048},
    "a chip of two": {"tp": 2, "tokens": 2048},
}


# 36 rows of convolution states a slot, no multiple of a tile's: tpu7x stores them in another order
# than the kernel's, and copies them.
COPIED = ("decays by channel, a chip of eight", "tpu7x")


def _other_cases():
    for case in itertools.product(OTHERS, CHIPS):
        is_copied = pytest.mark.xfail(strict=True, reason="convolution states are copied")
        yield pytest.param(*case, marks=is_copied if case == COPIED else ())


@pytest.mark.long
@pytest.mark.parametrize(("name", "generation"), _other_cases())
def test_other_shapes_compile(name, generation, tpu_mesh):
    shape = dict(OTHERS[name])
    check(tpu_mesh(generation), shape.pop("tp"), shape.pop("tokens"), **shape)
