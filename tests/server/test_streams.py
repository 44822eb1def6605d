"""Streams of `/generate`: cumulative and incremental, and clients that do not read them."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import AbortRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {
    "text": 'é"\\\n\u2028 quoted ',
    "sampling_params": {"max_new_tokens": 60, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
    "return_text_in_logprobs": True,
    "return_prompt_token_ids": True,
}
LOGPROBS = [
    f"{part}_{kind}"
    for part in ("output", "input")
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
]


@pytest.fixture
async def rig(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer) as rig:
        rig.engine.step_s = 0.002
        yield rig


async def events(rig: Rig, **fields: Any) -> list[Any]:
    answer = await rig.http.post("/generate", json={**BODY, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def whole(rig: Rig) -> Any:
    return (await rig.http.post("/generate", json=BODY)).json()


def comparable(answer: Any) -> Any:
    meta = {k: v for k, v in answer["meta_info"].items() if k not in ("id", "e2e_latency")}
    return {**answer, "meta_info": meta}


async def test_the_last_cumulative_event_is_the_whole_answer(rig: Rig) -> None:
    streamed = await events(rig)
    assert len(streamed) > 3
    assert comparable(streamed[-1]) == comparable(await whole(rig))
    for before, after in pairwise(streamed):
        assert after["text"].startswith(before["text"])
        for name in LOGPROBS:
            known = before["meta_info"][name]
            assert after["meta_info"][name][: len(known)] == known


@pytest.mark.parametrize("by", ["request", "server"])
async def test_incremental_events_have_each_token_once(rig: Rig, by: str) -> None:
    if by == "server":
        rig.refs.args = dataclasses.replace(rig.refs.args, incremental_streaming_output=True)
    streamed = await events(rig, **({"stream_output": True} if by == "request" else {}))
    expected = await whole(rig)
    assert len(streamed) > 3
    assert "".join(event["text"] for event in streamed) == expected["text"]
    assert [t for event in streamed for t in event["output_ids"]] == expected["output_ids"]
    for name in LOGPROBS:
        entries = [e for event in streamed for e in event["meta_info"].get(name, [])]
        assert entries == expected["meta_info"][name]
    counts = [event["meta_info"]["completion_tokens"] for event in streamed]
    assert counts == sorted(counts)
    assert counts[-1] == 60


async def test_a_client_that_does_not_read_loses_its_requests(rig: Rig) -> None:
    rig.refs.reader_timeout_s = 0.2
    body = {**BODY, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}
    received = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    pieces: list[int] = []

    async def receive() -> Any:
        message = next(received, None)
        if message is None:
            await asyncio.sleep(60)  # the connection stays open
        return message

    async def send(message: Any) -> None:
        pieces.append(len(message.get("body", b"")))
        if len(pieces) == 3:
            await asyncio.sleep(60)  # no room

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
    rig.engine.step_s = 0.02
    async with asyncio.timeout(3):
        await rig.app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)
    assert len(pieces) == 3
    await rig.until_idle()
    assert any(isinstance(message, AbortRequest) for message in rig.engine.seen)


async def test_large_batches_of_events_are_sent_in_pieces(rig: Rig) -> None:
    """Else one write of all answers would wait in memory for a client to read it."""
    body = {**BODY, "text": ["abc " * 20] * 64, "top_logprobs_num": 20, "stream": True}
    received = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    bodies: list[bytes] = []

    async def receive() -> Any:
        message = next(received, None)
        if message is None:
            await asyncio.sleep(60)
        return message

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
    rig.engine.step_s = 0.0
    await rig.app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)
    assert max(map(len, bodies)) <= 64 * 1024
    assert b"".join(bodies).endswith(b"data: [DONE]\n\n")
    assert b"".join(bodies).count(b'"finish_reason":{') == 64
