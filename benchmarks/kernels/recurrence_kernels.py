"""Gated delta nets of Qwen3-Next-80B-A3B, and Kimi Linear's, whole or split over eight chips."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from benchmarks.kernels.attention_kernels import CHUNK, DTYPE, HEAD_DIM, ROWS
from benchmarks.kernels.compiled_kernel import Kernel, Shape, longest_loop, per
from benchmarks.kernels.schedule import Loop, Schedule
from sgl_jax.core.layer_configs import conv_state_shape
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.conv import BLOCK_TOKENS, causal_conv
from sgl_jax.kernels.gated_delta.tpu.decode import decode_gated_delta
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS, prefill_gated_delta


class Heads(NamedTuple):
    """The heads of all chips."""

    keys: int
    values: int
    decay_dim: int  # numbers of a decay: 1, or one for each channel of a key
    name: str


DELTA = Heads(16, 32, 1, "gated delta")  # Qwen3-Next-80B-A3B
CHANNELS = Heads(32, 32, HEAD_DIM, "gated delta by channel")  # Kimi-Linear-48B-A3B


def per_token_of_blocks(schedule: Schedule) -> tuple[float, Loop]:
    """Return bundles per token, with a token's part of the grid's, and the loop over tokens."""
    outer, inner = (
        max((loop for loop in schedule.loops if loop.depth == depth), key=lambda loop: loop.bundles)
        for depth in (1, 2)
    )
    return inner.bundles + outer.bundles / BLOCK_TOKENS, inner


def state_shapes(tokens: int, tp: int, heads: Heads = DELTA) -> list[Shape]:
    """Return argument shapes of the gated delta rule on one chip of `tp`.

    They are q, k, v, gates, states, layer, and rows.
    """
    keys, values = heads.keys // tp, heads.values // tp
    decays, betas = (
        ((tokens, values, heads.decay_dim), jnp.float32),
        ((tokens, values), jnp.float32),
    )
    rows = ((ROWS,), jnp.int32)
    return [
        *[((tokens, keys, HEAD_DIM), DTYPE)] * 2,
        ((tokens, values, HEAD_DIM), DTYPE),
        decays,
        betas,
        ((2, 4 * ROWS, values, HEAD_DIM, HEAD_DIM), jnp.float32),
        ((), jnp.int32),
        *[rows] * 2,
        ((ROWS, 3), jnp.int32),
        *[rows] * 2,
        ((), jnp.int32),
    ]


def our_delta_decode(tp: int, heads: Heads = DELTA) -> Kernel:
    """Return the decode kernel with these heads on one chip of `tp`."""

    def decode(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return decode_gated_delta(tokens, *arrays, StateBatch.build(*rows, ROWS))

    state_kib = heads.values // tp * HEAD_DIM * HEAD_DIM * 4 // 1024
    return Kernel(
        f"{heads.name} decode, {heads.values // tp} value heads",
        decode,
        state_shapes(ROWS, tp, heads),
        5,
        "token",
        longest_loop,
        f"{state_kib} KiB",
    )


def delta_flops(heads: Heads) -> float:
    """Return the floating point operations that a value head's chunk needs.

    They are products with the state, of keys and queries with keys, with the inverse and with the
    changes, and a third of a full matrix inverse.
    """
    with_state = 3 * CHUNK_TOKENS * HEAD_DIM**2
    within = 2 * CHUNK_TOKENS**2 * HEAD_DIM
    of_keys = within * heads.keys / heads.values
    return 2 * (with_state + within + of_keys + CHUNK_TOKENS**3 / 3)


def our_delta_prefill(tp: int, heads: Heads = DELTA) -> Kernel:
    """Return the prefill kernel with these heads on one chip of `tp`.

    Its cost counts only the loop of a chunk that uses the matrix unit most.
    """
    at_once = min(VALUE_HEADS, heads.values // tp)

    def prefill(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return prefill_gated_delta(tokens, *arrays, StateBatch.build(*rows, CHUNK))

    return Kernel(
        f"{heads.name} prefill, {heads.values // tp} value heads",
        prefill,
        state_shapes(CHUNK, tp, heads),
        5,
        "GFLOP",
        per(at_once * delta_flops(heads) / 1e9),
        f"{heads.values // tp * CHUNK_TOKENS * HEAD_DIM * 2 // 1024} KiB",
    )


def our_conv(tp: int) -> Kernel:
    """Return the kernel of the convolution, width 4, of Qwen3-Next-80B-A3B on one chip of `tp`."""
    channels = (2 * DELTA.keys + DELTA.values) // tp * HEAD_DIM
    state, rows = conv_state_shape(4, channels), state_shapes(CHUNK, tp)[6:]

    def convolve(*arguments):
        arrays, rows = arguments[:4], arguments[4:]
        return causal_conv(*arrays, StateBatch.build(*rows, CHUNK))

    return Kernel(
        f"convolution, {channels:,} channels",
        convolve,
        [
            ((CHUNK, channels), DTYPE),
            ((4, channels), DTYPE),
            ((2, 4 * ROWS, *state), DTYPE),
            *rows,
        ],
        2,
        "token",
        per_token_of_blocks,
        f"{state[0] * state[1] * 2 // 1024} KiB",
    )


RECURRENCE_KERNELS: dict[str, Callable[[], Kernel]] = {
    "delta-decode-1": lambda: our_delta_decode(1),
    "delta-decode-8": lambda: our_delta_decode(8),
    "delta-prefill-1": lambda: our_delta_prefill(1),
    "delta-prefill-8": lambda: our_delta_prefill(8),
    "channel-decode-1": lambda: our_delta_decode(1, CHANNELS),
    "channel-decode-8": lambda: our_delta_decode(8, CHANNELS),
    "channel-prefill-1": lambda: our_delta_prefill(1, CHANNELS),
    "channel-prefill-8": lambda: our_delta_prefill(8, CHANNELS),
    "conv-1": lambda: our_conv(1),
    "conv-8": lambda: our_conv(8),
}
