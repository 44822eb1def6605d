"""The sampling parameters of one row as a line of int32 words, packed on the host, read on device.

Owns the layout of that line and nothing else. Floats are stored as their bit patterns, so that one
array of one dtype carries everything and an admission is a single scatter.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from sgl_jax.core.sampling_params import LOGPROBS_MODES, MAX_LOGIT_BIAS, MAX_LOGPROB_IDS
from sgl_jax.core.step_plan import Int32Array, RowAdmission

# Fills unused token id slots: outside any vocabulary, so a scatter to it is dropped.
NO_TOKEN = 2**31 - 1


class RowParams(NamedTuple):
    """Sampling parameters of n rows on the device, in the order of a packed line."""

    seed_low: jax.Array  # int32[n], the low word of the int64 seed
    seed_high: jax.Array  # int32[n], its high word
    prompt_len: jax.Array  # int32[n], tokens of the original prompt
    min_new_tokens: jax.Array  # int32[n]
    top_k: jax.Array  # int32[n], 0 keeps all
    logprobs_mode: jax.Array  # int32[n], index in LOGPROBS_MODES
    prompt_logprobs_mode: jax.Array  # int32[n], likewise, of the prompt's tokens
    temperature: jax.Array  # float32[n], 0 is greedy
    top_p: jax.Array  # float32[n], 1 keeps all
    min_p: jax.Array  # float32[n], 0 keeps all
    repetition_penalty: jax.Array  # float32[n], 1 for none
    frequency_penalty: jax.Array  # float32[n], 0 for none
    presence_penalty: jax.Array  # float32[n], 0 for none
    bias_ids: jax.Array  # int32[n, MAX_LOGIT_BIAS], NO_TOKEN where unused
    bias_values: jax.Array  # float32[n, MAX_LOGIT_BIAS]
    logprob_ids: jax.Array  # int32[n, MAX_LOGPROB_IDS], NO_TOKEN where unused
    stop_ids: jax.Array  # int32[n, max_stop_ids], NO_TOKEN where unused


_NUM_INTS, _NUM_SCALARS = 7, 13  # in `RowParams`: integers, then floats, then lists
_INT_FIELDS = RowParams._fields[:_NUM_INTS]
_FLOAT_FIELDS = RowParams._fields[_NUM_INTS:_NUM_SCALARS]
_BIAS_IDS = slice(_NUM_SCALARS, _NUM_SCALARS + MAX_LOGIT_BIAS)
_BIAS_VALUES = slice(_BIAS_IDS.stop, _BIAS_IDS.stop + MAX_LOGIT_BIAS)
_LOGPROB_IDS = slice(_BIAS_VALUES.stop, _BIAS_VALUES.stop + MAX_LOGPROB_IDS)
_STOP_IDS = slice(_LOGPROB_IDS.stop, None)  # as many as the engine has


def packed_width(max_stop_ids: int) -> int:
    """Return the number of words of a packed line with `max_stop_ids` ids that end a request."""
    return _STOP_IDS.start + max_stop_ids


class SampledRows(NamedTuple):
    """The rows that draw, and their tokens' places in the token table."""

    rows: jax.Array  # int32[n] row index in the token table
    num_tokens: jax.Array  # int32[n] tokens before the one to draw, which is also its position
    samples: jax.Array  # bool[n]; rows that do not draw cost nothing and get an arbitrary token


def pack_row_params(admission: RowAdmission, max_stop_ids: int) -> Int32Array:
    """Return one admission's parameters as int32[packed_width(max_stop_ids)].

    `top_k` 1 is packed as greedy, so that equal logits resolve in the same way. Raises ValueError
    if there are more ids or biases than slots.
    """
    sampling = admission.sampling
    bias = sampling.logit_bias or {}
    greedy = sampling.temperature == 0.0 or sampling.top_k == 1
    packed = np.zeros(packed_width(max_stop_ids), np.int32)
    packed[:_NUM_INTS] = (
        *np.array([admission.seed], "<i8").view("<i4"),
        admission.prompt_len,
        sampling.min_new_tokens,
        min(max(sampling.top_k, 0), NO_TOKEN),
        LOGPROBS_MODES.index(admission.logprobs_mode),
        LOGPROBS_MODES.index(admission.prompt_logprobs_mode),
    )
    floats = packed[_NUM_INTS:_NUM_SCALARS].view(np.float32)
    floats[:] = [getattr(sampling, name) for name in _FLOAT_FIELDS]
    if greedy:
        floats[_FLOAT_FIELDS.index("temperature")] = 0.0
    packed[_BIAS_IDS] = NO_TOKEN
    packed[_BIAS_IDS][: len(bias)] = list(bias)
    packed[_BIAS_VALUES].view(np.float32)[: len(bias)] = list(bias.values())
    packed[_LOGPROB_IDS.start :] = NO_TOKEN
    packed[_LOGPROB_IDS][: len(admission.logprob_ids)] = admission.logprob_ids
    packed[_STOP_IDS][: len(admission.stop_token_ids)] = admission.stop_token_ids
    return packed


def unpack_row_params(packed: jax.Array) -> RowParams:
    """Unpack lines int32[n, packed_width(max_stop_ids)] to named arrays; traced in the step."""
    ints = {name: packed[:, i] for i, name in enumerate(_INT_FIELDS)}
    floats = {
        name: lax.bitcast_convert_type(packed[:, _NUM_INTS + i], np.float32)
        for i, name in enumerate(_FLOAT_FIELDS)
    }
    return RowParams(
        **ints,
        **floats,
        bias_ids=packed[:, _BIAS_IDS],
        bias_values=lax.bitcast_convert_type(packed[:, _BIAS_VALUES], np.float32),
        logprob_ids=packed[:, _LOGPROB_IDS],
        stop_ids=packed[:, _STOP_IDS],
    )
