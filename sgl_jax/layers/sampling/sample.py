"""Drawing one token per row.

The order, as in SGLang: penalties, logit bias and the `min_new_tokens` mask change the logits;
temperature divides them; top-k, top-p and min-p then filter one and the same distribution (none
sees the removals of another); the draw is exact, from the renormalised remainder (`race.py`).

The noise of a row depends only on its seed and the position of the drawn token, never on its
neighbours, its place in the batch, the padded size or the rank.

A batch of plain greedy rows without log-probabilities costs one argmax: everything else is in a
`lax.cond` branch. It processes blocks of rows, because it holds several arrays of the size of the
logits, which for 256 rows of a large vocabulary would take the memory of many KV pages.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.sampling_params import LOGPROBS_MODES
from sgl_jax.layers.sampling.filters import keep_threshold
from sgl_jax.layers.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from sgl_jax.layers.sampling.penalties import adjust_logits, largest_masked, needs_adjusting
from sgl_jax.layers.sampling.race import (
    finite_rows,
    first_argmax,
    pad_to_strips,
    race,
    split_strips,
)
from sgl_jax.layers.sampling.row_params import RowParams, SampledRows

_RAW = LOGPROBS_MODES.index("raw")
BLOCK_ROWS = 16  # rows for which changed logits and noise are held at once


class Drawn(NamedTuple):
    """The tokens of n rows."""

    tokens: jax.Array  # int32[n], always valid ids, even if logits are NaN
    # bool[n], see `finite_rows`. A row is also not finite if its logits overflow float32 when
    # divided by the temperature.
    is_finite: jax.Array
    logprobs: LogprobArrays  # zeros if not requested


def sample_tokens(
    logits: jax.Array,
    params: RowParams,
    token_table: jax.Array,
    where: SampledRows,
    returns_logprobs: jax.Array,
    unmasked: jax.Array | None = None,
) -> Drawn:
    """Draw the next token of each row.

    Args:
        logits: float32[n, vocab], the model's logits, with -inf for tokens that a grammar forbids.
        params: the rows' sampling parameters.
        token_table: int32[num_rows, max_context_len], read only if a row has penalties.
        where: the rows to draw.
        returns_logprobs: bool[], whether log-probabilities are reported.
        unmasked: the logits before the grammar's mask; None: there is none.
    """
    whole = logits if unmasked is None else unmasked
    drawn: Drawn = lax.cond(
        jnp.any(is_elaborate(params, where)) | returns_logprobs,
        lambda: _sample_elaborately(logits, whole, params, token_table, where, returns_logprobs),
        lambda: Drawn(first_argmax(logits), finite_rows(logits), no_logprobs(logits.shape[0])),
    )
    # Masks may hide a logit, or all finite logits.
    return drawn if unmasked is None else drawn._replace(is_finite=finite_rows(unmasked))


def is_elaborate(params: RowParams, where: SampledRows) -> jax.Array:
    """Return the drawing rows that need more than the argmax of their logits: bool[n]."""
    return _is_random(params, where) | _is_adjusted(params, where)


def _is_random(params: RowParams, where: SampledRows) -> jax.Array:
    return where.samples & (params.temperature > 0.0)


def _is_adjusted(params: RowParams, where: SampledRows) -> jax.Array:
    return where.samples & needs_adjusting(params, where.num_tokens)


def _sample_elaborately(
    logits: jax.Array,
    unmasked: jax.Array,
    params: RowParams,
    token_table: jax.Array,
    where: SampledRows,
    returns_logprobs: jax.Array,
) -> Drawn:
    tokens, largest, logprobs = _sample_in_blocks(
        _Rows(logits, unmasked, params, where), token_table, returns_logprobs
    )
    # The mask of stop tokens is the only change that can remove a logit.
    masked = largest_masked(logits, params, where.num_tokens)
    return Drawn(tokens, jnp.isfinite(jnp.maximum(largest, masked)), logprobs)


class _Rows(NamedTuple):
    """Rows to draw, with the logits before and after the grammar's mask."""

    logits: jax.Array
    unmasked: jax.Array
    params: RowParams
    where: SampledRows


# Each row's token, int32[n], its largest changed logit, float32[n], and its log-probabilities.
_BlockResult = tuple[jax.Array, jax.Array, LogprobArrays]


