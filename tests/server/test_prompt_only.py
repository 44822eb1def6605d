"""Requests that want nothing generated, and prompts that are too long."""

import json

import pytest

from sgl_jax.core.messages import GenerateRequest, StopRequest
from tests.engine.scripted_engine import HISTORY
from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio
PREFILL = {"max_new_tokens": 0}


async def test_a_prompt_is_scored_and_nothing_generated(rig: Rig) -> None:
    body = {
        "input_ids": [70, 71, 72],
        "sampling_params": PREFILL,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    answer = (await rig.http.post("/generate", json=body)).json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [70, 71, 72]
    assert len(meta["input_top_logprobs"]) == 3
    assert (meta["output_token_logprobs"], meta["output_top_logprobs"]) == ([], [])


async def test_nothing_generated_is_one_event_of_a_stream(rig: Rig) -> None:
    body = {"text": "hi", "sampling_params": PREFILL, "stream": True}
    event, done, end = (await rig.http.post("/generate", json=body)).text.split("\n\n")
    answer = json.loads(event.removeprefix("data: "))
    assert (answer["text"], answer["meta_info"]["finish_reason"]["type"]) == ("", "length")
    assert (done, end) == ("data: [DONE]", "")


async def test_a_turn_adds_its_prompt_alone_to_the_session(rig: Rig) -> None:
    await rig.http.post("/open_session", json={"session_id": "s", "streaming": True})
    body = {"text": "hi", "sampling_params": PREFILL, "session_params": {"id": "s"}}
    answer = (await rig.http.post("/generate", json=body)).json()
    assert answer["meta_info"]["prompt_tokens"] > HISTORY
    (request,) = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    await rig.http.get("/list_sessions")  # the engine answers in order
    (stop,) = [m for m in rig.engine.seen if isinstance(m, StopRequest)]
    assert (stop.rid, stop.num_output_tokens) == (request.rid, 0)
    assert stop.session is not None
    assert stop.session.id == "s"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_message_without_output_fills_the_cache(rig: Rig, streams: bool) -> None:
    body = {
        "model": "default",
        "max_tokens": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": streams,
    }
    answer = await rig.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    assert request.is_prompt_only
    if streams:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = events[-2] | events[-2]["delta"] | {"content": []}
        kinds = [event["type"] for event in events]
        assert kinds == ["message_start", "message_delta", "message_stop"]
    else:
        told = answer.json()
    assert (told["content"], told["stop_reason"]) == ([], "max_tokens")
    assert told["usage"]["output_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"input_ids": [5] * 256}, "input_ids"),
        ("/generate", {"text": "word " * 200_000}, "text"),
        (
            "/generate",
            {
                "input_ids": [5] * 200,
                "sampling_params": {"min_new_tokens": 57, "max_new_tokens": 57},
            },
            "sampling_params.min_new_tokens",
        ),
        ("/v1/completions", {"prompt": [5] * 300}, "prompt"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 999, "min_tokens": 998}, "min_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "word " * 300}]},
            "messages",
        ),
    ],
)
async def test_too_long_is_said_in_the_words_that_clients_look_for(
    rig: Rig, path: str, body: dict[str, object], param: str
) -> None:
    answer = await rig.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    for words in ("this model's maximum context length is 256", "maximum allowed length"):
        assert words in error["message"]
