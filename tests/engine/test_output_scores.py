"""The scores of an output are the log-probabilities that its generation reported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax import Engine
from sgl_jax.core.errors import InvalidRequestError

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
PROMPTS = [[5, 6, 7], [9] * 40]
SHARP: dict[str, Any] = {"temperature": 0.7}
FILTERED: dict[str, Any] = {"temperature": 1.5, "top_p": 0.7, "top_k": 40, "min_p": 0.01}


@pytest.fixture(scope="module")
def engine() -> Any:
    sizes = {"context_length": 128, "max_total_tokens": 1024, "chunked_prefill_size": 16}
    with Engine(model_path=str(GOLDEN), device="cpu", page_size=4, **sizes) as engine:
        yield engine


@pytest.mark.parametrize("mode", [None, "raw", "scaled", "processed"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SHARP, FILTERED])
def test_they_are_equal_in_each_mode(
    engine: Engine, sampling: dict[str, Any], mode: str | None
) -> None:
    asked = sampling | {"max_new_tokens": 20, "ignore_eos": True, "seed": 3}
    answers = engine.generate(PROMPTS, asked, return_logprob=True, logprobs_mode=mode)
    outputs = [each.output_ids for each in answers]
    scores = engine.score(PROMPTS, outputs, logprobs_mode=mode, **sampling)
    for found, answer in zip(scores, answers, strict=True):
        expected = [each.logprob for each in answer.logprobs]
        np.testing.assert_allclose(found, expected, atol=2e-5)
    others = engine.score(PROMPTS, outputs, logprobs_mode=mode)
    differs = sampling is not None and mode != "raw" and sampling["temperature"] > 0
    assert np.allclose(scores[0], others[0], atol=1e-3) != differs


def test_an_output_may_fill_the_context_and_have_one_token(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPTS[0]], {"max_new_tokens": 125, "ignore_eos": True})
    (scores,) = engine.score([PROMPTS[0]], [answer.output_ids])
    assert len(scores) == 125
    (first,) = engine.score([PROMPTS[0]], [answer.output_ids[:1]])
    np.testing.assert_allclose(first, scores[:1], atol=2e-5)
    for prompt, output, param in (([], [1], "input_ids"), ([1], [], "output_ids")):
        with pytest.raises(InvalidRequestError) as error:
            engine.score([prompt], [output])
        assert error.value.param == param


def test_a_prompts_own_log_probabilities_stay_the_models(engine: Engine) -> None:
    asked = FILTERED | {"max_new_tokens": 1}
    (scaled,) = engine.generate([PROMPTS[1]], asked, return_logprob=True, logprob_start_len=0)
    (raw,) = engine.score([PROMPTS[1][:1]], [PROMPTS[1][1:]], logprobs_mode="raw")
    found = [each.logprob for each in scaled.prompt_logprobs[1:]]
    np.testing.assert_allclose(found, raw, atol=2e-5)


def test_a_score_is_no_turn_of_a_session(engine: Engine) -> None:
    """The history would be scored, too."""
    session, short = {"id": engine.open_session()}, {"max_new_tokens": 4, "ignore_eos": True}
    (turn,) = engine.generate([PROMPTS[0]], short, session_params=session)
    with pytest.raises(InvalidRequestError) as error:
        engine.score([[5, 6]], [[7, 8, 9]], session_params=session | {"rid": turn.rid})
    assert error.value.param == "session_params"
