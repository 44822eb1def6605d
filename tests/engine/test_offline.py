"""The offline Engine on the demonstration model: results, streams, and what it survives."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.errors import EngineDeadError, EngineStuckError, InvalidRequestError
from sgl_jax.core.messages import Shutdown
from sgl_jax.core.sampling_params import choice_seed
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import GenerationError

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings: dict[str, Any] = {"device": "cpu", "context_length": 256, "max_running_requests": 4}
    with Engine(DEMO, warmup="none", check_memory="busy", **settings) as engine:
        yield engine


def assert_at_rest(engine: Engine) -> None:
    (rank,) = engine.server_info()["ranks"]
    assert rank["leased_pages"] == 0
    assert rank["free_pages"] + rank["cached_pages"] + rank["reserved_pages"] == rank["total_pages"]


def test_one_prompt_gives_one_generation_and_a_list_gives_a_list(engine: Engine) -> None:
    alone = engine.generate("Hello", GREEDY)
    listed = engine.generate(["Hello", "Good day"], [GREEDY, {**GREEDY, "max_new_tokens": 3}])
    assert alone.output_ids == listed[0].output_ids
    assert len(listed[1].output_ids) == 3
    assert alone.finish_reason is not None
    assert alone.finish_reason.type == "length"


def test_text_and_its_token_ids_are_the_same_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("Tell me more")
    by_ids = engine.generate(input_ids=[ids], sampling_params=GREEDY)
    assert by_ids[0].text == engine.generate("Tell me more", GREEDY).text


def test_a_stream_ends_with_what_generate_returns(engine: Engine) -> None:
    steps = list(engine.stream("Hello", GREEDY))
    assert steps[-1].output_ids == engine.generate("Hello", GREEDY).output_ids
    assert [s.finish_reason is None for s in steps] == [True] * (len(steps) - 1) + [False]


def test_async_streams_run_side_by_side(engine: Engine) -> None:
    async def both() -> list[list[int]]:
        whole = asyncio.create_task(engine.async_generate("Hello", GREEDY))
        steps = [step.output_ids async for step in engine.async_stream("Good day", GREEDY)]
        assert list(map(len, steps)) == sorted(map(len, steps))
        return [(await whole).output_ids, steps[-1]]

    expected = [g.output_ids for g in engine.generate(["Hello", "Good day"], GREEDY)]
    assert asyncio.run(both()) == expected


def test_samples_of_a_prompt_compute_it_once_and_have_different_seeds(engine: Engine) -> None:
    prompt = [300 + i % 40 for i in range(70)]
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True, "seed": 5}
    results = engine.generate([prompt, [7, 8]], [sampling | {"n": 3}, sampling])
    seeds = [choice_seed(5, choice) for choice in range(3)]
    listed = engine.generate([prompt] * 3, [sampling | {"seed": seed} for seed in seeds])
    assert [each.output_ids for each in results[:3]] == [each.output_ids for each in listed]
    assert len({tuple(each.output_ids) for each in results[:3]}) == 3
    assert len(results) == 4
    assert sorted(each.cached_tokens for each in results[:3])[1] >= 70 - engine.info["page_size"]


@pytest.mark.parametrize("n", [0, 129, 1.5, None])
def test_a_number_of_samples_out_of_range_is_refused(engine: Engine, n: Any) -> None:
    with pytest.raises(InvalidRequestError, match="n must be 1 to 128"):
        engine.generate("Hello", GREEDY | {"n": n})


def test_results_come_as_they_end(engine: Engine) -> None:
    lengths = [40, 3, 20]
    sampling = [GREEDY | {"max_new_tokens": length} for length in lengths]
    ended = list(engine.as_completed(["Hello"] * 3, sampling))
    assert [index for index, _ in ended] == [1, 2, 0]
    assert [len(result.output_ids) for _, result in ended] == [3, 20, 40]
    for _ in engine.as_completed("Hello", GREEDY | {"max_new_tokens": 200, "n": 2}):
        break
    engine.generate("Hello", GREEDY)
    assert_at_rest(engine)


def test_leaving_a_stream_early_gives_its_memory_back(engine: Engine) -> None:
    for _ in engine.stream("Hello", {**GREEDY, "max_new_tokens": 200}):
        break
    engine.generate("Hello", GREEDY)
    assert_at_rest(engine)


def test_log_probabilities_come_for_output_and_prompt(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("The code of Anna is 4 7 1.")
    (result,) = engine.generate(
        input_ids=[prompt],
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=0,
    )
    assert [entry.token_id for entry in result.logprobs] == result.output_ids
    assert [entry.token_id for entry in result.prompt_logprobs] == prompt
    assert result.prompt_logprobs[0].logprob is None
    for entry in result.logprobs:  # greedy: the token chosen is the most likely one
        assert entry.top_ids[0] == entry.token_id
        assert entry.top_logprobs[0] == pytest.approx(entry.logprob)
    ids = result.logprobs[0].top_ids
    (named,) = engine.generate(
        input_ids=[prompt],
        sampling_params=GREEDY,
        return_logprob=True,
        token_ids_logprob=ids,
        logprob_start_len=0,
    )
    assert named.logprobs[0].id_logprobs == pytest.approx(result.logprobs[0].top_logprobs)
    for pair in ("logprobs", "prompt_logprobs"):
        for entry, told in zip(getattr(named, pair), getattr(result, pair), strict=True):
            assert len(entry.id_logprobs) == (3 if entry.logprob is not None else 0)
            shared = set(told.top_ids) & set(ids)
            for token in shared:
                value = told.top_logprobs[told.top_ids.index(token)]
                assert entry.id_logprobs[ids.index(token)] == pytest.approx(value, abs=1e-4)
    # The prompt is scored as its own continuation would be.
    (check,) = engine.generate(
        input_ids=[prompt[:-1]],
        sampling_params={**GREEDY, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=1,
    )
    assert check.logprobs[0].top_ids == result.prompt_logprobs[-1].top_ids[:1]
    assert check.logprobs[0].top_logprobs[0] == pytest.approx(
        result.prompt_logprobs[-1].top_logprobs[0], abs=1e-4
    )


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_log_probabilities_are_those_of_the_sampled_distribution(
    engine: Engine, temperature: float
) -> None:
    """As a trainer computes them: softmax of logits divided by the temperature."""
    sampling = {"temperature": temperature, "top_p": 0.9, "top_k": 12, "seed": 3}
    sampling |= {"max_new_tokens": 8}

    def told(**options: Any) -> list[Any]:
        named = {"token_ids_logprob": list(range(64)), "top_logprobs_num": 20}
        result = engine.generate("The code of", sampling, return_logprob=True, **named, **options)
        return list(result.logprobs)

    raw, scaled, processed = (told(logprobs_mode=m) for m in ("raw", "scaled", "processed"))
    for model, tempered, kept in zip(raw, scaled, processed, strict=True):
        assert model.token_id == tempered.token_id == kept.token_id
        # A softmax is known by its ratios, and by its sum.
        ratios = np.subtract(model.id_logprobs, model.logprob) / temperature
        assert np.subtract(tempered.id_logprobs, tempered.logprob) == pytest.approx(
            ratios, abs=2e-5
        )
        probs = np.exp(tempered.top_logprobs)
        num_kept = int(np.isfinite(kept.top_logprobs).sum())
        mass = probs[:num_kept].sum()
        assert num_kept <= 12
        assert mass - probs[num_kept - 1] < 0.9
        assert kept.logprob == pytest.approx(tempered.logprob - np.log(mass), abs=2e-5)
    assert told() == scaled


@pytest.mark.parametrize(
    "edge",
    [
        {"top_p": 1e-46, "temperature": 1e4},
        {"top_p": 1e-44, "temperature": 1e4},
        {"temperature": 2e-38, "top_p": 0.9},
        {"temperature": 5e-324, "top_k": 5},
    ],
    ids=str,
)
def test_values_that_float32_cannot_hold_leave_the_likeliest_token(
    engine: Engine, edge: dict[str, float]
) -> None:
    random = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    greedy = engine.generate("Hello", {**random, "temperature": 0.0}).output_ids
    assert engine.generate("Hello", {**random, **edge}).output_ids == greedy


def test_same_seed_same_answer_beside_other_requests(engine: Engine) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    alone = engine.generate("Hello", sampling).output_ids
    crowd = engine.generate(["Hello", "a", "b", "c"], [sampling] + [{"seed": 1}] * 3)
    assert crowd[0].output_ids == alone
    assert engine.generate("Hello", {**sampling, "seed": 6}).output_ids != alone


@pytest.mark.parametrize(
    ("prompt", "sampling", "match"),
    [
        ("", {}, "empty"),
        ("hi", {"temperature": -1}, "temperature"),
        ("hi", {"min_new_tokens": 400, "max_new_tokens": 400}, "exceed the 256 tokens"),
        ("hi", {"nonsense": 1}, "nonsense"),
        ([99999], {}, "outside the vocabulary"),
    ],
)
def test_a_bad_request_is_refused_and_named(
    engine: Engine, prompt: str, sampling: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        engine.generate([prompt], sampling)
    assert_at_rest(engine)


def test_a_failed_step_ends_its_requests_and_the_engine_lives_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate("Hello", GREEDY).output_ids
    executor = engine._engine.core.executor
    launch, calls = executor.launch, []

    def fail_third(plan: object) -> object:
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return launch(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "launch", fail_third)
    with pytest.raises(GenerationError, match="injected"):
        engine.generate("Hello", GREEDY)
    assert engine.generate("Hello", GREEDY).output_ids == expected
    assert_at_rest(engine)


def test_a_flat_list_of_ids_is_refused_with_the_form_that_is_allowed(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="list of prompts"):
        engine.generate(input_ids=[1, 2, 3])


def test_an_engine_in_python_has_one_host() -> None:
    with pytest.raises(ValueError, match="has one host"):
        Engine(DEMO, nnodes=2, dp_size=2)


def test_more_prompts_than_a_server_would_queue_are_all_served(engine: Engine) -> None:
    assert engine.info["num_rows"] - 1 == 4
    results = engine.generate(["a"] * 300, {**GREEDY, "max_new_tokens": 2})
    assert len({tuple(result.output_ids) for result in results}) == 1


def test_more_prompts_than_the_engine_holds_are_refused() -> None:
    settings: dict[str, Any] = {"device": "cpu", "context_length": 64, "max_running_requests": 1}
    with Engine(DEMO, warmup="none", max_queued_requests=1, **settings) as engine:
        with pytest.raises(InvalidRequestError, match="at most 2, got 5"):
            engine.generate(["a"] * 5, GREEDY)
        assert_at_rest(engine)


def test_flush_empties_the_prefix_cache(engine: Engine) -> None:
    engine.generate("A prompt that is long enough to fill a page of sixteen tokens", GREEDY)
    assert engine.server_info()["ranks"][0]["cached_pages"] > 0
    assert engine.flush_cache()
    assert engine.server_info()["ranks"][0]["cached_pages"] == 0


def test_an_engine_in_this_process_has_a_heartbeat_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate("Hello", GREEDY)
    deadline = time.monotonic() + 10
    while engine._engine.health.turn_s is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine._engine.health.turn_s is not None
    assert engine.check_health() < 10
    monkeypatch.setattr(engine._engine.health, "_timeout_s", -1.0)
    with pytest.raises(EngineStuckError):
        engine.check_health()


def test_after_the_engine_ended_requests_fail_at_once() -> None:
    engine = Engine(DEMO, device="cpu", context_length=64, warmup="none")
    engine._engine._channel.inbox.put(Shutdown())
    engine._engine._thread.join(timeout=60)
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.check_health()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate("Hello", GREEDY)
