"""Gated delta nets of Qwen3-Next-80B-A3B, whole or split over eight chips."""

from collections.abc import Callable

import jax.numpy as jnp

from benchmarks.kernels.attention_kernels import CHUNK, DTYPE, HEAD_DIM, ROWS
from benchmarks.kernels.compiled_kernel import Kernel, Shape, longest_loop, per
from benchmarks.kernels.schedule import Loop, Schedule
from sgl_jax.core.layer_configs import conv_state_shape
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.conv import BLOCK_TOKENS, causal_conv
from sgl_jax.kernels.gated_delta.tpu.decode import decode_gated_delta
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS, prefill_gated_delta

DELTA_KEY_HEADS, DELTA_VALUE_HEADS = 16, 32


def per_token_of_blocks(schedule: Schedule) -> tuple[float, Loop]:
    """Return bundles per token, with a token's part of the grid's, and the loop over tokens."""
    outer, inner = (
        max((loop for loop in schedule.loops if loop.depth == depth), key=lambda loop: loop.bundles)
        for depth in (1, 2)
    )
    return inner.bundles + outer.bundles / BLOCK_TOKENS, inner


def state_shapes(tokens: int, tp: int) -> list[Shape]:
    """Return argument shapes of the gated delta rule on one chip of `tp`.

    They are q, k, v, gates, states, layer, and rows.
    """
    keys, values = DELTA_KEY_HEADS // tp, DELTA_VALUE_HEADS // tp
    gates = ((tokens, values), jnp.float32)
    rows = ((ROWS,), jnp.int32)
    return [
        *[((tokens, keys, HEAD_DIM), DTYPE)] * 2,
        ((tokens, values, HEAD_DIM), DTYPE),
        *[gates] * 2,
        ((2, 4 * ROWS, values, HEAD_DIM, HEAD_DIM), jnp.float32),
        ((), jnp.int32),
        *[rows] * 2,
        ((ROWS, 3), jnp.int32),
        *[rows] * 2,
        ((), jnp.int32),
    ]


def our_delta_decode(tp: int) -> Kernel:
    """Return the decode kernel with Qwen3-Next-80B-A3B's heads on one chip of `tp`."""

    def decode(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return decode_gated_delta(tokens, *arrays, StateBatch.build(*rows, ROWS))

    state_kib = DELTA_VALUE_HEADS // tp * HEAD_DIM * HEAD_DIM * 4 // 1024
    return Kernel(
        f"gated delta decode, {DELTA_VALUE_HEADS // tp} value heads",
        decode,
        state_shapes(ROWS, tp),
        5,
        "token",
        longest_loop,
        f"{state_kib} KiB",
    )


def delta_flops() -> float:
    """Return the floating point operations that a value head's chunk needs.

    They are products with the state, of keys and queries with keys, with the inverse and with the
    changes, and a third of a full matrix inverse.
    """
    with_state = 3 * CHUNK_TOKENS * HEAD_DIM**2
    within = 2 * CHUNK_TOKENS**2 * HEAD_DIM
    of_keys = within * DELTA_KEY_HEADS / DELTA_VALUE_HEADS
    return 2 * (with_state + within + of_keys + CHUNK_TOKENS**3 / 3)


def our_delta_prefill(tp: int) -> Kernel:
    """Return the prefill kernel with Qwen3-Next-80B-A3B's heads on one chip of `tp`.

    Its cost counts only the loop of a chunk that uses the matrix unit most.
    """
    heads = min(VALUE_HEADS, DELTA_VALUE_HEADS // tp)

    def prefill(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return prefill_gated_delta(tokens, *arrays, StateBatch.build(*rows, CHUNK))

    return Kernel(
        f"gated delta prefill, {DELTA_VALUE_HEADS // tp} value heads",
        prefill,
        state_shapes(CHUNK, tp),
        5,
        "GFLOP",
        per(heads * delta_flops() / 1e9),
        f"{DELTA_VALUE_HEADS // tp * CHUNK_TOKENS * HEAD_DIM * 2 // 1024} KiB",
    )


def our_conv(tp: int) -> Kernel:
    """Return the kernel of the convolution, width 4, of Qwen3-Next-80B-A3B on one chip of `tp`."""
    channels = (2 * DELTA_KEY_HEADS + DELTA_VALUE_HEADS) // tp * HEAD_DIM
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
    "conv-1": lambda: our_conv(1),
    "conv-8": lambda: our_conv(8),
}
