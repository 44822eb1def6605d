"""The TPU's own compiler accepts state space models, and changes their states in place."""

import jax.numpy as jnp
import pytest

from sgl_jax.core.layer_configs import StateSpaceConfig, conv_state_shape
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

GRANITE = StateSpaceConfig(1, 128, 128, 64, 4)  # of granite-4.0-h-small
NEMOTRON = StateSpaceConfig(8, 64, 128, 64, 4)  # of Nemotron-3-Nano-30B-A3B
LAYERS, SLOTS, ROWS, SNAPSHOTS, LANES = 2, 1024, 64, 16, 128
CALLS = kernels_of("tpu", "pallas")


def compile_calls(mesh, own, tp, tokens, max_drafts=0):
    """Convolution and recurrence of a layer on one chip of tp; also the states' bytes."""
    heads, groups, channels = own.num_heads // tp, own.chip_groups(tp), own.chip_channels(tp)
    lines, *state = own.state_shape
    states = struct(jnp.float32, LAYERS, SLOTS, lines // tp, *state)
    shape = conv_state_shape(own.conv_size, channels)
    conv_states = struct(jnp.bfloat16, LAYERS, SLOTS, *shape)

    def run(u, weight, bias, log_decay, beta, states, conv_states, layer, *rows):
        batch = StateBatch.build(*rows, tokens, max_drafts)
        u, conv_states = CALLS.causal_conv(u, weight, conv_states, layer, batch, bias)
        by_group = u.reshape(tokens, groups, -1, LANES)
        num_lines = by_group.shape[2] - 2
        v, k, q = jnp.split(by_group, (num_lines, num_lines + 1), axis=2)
        v, k, q = (x.reshape(tokens, -1, LANES) for x in (v, k, q))
        inputs = DeltaInputs(q, k, v, log_decay[..., None], beta)
        out, states = CALLS.state_space(inputs, states, layer, batch)
        return out, states, conv_states

    gates, row = struct(jnp.float32, tokens, heads), struct(jnp.int32, ROWS)
    compiled, seconds = compile_on(
        mesh,
        run,
        struct(jnp.bfloat16, tokens, channels),
        struct(jnp.bfloat16, own.conv_size, channels),
        struct(jnp.bfloat16, channels),
        *[gates] * 2,
        states,
        conv_states,
        struct(jnp.int32),
        *[row] * 2,
        struct(jnp.int32, SNAPSHOTS, 3),
        *[row] * 2,
        struct(jnp.int32),
        donated=(5, 6),
    )
    return compiled, seconds, num_bytes(states), num_bytes(conv_states)


def check(mesh, *shape, **others):
    compiled, seconds, state_bytes, conv_bytes = compile_calls(mesh, *shape, **others)
    # Activations alone, and no copy of the states.
    check_states_in_place(compiled, seconds, state_bytes + conv_bytes, state_bytes / 8)


@pytest.mark.parametrize("generation", generations("v6e"))
def test_every_generation_compiles_a_mixed_step(generation, tpu_mesh):
    check(tpu_mesh(generation), NEMOTRON, 8, 256)


OTHERS = {
    "one group of many heads": (GRANITE, 1, 512),
    "a part of a group": (GRANITE, 4, 2048),
    "several groups": (NEMOTRON, 2, 512),
    "drafts": (NEMOTRON, 4, 256, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("generation", CHIPS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_compile(name, generation, tpu_mesh):
    check(tpu_mesh(generation), *OTHERS[name])
