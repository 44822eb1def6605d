"""Several decode steps in one launch give the tokens and log-probabilities of one, bit for bit
unless a retract computes tokens again as a prompt.

One request at a time, one step in a launch, on a device with room for it, gives what is expected.
The engines compared have memory for fewer requests than they get, and retract others on top.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.model_executor import ModelExecutor
from tests.engine.test_windows_and_states import GOLDEN, SETTINGS

FAMILIES = ("gemma3", "gpt_oss", "qwen3_next")
RETRACTS = {"test_retract": True, "test_retract_interval": 3}
PRESSURE = {"max_total_tokens": 200, "schedule_conservativeness": 0.0}
# By default tests/executor has the same of an executor.
VARIANTS = [
    pytest.param(num_steps, settings, id=name, marks=pytest.mark.long)
    for num_steps, settings, name in (
        ("4", {}, "4"),
        ("4", PRESSURE | RETRACTS, "4-all"),
        ("16", RETRACTS, "16-retracts"),
        ("16", PRESSURE, "16-short-of-pages"),
        ("4", {"disable_overlap_schedule": True}, "4-in-series"),
        ("16", {"dp_size": 2}, "16-two-ranks"),
        ("16", PRESSURE | RETRACTS, "16-all"),
    )
]


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(own, marks=pytest.mark.long) for own in FAMILIES[1:])],
)
def make_engine(request: pytest.FixtureRequest) -> Any:
    model = str(GOLDEN / request.param)
    return lambda **settings: Engine(model, **SETTINGS | settings)


def load(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all lengths, drawn in all ways; some end at one of many stop tokens."""
    rng = random.Random(5)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(2, 40))] for _ in range(8)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {
            "temperature": 1.0,
            "seed": 5,
            "stop_token_ids": tuple(range(0, vocab_size, vocab_size // 16 + 1)),
        },
    ]
    params = [
        SamplingParams(max_new_tokens=rng.randrange(1, 50), min_new_tokens=i // 4, **ways[i % 4])
        for i in range(8)
    ]
    return prompts, params


def generate(engine: Engine) -> list[tuple[Any, ...]]:
    prompts, params = load(engine.info["vocab_size"])
    return [
        facts(own)
        for own in engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=3
        )
    ]


def facts(result: Generation) -> tuple[Any, ...]:
    assert result.logprobs is not None
    return result.output_ids, result.finish_reason, result.logprobs


def logprobs_of(results: list[tuple[Any, ...]]) -> list[float]:
    tokens = [token for result in results for token in result[2]]
    return [value for token in tokens for value in (token.logprob, *token.top_logprobs)]


@pytest.fixture(scope="module")
def expected(make_engine: Callable[..., Engine]) -> list[tuple[Any, ...]]:
    with make_engine(num_decode_steps="1") as engine:
        return generate(engine)


@pytest.mark.parametrize(("num_steps", "settings"), VARIANTS)
def test_tokens_and_log_probabilities_are_those_of_one_step(
    make_engine: Callable[..., Engine],
    expected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    num_steps: str,
    settings: dict[str, Any],
) -> None:
    launched: list[int] = []
    launch = ModelExecutor.launch

    def noted(executor: ModelExecutor, plan: StepPlan) -> LaunchedStep:
        steps = [rank.num_steps for rank in plan.ranks if rank.num_steps is not None]
        launched.append(max((int(own.max()) for own in steps if len(own)), default=1))
        return launch(executor, plan)

    monkeypatch.setattr(ModelExecutor, "launch", noted)
    with make_engine(num_decode_steps=num_steps, **settings) as engine:
        got = generate(engine)
        has_states = engine.info["tail_interval"] > 0
    if settings.get("max_total_tokens") or settings.get("test_retract") or has_states:
        # A retracted request computes its output again as a prompt, which rounds otherwise; and
        # with states, which compute one step a launch, prompts of other steps round otherwise.
        assert [own[:2] for own in got] == [own[:2] for own in expected]
        values, others = logprobs_of(got), logprobs_of(expected)
        np.testing.assert_allclose(values, others, atol=1e-4)
    else:
        assert got == expected
    assert max(launched) == (1 if has_states else int(num_steps))
