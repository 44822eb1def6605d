"""Models with windows or states through the whole engine: sessions with roll back and fork, drafts,
retracts, replay of the recording, memory at rest."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from sgl_jax.replay.__main__ import main as replay

GOLDEN = Path(__file__).parents[1] / "golden"
PAGE_SIZE = 4
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "context_length": 256,
    "max_running_requests": 4,
    "max_total_tokens": 768,
    "chunked_prefill_size": 16,
    "page_size": PAGE_SIZE,
    "warmup": "none",
    "check_memory": "busy",
}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}


# Windows that share a pool with the other layers, windows with one of their own, and states.
FAMILIES = ("gpt_oss", "gemma3", "qwen3_next", "qwen3_5")
# How weights are stored and what a layer caches meet in the layers alone, where the golden data of
# `tests/models` has each pair: here each scheme has one family. Groups of 128 inputs of int4 fit
# none with states; and how a prompt is cut changes a state in its last bits, from which 8-bit
# activations of qwen3_next are rounded to other numbers.
QUANTIZED = [
    *(("gpt_oss_mxfp4", "none"), ("qwen3_next", "int8"), ("qwen3_5", "fp8"), ("gemma3", "int4")),
    *(("qwen3_5", "w8a8_int8"), ("gemma3", "w8a8_fp8")),
]
MODELS = [*[(family, "none") for family in FAMILIES], *QUANTIZED]
BY_DEFAULT = ("qwen3_5", "none")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(own, id="-".join(own), marks=() if own == BY_DEFAULT else pytest.mark.long)
        for own in MODELS
    ],
)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The engine's arguments for a model and its quantization."""
    family, quantization = request.param
    return {"model_path": str(GOLDEN / family), "quantization": quantization}


@pytest.fixture(scope="module")
def engine(model: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**model, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Longer than any window, and two that repeat themselves, of which drafts are accepted."""
    rng = random.Random(5)
    vocab_size = engine.info["vocab_size"]
    drawn = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (70, 45, 9)]
    return [*drawn, drawn[1][:10] * 6, [25, 115, 172] * 20]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return outputs(engine, prompts)


def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    answers = engine.generate(input_ids=prompts, sampling_params=GREEDY, progress=False)
    return [answer.output_ids for answer in answers]


def turn(engine: Engine, session_id: str, ids: list[int]) -> Generation:
    (result,) = engine.generate(
        input_ids=[ids], sampling_params=GREEDY, session_params={"id": session_id}
    )
    return result


def check_at_rest(engine: Engine) -> None:
    """Each pool's pages are free or the tree's, and all are free after a flush."""
    for flushed in (False, True):
        if flushed:
            assert engine.flush_cache()
        for rank in engine.server_info()["ranks"]:
            for pool in rank["pools"]:
                assert pool["leased_pages"] == pool["session_held_pages"] == 0
                assert pool["protected_pages"] == 0
                owned = ("free_pages", "cached_pages", "reserved_pages")
                assert sum(pool[name] for name in owned) == pool["total_pages"]
                assert not flushed or pool["cached_pages"] == 0
            assert rank["free_rows"] == rank["total_rows"]


def test_turns_roll_backs_and_forks_say_what_the_whole_conversation_says(
    engine: Engine, prompts: list[list[int]]
) -> None:
    session_id = engine.open_session(streaming=True)
    histories: list[list[int]] = [[]]
    for new in (prompts[0], prompts[2], prompts[1]):
        result = turn(engine, session_id, new)
        assert result.cached_tokens >= max(len(histories[-1]) - 1, 0)
        histories.append(histories[-1] + new + result.output_ids)
        assert result.output_ids == outputs(engine, [histories[-2] + new])[0]
    fork = engine.fork_session(session_id, "the fork")
    # To the end of the last turn, where all windows and the state are there; behind what they have
    # passed; and to the first turn.
    for num_turns in (3, 2, 1):
        engine.rollback_session(session_id, num_turns)
        history = histories[num_turns]
        assert turn(engine, session_id, [7, 8]).output_ids == outputs(engine, [[*history, 7, 8]])[0]
    theirs = turn(engine, fork, [9])
    assert theirs.output_ids == outputs(engine, [[*histories[3], 9]])[0]
    for each in (session_id, fork):
        engine.close_session(each)
    check_at_rest(engine)


def test_a_prefix_of_what_is_cached_is_gone_on_with(
    engine: Engine, prompts: list[list[int]]
) -> None:
    engine.flush_cache()
    long = prompts[0]
    (alone,) = outputs(engine, [long])
    for cut in (64, 40, 13):
        branch = [*long[:cut], 5, 6, 7]
        engine.flush_cache()
        (fresh,) = outputs(engine, [branch])
        engine.flush_cache()
        assert outputs(engine, [long]) == [alone]
        assert outputs(engine, [branch]) == [fresh]
    check_at_rest(engine)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            DRAFTS | {"test_retract": True, "test_retract_interval": 4},
            id="drafts, retract",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"disable_radix_cache": True, "disable_overlap_schedule": True},
            id="no tree, no overlap",
            marks=pytest.mark.long,
        ),
    ],
)
def test_settings_change_no_token_and_a_recording_runs_again(
    model: dict[str, Any],
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    recording = tmp_path / "run.events"
    with Engine(**model, **SETTINGS | settings, record_events=str(recording)) as engine:
        assert outputs(engine, prompts) == expected
        session_id = engine.open_session(streaming=True)
        first = turn(engine, session_id, prompts[2])
        assert first.output_ids == expected[2]
        engine.rollback_session(session_id, 0)
        assert turn(engine, session_id, prompts[3]).output_ids == expected[3]
        engine.close_session(session_id)
        counters = engine.server_info()["counters"]
        assert (counters["requests_force_retracted"] > 0) == ("test_retract" in settings)
        # Of a random model's answers, none may continue as the n-gram did before.
        assert (counters["drafted_tokens"] > 0) == ("speculative_algorithm" in settings)
        check_at_rest(engine)
    assert replay([str(recording)]) == 0
