"""Prefixes that an engine stored in a folder are found by the next one, bit by bit.

The first engine answers conversations and is stopped; then the second is given the same last turns.
Its answers equal those of the first engine, which had all of them on its device.
"""

from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sgl_jax.engine.offline import Engine
from tests.engine.test_host_memory import (
    CASES,
    FAMILIES,
    GOLDEN,
    LARGE,
    SAMPLING,
    SETTINGS,
    check_at_rest,
    conversations,
    is_moving,
)
from tests.support.waiting import until


def settings_with(folder: Path, model: Path, **case: Any) -> dict[str, Any]:
    return {
        **SETTINGS,
        "page_size": 16,
        "model_path": str(model),
        "max_total_tokens": LARGE,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_fetch_policy": "always",
        "hicache_storage_backend": "file",
        "hicache_storage_dir": str(folder / "store"),
        "hicache_storage_prefetch_policy": "wait_complete",
        **case,
    }


def ask(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Tokens, log-probabilities and cached tokens of the answer to each."""
    found = []
    for prompt in prompts:
        (result,) = engine.generate(
            input_ids=[prompt], sampling_params=SAMPLING, return_logprob=True, progress=False
        )
        logprobs = [each.logprob for each in result.logprobs]
        found.append((result.output_ids, logprobs, result.cached_tokens))
    return found


def two_engines(settings: dict[str, Any]) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The answers of the first engine to last turns, and the second's, with its counters."""
    with Engine(**settings) as engine:
        talks = conversations(engine.info["vocab_size"])
        first = [talk[0] for talk in talks]
        answers = ask(engine, first)
        last = [
            prompt + answer[0] + talk[1]
            for prompt, answer, talk in zip(first, answers, talks, strict=True)
        ]
        ask(engine, last)
        # The store has all of these but a last token, which each engine computes alike.
        last = [[*prompt, 5] for prompt in last]
        expected = ask(engine, last)
        until(lambda: not is_moving(engine), "transfers end")
        assert engine.server_info()["counters"]["store_put_blocks"] > 0
    with Engine(**settings) as engine:
        found = ask(engine, last)
        until(lambda: not is_moving(engine), "transfers end")
        counters = engine.server_info()["counters"]
        check_at_rest(engine)
    return expected, found, counters


# By default, the test of other sizes below runs.
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_second_engine_finds_what_the_first_one_stored(tmp_path: Path, case: str) -> None:
    given = {name: value for name, value in CASES[case].items() if name != "hicache_write_policy"}
    expected, found, counters = two_engines(
        settings_with(tmp_path, GOLDEN / "qwen3", **given | {"max_total_tokens": LARGE})
    )
    assert counters["store_loaded_tokens"] > 0
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == [each[2] for each in expected]


Sizes: TypeAlias = tuple[int, int]  # chips, and tokens of a page


def other_sizes(
    folder: Path, family: str, writer: Sizes, reader: Sizes, *, num_restored: int | None = None
) -> tuple[list[int], dict[str, int]]:
    """Cached tokens and counters of an engine that answers prompts of 129 tokens, which an engine
    of other sizes has answered. Answers must be equal. With `num_restored`, the second engine
    restores the first one's cache, and loads so many tokens before the first prompt."""
    outputs, cached = [], []
    saves = {} if num_restored is None else {"restore_cache": str(folder / "saved")}
    for tp_size, page_size in (writer, reader):
        sizes = {"tp_size": tp_size, "page_size": page_size}
        with Engine(**settings_with(folder, GOLDEN / family, **sizes, **saves)) as engine:
            if outputs and num_restored is not None:
                until(lambda: num_loaded(engine) == num_restored, "prefixes are restored")
            talks = conversations(engine.info["vocab_size"])
            found = ask(engine, [talk[0][:129] for talk in talks[1:4]])
            until(lambda: not is_moving(engine), "transfers end")
            counters = engine.server_info()["counters"]
            if outputs or not saves:  # else the flush would leave nothing to save
                check_at_rest(engine)
        outputs.append([each[0] for each in found])
        cached = [each[2] for each in found]
    assert outputs[0] == outputs[1]
    return cached, counters


def num_loaded(engine: Engine) -> int:
    """The tokens loaded from the store, once nothing moves."""
    until(lambda: not is_moving(engine), "transfers end")
    num_tokens: int = engine.server_info()["counters"]["store_loaded_tokens"]
    return num_tokens


def check_all_found(folder: Path, family: str, writer: Sizes, reader: Sizes) -> None:
    cached, counters = other_sizes(folder, family, writer, reader)
    assert cached == [128, 128, 128]
    assert counters["store_loaded_tokens"] == sum(cached)


@pytest.mark.long
def test_an_engine_with_more_chips_and_larger_pages_finds_stored_prefixes(tmp_path: Path) -> None:
    check_all_found(tmp_path, "qwen3", (1, 16), (2, 32))


@pytest.mark.parametrize(
    ("family", "writer", "reader"),
    [
        ("qwen3", (1, 16), (2, 32)),
        pytest.param("llama", (2, 32), (4, 64), marks=pytest.mark.long),
        pytest.param("gemma3", (2, 32), (1, 16), marks=pytest.mark.long),
        pytest.param("gpt_oss", (1, 64), (2, 16), marks=pytest.mark.long),
        pytest.param("qwen3_next", (2, 32), (1, 16), marks=pytest.mark.long),
        pytest.param("deepseek_v3", (1, 16), (4, 64), marks=pytest.mark.long),
    ],
)
def test_an_engine_of_other_sizes_restores_a_saved_cache(
    tmp_path: Path, family: str, writer: Sizes, reader: Sizes
) -> None:
    cached, counters = other_sizes(tmp_path, family, writer, reader, num_restored=3 * 128)
    assert cached == [128, 128, 128]
    assert counters["store_loaded_tokens"] == 3 * 128


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_an_engine_with_fewer_chips_and_smaller_pages_finds_stored_prefixes(
    tmp_path: Path, family: str
) -> None:
    check_all_found(tmp_path, family, (2, 32), (1, 16))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_5"])
def test_an_engine_with_copies_of_heads_finds_stored_prefixes(tmp_path: Path, family: str) -> None:
    tp_size = 2 if family == "qwen3_5" else 4  # of its 2 recurrent key heads there are no copies
    check_all_found(tmp_path, family, (1, 16), (tp_size, 64))


@pytest.mark.long
def test_a_window_within_a_larger_page_is_a_counted_miss(tmp_path: Path) -> None:
    """The store has the window before a prefix's end, but not all of the reader's page."""
    cached, counters = other_sizes(tmp_path, "gemma3", (1, 16), (1, 64))
    assert cached == [0, 0, 0]
    assert counters["store_misses_not_resumable"] == 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
def test_windows_and_states_are_stored_too(tmp_path: Path, family: str) -> None:
    expected, found, counters = two_engines(settings_with(tmp_path, GOLDEN / family))
    assert counters["store_loaded_tokens"] > 0
    assert found == expected


@pytest.mark.long
def test_blocks_of_other_weights_are_not_found(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, GOLDEN / "qwen3", load_format="dummy")
    prompt = conversations(200)[0][0]
    with Engine(**settings, random_seed=1) as engine:
        ask(engine, [prompt])
        until(lambda: not is_moving(engine), "transfers end")
    with Engine(**settings, random_seed=2) as engine:
        assert ask(engine, [prompt])[0][2] == 0
        until(lambda: not is_moving(engine), "transfers end")
    with Engine(**settings, random_seed=1) as engine:
        assert ask(engine, [prompt])[0][2] > 100
