"""Answers with log-probabilities of long prompts: others' streams do not wait for them."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.front.request_stream import Chunk
from sgl_jax.engine.loop.garbage import collect_seldom
from sgl_jax.server.answer_stream import respond
from sgl_jax.server.apis.native_answers import native_logprobs

REQUEST = GenerateRequest(
    rid="r",
    input_ids=[7] * 700,
    sampling=SamplingParams(),
    return_logprob=True,
    top_logprobs_num=20,
    logprob_start_len=0,
)


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The collections that begin while the process collects seldom."""
    thresholds, begun = gc.get_threshold(), []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            begun.append(f"generation {info['generation']}")

    collect_seldom()
    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_an_answer_with_log_probabilities_of_a_long_prompt_makes_no_collection_due(
    collections: list[str],
) -> None:
    entry = TokenLogprobs(7, -1.0, list(range(20)), [-1.0] * 20)
    received = msgspec.msgpack.encode([entry] * 700)
    collections.clear()
    for _ in range(10):
        entries = msgspec.msgpack.decode(received, type=list[TokenLogprobs])
        assert len(native_logprobs(REQUEST, None, (), entries)["input_top_logprobs"]) == 700
    assert collections == []


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_log_probabilities_of_a_prompt_are_written_beside_the_loop(has_logprobs: bool) -> None:
    entries = [TokenLogprobs(7, -1.0, [], [])] if has_logprobs else []
    threads = []

    class Group:
        is_streaming = False
        headers: ClassVar[dict[str, str]] = {}
        streams: tuple[()] = ()
        request = type("Request", (), {"receive": staticmethod(asyncio.Event().wait)})

        async def collect(self) -> list[Chunk]:
            return [Chunk("", [], 0, [], entries, None)]

    class Format:
        def whole(self, chunks: list[Chunk], streams: tuple[()]) -> int:
            threads.append(threading.current_thread())
            return len(chunks)

    group: Any = Group()
    answer_format: Any = Format()
    assert asyncio.run(respond(group, answer_format)).body == b"1"
    assert (threads[0] is threading.current_thread()) != has_logprobs
