"""State space models of prefill rows on TPU: chunk by chunk, as products of matrices.

The chunks, buffers and DMAs are those of `gated_delta.tpu.prefill`; there are no equations to
solve. The values of two heads, side by side in a row of lanes, are one line. A product with the
tokens of both heads as inputs, 2 * 64 of them, gives a line's outputs and the change of its state.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.pairs import NEVER, of_rows, seen
from sgl_jax.kernels.gated_delta.tpu.prefill import ChunkKernel, recur_chunks, state_before
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import LANES

HEADS_EACH = 2  # of a line
LINES_AT_ONCE = 4  # their products alternate: each waits for the one before


def prefill_state_space(
    tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
) -> tuple[jax.Array, jax.Array]:
    """Compute the prefill rows' tokens for `api.StateSpace`.

    Returns v with outputs at the prefill tokens, and the states; in the memory of `v` and `states`
    if the caller does not use them again.
    """
    name = "state_space_prefill"
    return recur_chunks(_for_lines, name, tokens, states, layer, batch, HEADS_EACH)


def _for_lines(kernel: ChunkKernel, chunk: jax.Array) -> None:
    groups, lines = kernel.by_head.k.shape[0], kernel.by_head.v.shape[0]
    before, at = state_before(kernel, chunk), lax.rem(chunk, 2)
    of_group = lines // groups
    at_once = max(n for n in range(1, LINES_AT_ONCE + 1) if of_group % n == 0)

    @pl.loop(0, groups)
    def _(group: jax.Array) -> None:
        key, query = (x[group] for x in (kernel.by_head.k, kernel.by_head.q))
        twice = jnp.concatenate([key] * HEADS_EACH, axis=0)
        dtype = kernel.product_dtype
        similar = product(query.astype(dtype), twice.astype(dtype), (1, 1))
        turned = twice.T

        @pl.loop(0, of_group // at_once)
        def _(i: jax.Array) -> None:
            first = group * of_group + i * at_once
            own = [first + n for n in range(at_once)]
            _change(kernel, own, (query, similar, turned), before, at)


def _change(
    kernel: ChunkKernel,
    lines: list[jax.Array],
    of_group: tuple[jax.Array, jax.Array, jax.Array],
    before: Any,
    at: jax.Array,
) -> None:
    """Compute some lines' outputs and states after the chunk, with stores last.

    `of_group` are their queries [C, 128], these times the keys, twice, [C, 2 * C], and the keys,
    twice, as columns [128, 2 * C].
    """
    by_head, dtype = kernel.by_head, kernel.product_dtype
    query, similar, turned = of_group
    is_left = row_and_column((CHUNK_TOKENS, LANES))[1] < CHUNK_TOKENS
    read = [product(query.astype(dtype), before[line].astype(dtype), (1, 0)) for line in lines]
    new = []
    for line in lines:
        weights = _weights(kernel, line, similar, turned).astype(dtype)
        values = by_head.v[line]
        parts = [jnp.where(is_left, values, 0), jnp.where(is_left, 0, values)]
        new.append(product(weights, jnp.concatenate(parts, axis=0).astype(dtype), (1, 0)))
    end = slice(CHUNK_TOKENS - 1, CHUNK_TOKENS)
    for line, old, own in zip(lines, read, new, strict=True):
        decay, over = (by_head.decays.since(line, tokens) for tokens in (slice(None), end))
        by_head.v[line] = decay * old + own[:CHUNK_TOKENS]
        state = before[line].astype(jnp.float32) * over + own[CHUNK_TOKENS:]
        kernel.buffers.states[1, at, line] = state.astype(kernel.buffers.states.dtype)


def _weights(
    kernel: ChunkKernel, line: jax.Array, similar: jax.Array, turned: jax.Array
) -> jax.Array:
    """Return the weight of each token of each head for each query and for the keys of the state,
    [C + 128, 2 * C]."""
    decays, heads = kernel.by_head.decays, (line * HEADS_EACH, line * HEADS_EACH + 1)
    coarse_row, fine_row, beta = (
        of_rows(x, heads) for x in (decays.coarse_rows, decays.fine_rows, kernel.by_head.beta_rows)
    )
    between = (decays.coarse[line] - coarse_row) + (decays.fine[line] - fine_row)
    until = jnp.exp(between[CHUNK_TOKENS - 1 :]) * beta
    # A later token has no weight: its exponent is masked.
    decay = jnp.exp(jnp.where(seen(), between, NEVER)) * beta
    return jnp.concatenate([similar * decay, turned * until], axis=0)
