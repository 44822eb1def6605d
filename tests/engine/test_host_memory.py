"""Prefixes that come back from the host's memory: answers are those of an engine with room for all.

One engine has a device pool for every conversation, the other for a few and the host's memory. Both
answer the same turns, one after another, so each finds as much of its history: then tokens and
log-probabilities are equal bit by bit.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine
from tests.waiting import until

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
    "write_through_selective": {"hicache_write_policy": "write_through_selective"},
    "write_back": {"hicache_write_policy": "write_back"},
}
FAMILIES = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5")


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


def answers(engine: Engine) -> tuple[list[Any], list[int]]:
    """Tokens and log-probabilities of each turn, conversations in turns, and the cached tokens."""
    talks = conversations(engine.info["vocab_size"])
    histories: list[list[int]] = [[] for _ in talks]
    said, cached = [], []
    for turn in range(NUM_TURNS):
        for number, talk in enumerate(talks):
            prompt = histories[number] + talk[turn]
            (result,) = engine.generate(
                input_ids=[prompt],
                sampling_params=SAMPLING,
                return_logprob=True,
                progress=False,
            )
            said.append((result.output_ids, [each.logprob for each in result.logprobs]))
            cached.append(result.cached_tokens)
            histories[number] = prompt + result.output_ids
    return said, cached


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


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Compares two engines, which share their compiled programs."""
    return partial(compare_engines, tmp_path_factory.mktemp("compiled"))


def compare_engines(cache: Path, model: Path, **case: Any) -> None:
    settings = SETTINGS | {"page_size": 16, "model_path": str(model)} | case
    settings["compilation_cache_dir"] = str(cache)
    small = settings.pop("max_total_tokens", SMALL)
    with Engine(**settings, max_total_tokens=LARGE) as engine:
        expected, most_cached = answers(engine)
    with Engine(
        **settings, max_total_tokens=small, enable_hierarchical_cache=True, hicache_ratio=20.0
    ) as engine:
        said, cached = answers(engine)
        until(lambda: not is_moving(engine), "transfers end")
        counters = engine.server_info()["counters"]
        check_at_rest(engine)
    assert counters["evicted_pages"] > 0
    assert counters["host_fetched_tokens"] > 0
    assert counters["host_failed_transfers"] == 0
    if case.get("hicache_write_policy") == "write_through_selective":
        # A prefix that nothing has found yet is not there, and is computed in other chunks.
        assert [tokens for tokens, _ in said] == [tokens for tokens, _ in expected]
        return
    assert cached == most_cached
    assert said == expected


def is_moving(engine: Engine) -> bool:
    ranks = engine.server_info()["ranks"]
    pools = [pool for rank in ranks for pool in rank["host_pools"]]
    is_copying = any(rank["host_copies_waiting"] for rank in ranks)
    return is_copying or any(pool["arriving_blocks"] or pool["leaving_blocks"] for pool in pools)


@pytest.mark.parametrize("case", long_but(CASES, "two ranks"))
def test_a_prefix_from_the_host_is_worth_the_computed_one(
    compare: Callable[..., None], case: str
) -> None:
    compare(GOLDEN / "qwen3", **CASES[case])


@pytest.mark.parametrize("family", long_but(FAMILIES, "qwen3_5"))
def test_windows_and_states_come_back_too(compare: Callable[..., None], family: str) -> None:
    compare(GOLDEN / family)
