"""Log-probabilities to report."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from sgl_jax.kernels.row_blocks import BLOCK_ROWS, row_wise


class LogprobArrays(NamedTuple):
    """Log-probabilities at n positions; the alternatives are ordered, most likely first."""

    logprobs: jax.Array  # float32[n] of the given token
    top_ids: jax.Array  # int32[n, MAX_TOP_LOGPROBS]
    top_logprobs: jax.Array  # float32[n, MAX_TOP_LOGPROBS]
    id_logprobs: jax.Array  # float32[n, MAX_LOGPROB_IDS] of the requested tokens


def token_logprobs(logits: jax.Array, tokens: jax.Array, ids: jax.Array) -> LogprobArrays:
    """Return log-probabilities under `logits` float32[n, vocab].

    They are for `tokens` int32[n], for the likeliest tokens, and for `ids` int32[n,
    MAX_LOGPROB_IDS]; ids out of range get arbitrary numbers. A vocabulary smaller than
    MAX_TOP_LOGPROBS fills the rest with id -1 at minus infinity.
    """
    of_rows = partial(jax.nn.logsumexp, axis=-1, keepdims=True)
    normaliser = row_wise(of_rows, logits, most_rows=BLOCK_ROWS)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")
    num_top = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    top, top_ids = lax.top_k(logits, num_top)
    missing = ((0, 0), (0, MAX_TOP_LOGPROBS - num_top))
    return LogprobArrays(
        logprobs=(chosen - normaliser)[:, 0],
        top_ids=jnp.pad(top_ids.astype(jnp.int32), missing, constant_values=-1),
        top_logprobs=jnp.pad(top - normaliser, missing, constant_values=-jnp.inf),
        id_logprobs=jnp.take_along_axis(logits, ids, axis=-1, mode="clip") - normaliser,
    )


def no_logprobs(num_rows: int) -> LogprobArrays:
    """Return zeros in the same shapes, for steps that report none."""
    return LogprobArrays(
        logprobs=jnp.zeros((num_rows,), jnp.float32),
        top_ids=jnp.zeros((num_rows, MAX_TOP_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((num_rows, MAX_TOP_LOGPROBS), jnp.float32),
        id_logprobs=jnp.zeros((num_rows, MAX_LOGPROB_IDS), jnp.float32),
    )