def _sample_in_blocks(
    rows: _Rows, token_table: jax.Array, returns_logprobs: jax.Array
) -> _BlockResult:
    """Return `_sample_block` of all rows, by blocks of `BLOCK_ROWS`.

    The last block may overlap the previous block, and then draws the same tokens again.
    """
    num_rows, size = rows.logits.shape[0], BLOCK_ROWS
    if num_rows <= size:  # a loop of one iteration would compile more slowly
        return _sample_block(rows, token_table, returns_logprobs)

    def sample_block(index: jax.Array, results: _BlockResult) -> _BlockResult:
        start = jnp.minimum(index * size, num_rows - size)
        block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), rows)
        updated: _BlockResult = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, axis=0),
            *(results, _sample_block(block, token_table, returns_logprobs)),
        )
        return updated

    nothing = jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows), no_logprobs(num_rows)
    results: _BlockResult = lax.fori_loop(0, -(-num_rows // size), sample_block, nothing)
    return results


def _sample_block(rows: _Rows, token_table: jax.Array, returns_logprobs: jax.Array) -> _BlockResult:
    """Draw a block of rows."""
    logits, unmasked, params, where = rows
    random, adjusted = _is_random(params, where), _is_adjusted(params, where)
    changed = lax.cond(
        jnp.any(adjusted),
        lambda: adjust_logits(logits, params, token_table, where, adjusted),
        lambda: logits,
    )
    num_rows = logits.shape[0]
    tokens, largest, threshold = lax.cond(
        jnp.any(random),
        lambda: _draw(changed, params, where.num_tokens, random),
        lambda: (first_argmax(changed), jnp.max(changed, axis=-1), jnp.zeros(num_rows)),
    )

    def report() -> LogprobArrays:
        reported = _reported(changed, unmasked, params, random, threshold)
        return token_logprobs(reported, tokens, params.logprob_ids)

    logprobs = lax.cond(returns_logprobs, report, lambda: no_logprobs(num_rows))
    return tokens, largest, logprobs


def _reported(
    changed: jax.Array,
    unmasked: jax.Array,
    params: RowParams,
    random: jax.Array,
    threshold: jax.Array,
) -> jax.Array:
    """Return the logits float32[n, vocab] of the distributions that rows report.

    They are the model's (`unmasked`) or the `changed` logits, divided by the temperature and, in
    mode "processed", without the tokens whose weight is below the row's `threshold`. Rows that are
    not `random` have neither temperature nor filters.
    """
    is_raw = params.logprobs_mode == _RAW
    divisor = jnp.where(random & ~is_raw, params.temperature, 1.0)
    logits = jnp.where(is_raw[:, None], unmasked, changed) / divisor[:, None]
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    is_filtered = random & (params.logprobs_mode == LOGPROBS_MODES.index("processed"))
    # The weights may differ from those that were drawn from in the last bit.
    is_dropped = weights < (threshold * (1 - 1e-6))[:, None]
    return jnp.where(is_filtered[:, None] & is_dropped, -jnp.inf, logits)


def given_logits(logits: jax.Array, params: RowParams) -> jax.Array:
    """Return the logits float32[n, vocab] of the distributions that rows report for given tokens:
    as for drawn tokens in `prompt_logprobs_mode`, but without penalties and bias."""
    params = params._replace(logprobs_mode=params.prompt_logprobs_mode)
    random = params.temperature > 0.0

    def change() -> jax.Array:
        threshold = keep_threshold(
            _weights(logits, params.temperature, random)[0], *_filters(params, random)
        )
        return _reported(logits, logits, params, random, threshold)

    changed: jax.Array = lax.cond(jnp.any(params.logprobs_mode != _RAW), change, lambda: logits)
    return changed


def _filters(params: RowParams, random: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows' top_k, top_p and min_p, without effect if they are not `random`."""
    return (
        jnp.where(random, params.top_k, 0),
        jnp.where(random, params.top_p, 1.0),
        jnp.where(random, params.min_p, 0.0),
    )


def _draw(
    logits: jax.Array, params: RowParams, positions: jax.Array, random: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token int32[n] of each row of `logits` float32[n, vocab], greedy unless `random`.

    Also return the rows' largest logits after the temperature, and the least of `_weights` that the
    filters keep, both float32[n].
    """
    vocab = logits.shape[1]
    weights, largest = _weights(logits, params.temperature, random)
    threshold = keep_threshold(weights, *_filters(params, random))
    strips = [jnp.where(strip >= threshold[:, None], strip, 0.0) for strip in split_strips(weights)]
    seeds = jnp.stack([params.seed_high, params.seed_low], axis=1)
    drawn = jnp.minimum(race(strips, seeds, positions), vocab - 1)
    return jnp.where(random, drawn, _first_one(strips, vocab)), largest, threshold


def _weights(
    logits: jax.Array, temperature: jax.Array, random: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return probabilities divided by the row's largest; if not `random`, 1 for the best tokens.

    They are float32[n, columns], from `pad_to_strips`. Also return the maximum of the scaled
    logits, float32[n]. Everything uses this one maximum, as each pass over the logits costs a TPU
    as much as the noise.
    """
    scaled = logits / jnp.where(random, temperature, 1.0)[:, None]
    largest = jnp.max(scaled, axis=-1, keepdims=True)
    is_best = jnp.where(scaled == largest, 1.0, 0.0)
    weights = pad_to_strips(jnp.where(random[:, None], jnp.exp(scaled - largest), is_best))
    return weights, largest[:, 0]


def _first_one(strips: list[jax.Array], vocab: int) -> jax.Array:
    """Return each row's lowest column of weight 1, int32[n], or the last token without one."""
    places = lax.broadcasted_iota(jnp.int32, strips[0].shape, 1)
    firsts = [
        jnp.where(strip == 1.0, i * strip.shape[1] + places, vocab - 1)
        for i, strip in enumerate(strips)
    ]
    return jnp.min(functools.reduce(jnp.minimum, firsts), axis=-1)
