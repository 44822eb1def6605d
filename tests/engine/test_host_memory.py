"""Prefixes that come back from host memory: answers are those of an engine with room for all.

One engine has a device pool for every conversation, the other for a few and host memory. Both
answer the same turns, one after another, so each finds as much of its history: then tokens and
log-probabilities are equal bit by bit.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from tests.support.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_CONVERSATIONS, NUM_TURNS = 5, 3
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "context_length": 256,
    "max_running_requests": 2,
    "chunked_prefill_size": 64,
    "warmup": "none",
    "hicache_fetch_policy": "always",
    "check_memory": "busy",
}
SMALL, LARGE = 320, 4096  # tokens of a rank's pool
POLICIES = ("write_through", "write_through_selective", "write_back")
CASES: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1},
    "pages of 128": {"page_size": 128, "max_total_tokens": 384},
    "two ranks": {"dp_size": 2, "max_running_requests": 4},
    "two chips": {"tp_size": 2},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "8-bit KV": {"kv_cache_dtype": "fp8_e4m3"},
    "no overlap": {"disable_overlap_schedule": True},
    "chunks of 8": {"chunked_prefill_size": 8},
    "write_through_selective": {"hicache_write_policy": "write_through_selective"},
    "write_back": {"hicache_write_policy": "write_back"},
}
SESSION_CASES = {"pages of 16": {}} | {
    name: CASES[name]
    for name in ("pages of 1", "drafts", "8-bit KV", "no overlap", "write_back", "chunks of 8")
}
FAMILIES = (
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa_reuse",
    "kimi_linear",
)


def long_but(names: Iterable[str], by_default: str) -> list[Any]:
    """The names as parameters; all but one are for the long run."""
    marks = {name: () if name == by_default else pytest.mark.long for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def conversations(vocab_size: int) -> list[list[list[int]]]:
    """What users say: a long first turn, of which two have a common beginning, and short ones."""
    rng = random.Random(3)
    stem = [rng.randrange(3, vocab_size) for _ in range(48)]
    talks = []
    for number in range(NUM_CONVERSATIONS):
        lengths = [rng.randrange(130, 170), *(rng.randrange(3, 20) for _ in range(NUM_TURNS - 1))]
        turns = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
        turns[0][: len(stem) * (number < 2)] = stem * (number < 2)
        talks.append(turns)
    return talks


Answers: TypeAlias = tuple[list[Any], list[int]]  # tokens with log-probabilities; cached tokens


def answer(engine: Engine, prompt: list[int], **options: Any) -> Generation:
    """The answer to one prompt, once all transfers have ended."""
    until(lambda: not is_moving(engine), "transfers end")
    (result,) = engine.generate(
        input_ids=[prompt],
        sampling_params=SAMPLING,
        return_logprob=True,
        progress=False,
        **options,
    )
    return result


def answers(engine: Engine) -> Answers:
    """The answer to each turn, conversations in turns."""
    talks = conversations(engine.info["vocab_size"])
    histories: list[list[int]] = [[] for _ in talks]
    results = []
    for turn in range(NUM_TURNS):
        for number, talk in enumerate(talks):
            prompt = histories[number] + talk[turn]
            results.append(answer(engine, prompt))
            histories[number] = prompt + results[-1].output_ids
    return compared(results)


def answers_at_once(engine: Engine) -> Answers:
    """The answer to each turn, which all conversations begin together."""
    talks = conversations(engine.info["vocab_size"])
    histories: list[list[int]] = [[] for _ in talks]
    results: list[Generation] = []
    for turn in range(NUM_TURNS):
        prompts = [past + talk[turn] for past, talk in zip(histories, talks, strict=True)]
        found = engine.generate(input_ids=prompts, sampling_params=SAMPLING, return_logprob=True)
        histories = [past + one.output_ids for past, one in zip(prompts, found, strict=True)]
        results += found
    return compared(results)


def session_answers(engine: Engine) -> Answers:
    """The answer to each turn of sessions, of which two are forks; each goes back now and then.

    A turn goes back in its session at once, or after turns of more others than there are rows: so
    both engines have evicted the session by then, or neither.
    """
    talks = conversations(engine.info["vocab_size"])
    sessions = [engine.open_session(streaming=True) for _ in talks]
    results = []

    def say(session_id: str, new: list[int]) -> None:
        results.append(answer(engine, new, session_params={"id": session_id}))

    for turn in range(NUM_TURNS):
        for number, (session_id, talk) in enumerate(zip(sessions, talks, strict=False)):
            say(session_id, talk[turn])
            if (turn + number) % 2:
                engine.rollback_session(session_id, turn)
                # The same turn once more, or another one.
                say(session_id, talk[turn] if number % 2 else talk[turn][1:])
        if turn == 0:
            sessions += [engine.fork_session(each) for each in sessions[:2]]
            talks += [[[5], *talk[1:]] for talk in talks[2:4]]
        else:
            engine.rollback_session(sessions[turn], 1)
    for session_id in sessions:
        engine.close_session(session_id)
    return compared(results)


def compared(results: list[Generation]) -> Answers:
    """The parts of these that two engines have in common."""
    said = [(each.output_ids, [one.logprob for one in each.logprobs]) for each in results]
    return said, [each.cached_tokens for each in results]


def check_at_rest(engine: Engine) -> None:
    """Nothing is leased, arriving or leaving; all is free after a flush."""
    for flushed in (False, True):
        if flushed:
            assert engine.flush_cache()
        for rank in engine.server_info()["ranks"]:
            assert rank["leased_pages"] == rank["protected_pages"] == 0
            for pool in rank["host_pools"]:
                assert pool["arriving_blocks"] == pool["leaving_blocks"] == 0
                assert pool["free_blocks"] + pool["cached_blocks"] + 1 == pool["total_blocks"]
                assert not flushed or pool["cached_blocks"] == 0


def compare(
    model: Path,
    talk: Callable[[Engine], Answers] = answers,
    *,
    is_exact: bool = True,
    **case: Any,
) -> dict[str, int]:
    """Both engines give the same answers; unless `is_exact`, the chunks of prompts may differ, and
    with them the log-probabilities' last bits. Returns the small engine's counters."""
    settings = SETTINGS | {"page_size": 16, "model_path": str(model)} | case
    small = settings.pop("max_total_tokens", SMALL)
    with Engine(**settings, max_total_tokens=LARGE) as engine:
        expected, most_cached = talk(engine)
    with Engine(
        **settings, max_total_tokens=small, enable_hierarchical_cache=True, hicache_ratio=20.0
    ) as engine:
        said, cached = talk(engine)
        until(lambda: not is_moving(engine), "transfers end")
        counters: dict[str, int] = engine.server_info()["counters"]
        check_at_rest(engine)
    assert counters["evicted_pages"] > 0
    assert counters["host_fetched_tokens"] > 0
    assert counters["host_failed_transfers"] == 0
    if is_exact:
        assert cached == most_cached
        assert said == expected
    else:
        assert [tokens for tokens, _ in said] == [tokens for tokens, _ in expected]
        for (_, logprobs), (_, wanted) in zip(said, expected, strict=True):
            assert logprobs == pytest.approx(wanted, abs=1e-4)
    return counters


def is_moving(engine: Engine) -> bool:
    ranks = engine.server_info()["ranks"]
    pools = [pool for rank in ranks for pool in rank["host_pools"]]
    is_copying = any(rank["host_copies_waiting"] for rank in ranks)
    return is_copying or any(pool["arriving_blocks"] or pool["leaving_blocks"] for pool in pools)


# By default the sessions below and test_block_store have prefixes that come back.
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_prefix_from_the_host_is_worth_the_computed_one(case: str) -> None:
    # With the selective policy a prefix that nothing has found yet is computed anew.
    compare(GOLDEN / "qwen3", is_exact=case != "write_through_selective", **CASES[case])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
def test_windows_and_states_come_back_too(family: str) -> None:
    compare(GOLDEN / family)


@pytest.mark.parametrize("case", long_but(SESSION_CASES, "chunks of 8"))
def test_sessions_that_go_back_and_fork_find_their_prefixes_on_the_host(case: str) -> None:
    compare(GOLDEN / "qwen3", session_answers, session_memory_fraction=1.0, **SESSION_CASES[case])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_states_of_sessions_come_back_too(family: str) -> None:
    compare(GOLDEN / family, session_answers, session_memory_fraction=1.0, **CASES["chunks of 8"])


@pytest.mark.long
def test_retracted_requests_find_their_prefixes_on_the_host() -> None:
    settings = CASES["chunks of 8"] | {"test_retract": True}
    counters = compare(GOLDEN / "qwen3", answers_at_once, is_exact=False, **settings)
    assert counters["requests_force_retracted"] > 0
