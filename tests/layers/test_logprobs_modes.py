"""Reported log-probabilities are of the distribution that a request asks for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_jax.core.sampling_params import MAX_TOP_LOGPROBS, LogprobsMode, SamplingParams
from sgl_jax.core.step_plan import RowAdmission
from sgl_jax.layers.sampling.draw import draw_tokens
from sgl_jax.layers.sampling.logprobs import LogprobArrays
from sgl_jax.layers.sampling.row_params import SampledRows, pack_row_params
from sgl_jax.layers.sampling.split_logits import SplitLogits
from tests.layers.test_split_logits import VOCAB, on_chips

CONTEXT, NUM_ROWS = 16, 36
OUTPUT = [5, 9, 5]  # after a prompt of one token
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 0.0},
    {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 1.1, "logit_bias": {7: 5.0}, "top_p": 0.9},
    {"temperature": 1.0},
]
MODES: tuple[LogprobsMode, ...] = ("scaled", "processed", "raw")
Floats = NDArray[np.float64]


def reference(logits: Floats, sampling: SamplingParams, mode: LogprobsMode) -> Floats:
    """Return the log-probabilities of all tokens in float64."""
    logits = logits.astype(np.float32).astype(np.float64)
    if mode != "raw":
        for token in {0, *OUTPUT}:  # the prompt is token 0
            penalty, positive = sampling.repetition_penalty, logits[token] > 0
            logits[token] *= 1 / penalty if positive else penalty
        for token in set(OUTPUT):
            logits[token] -= sampling.frequency_penalty * OUTPUT.count(token)
            logits[token] -= sampling.presence_penalty
        for token, bias in (sampling.logit_bias or {}).items():
            logits[token] += bias
        logits /= sampling.temperature or 1.0
    if mode == "processed" and sampling.temperature:
        probs = np.exp(logits - logits.max())
        in_order = np.sort(probs)[::-1]
        reached = np.cumsum(in_order) / probs.sum() >= sampling.top_p - 1e-9
        least = [in_order[np.argmax(reached)], sampling.min_p]
        if sampling.top_k > 0:
            least.append(in_order[sampling.top_k - 1])
        logits[probs < max(least) * (1 - 1e-9)] = -np.inf
    largest = logits.max()
    return logits - largest - np.log(np.exp(logits - largest).sum())


def draw(
    logits: Floats, samplings: list[SamplingParams], modes: list[LogprobsMode], tp: int
) -> tuple[NDArray[np.int32], LogprobArrays]:
    count = len(samplings)
    tokens = np.array([0, *OUTPUT], np.int32)
    table = np.zeros((count, CONTEXT), np.int32)
    table[:, : len(tokens)] = tokens
    packed = np.stack(
        [
            pack_row_params(RowAdmission(i, tokens, 1, own, i, (), logprobs_mode=mode), 1)
            for i, (own, mode) in enumerate(zip(samplings, modes, strict=True))
        ]
    )

    def run(
        columns: SplitLogits,
        packed: jax.Array,
        table: jax.Array,
        rows: jax.Array,
        flags: jax.Array,
    ) -> Any:
        lengths = jnp.full(rows.shape, len(tokens), jnp.int32)
        where = SampledRows(rows, lengths, jnp.ones(rows.shape, bool))
        return draw_tokens(columns, packed, table, where, flags[0])

    rows = np.arange(count, dtype=np.int32)
    arguments = logits.astype(np.float32), packed, table, rows, np.ones(1, bool)
    drawn, _, logprobs = on_chips(tp, run)(*arguments)
    return np.asarray(drawn)[0], jax.tree.map(lambda x: np.asarray(x)[0], logprobs)


@pytest.mark.parametrize("tp", [1, 4])
def test_every_row_reports_the_distribution_of_its_mode(tp: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)) * 2
    samplings = [SamplingParams(**SAMPLINGS[i % len(SAMPLINGS)]) for i in range(NUM_ROWS)]
    modes = [MODES[i // len(SAMPLINGS) % len(MODES)] for i in range(NUM_ROWS)]
    drawn, found = draw(logits, samplings, modes, tp)
    for row in range(NUM_ROWS):
        wanted = reference(logits[row], samplings[row], modes[row])
        assert np.isfinite(found.logprobs[row]), "a token that is drawn has a probability"
        np.testing.assert_allclose(found.logprobs[row], wanted[drawn[row]], atol=2e-5)
        in_order = np.sort(wanted)[::-1][:MAX_TOP_LOGPROBS]
        np.testing.assert_allclose(found.top_logprobs[row], in_order, atol=2e-5)


def test_processed_probabilities_of_the_kept_tokens_sum_to_one() -> None:
    logits = np.random.default_rng(4).normal(size=(2, VOCAB)) * 3
    samplings = [SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(top_k=5)]
    _, found = draw(logits, samplings, ["processed", "processed"], 1)
    kept = np.exp(found.top_logprobs.astype(np.float64))
    np.testing.assert_allclose(kept.sum(axis=-1), 1.0, rtol=1e-5)
    assert (kept[1] > 0).sum() == 5


def test_the_draw_does_not_depend_on_the_mode() -> None:
    logits = np.random.default_rng(5).normal(size=(NUM_ROWS, VOCAB)) * 2
    samplings = [SamplingParams(**SAMPLINGS[i % len(SAMPLINGS)]) for i in range(NUM_ROWS)]
    by_mode = [draw(logits, samplings, [mode] * NUM_ROWS, 1)[0] for mode in MODES]
    for other in by_mode[1:]:
        np.testing.assert_array_equal(other, by_mode[0])
