"""Namespaces and priorities of the offline Engine on the demonstration model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import GenerationError

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
PROMPT = list(range(300, 340))  # 40 tokens: two whole pages, and some


@pytest.fixture(scope="module")
def running_engine() -> Iterator[Engine]:
    with Engine(
        DEMO,
        device="cpu",
        context_length=256,
        max_running_requests=4,
        warmup="none",
        check_memory="busy",
    ) as engine:
        yield engine


@pytest.fixture
def engine(running_engine: Engine) -> Iterator[Engine]:
    assert running_engine.flush_cache()
    yield running_engine
    for session in running_engine.list_sessions():
        running_engine.close_session(session["session_id"])


def cached(engine: Engine, **options: Any) -> int:
    """Cached tokens of the prompt; what is generated does not depend on them."""
    (result,) = engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, **options)
    (plain,) = engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, extra_key="judge")
    assert result.output_ids == plain.output_ids
    return result.cached_tokens


def test_a_namespace_finds_its_own_prefixes_by_either_name(engine: Engine) -> None:
    assert cached(engine, extra_key="red") == 0
    assert cached(engine, cache_salt="red") == 32
    assert cached(engine, extra_key="red", cache_salt="red") == 32
    assert cached(engine, cache_salt="blue") == 0
    assert cached(engine) == 0
    assert cached(engine, extra_key="") == 32


def test_a_list_has_one_namespace_and_priority_for_each_prompt(engine: Engine) -> None:
    cached(engine, extra_key="red")
    results = engine.generate(
        input_ids=[PROMPT] * 3,
        sampling_params=GREEDY,
        extra_key=["red", "blue", None],
        priority=[1, None, -5],
    )
    assert [result.cached_tokens for result in results] == [32, 0, 0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"extra_key": "s" * 257}, "must have at most 256 characters, got 257"),
        ({"cache_salt": "\ud800"}, "valid Unicode"),
        ({"extra_key": "a", "cache_salt": "b"}, "send one of them"),
        ({"extra_key": ["a", "b"]}, "extra_key has 2 entries for 1 prompts"),
        ({"extra_key": 5}, "extra_key must be str or a list of them, got 5"),
        ({"priority": 2**31}, r"priority must be in \[-2147483648, 2147483647\], got 2147483648"),
        ({"priority": True}, "priority must be int or a list of them, got True"),
        ({"priority": [1, 2]}, "priority has 2 entries for 1 prompts"),
    ],
)
def test_what_cannot_be_is_refused_and_named(
    engine: Engine, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, **options)


def test_a_session_is_of_the_namespace_that_it_was_opened_in(engine: Engine) -> None:
    cached(engine, extra_key="red")
    session_id = engine.open_session(streaming=True, cache_salt="red")
    params = {"id": session_id}
    assert cached(engine, session_params=params) == 32
    with pytest.raises(GenerationError, match="another cache_salt or extra_key"):
        cached(engine, session_params=params, extra_key="blue")
    fork = engine.fork_session(session_id)
    with pytest.raises(GenerationError, match="another cache_salt or extra_key"):
        cached(engine, session_params={"id": fork}, extra_key="blue")
    engine.close_session(session_id)
    assert cached(engine) == 0
    with pytest.raises(InvalidRequestError, match="send one of them"):
        engine.open_session(extra_key="a", cache_salt="b")
    with pytest.raises(InvalidRequestError, match="at most 256 characters"):
        engine.open_session(extra_key="a" * 257)
