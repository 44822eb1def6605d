"""Sessions over HTTP: what reaches the engine, and what clients are told."""

from typing import Any

import msgspec
import openai
import pytest

from sgl_jax.core.messages import (
    CancelCall,
    CloseSession,
    ForkSession,
    GenerateRequest,
    OpenSession,
    SessionTurn,
)
from sgl_jax.core.request_limits import MAX_RID_CHARS
from tests.engine.scripted_engine import FULL_SEED, HISTORY, MAX_SESSIONS
from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi there"}]


async def post(rig: Rig, path: str, **fields: Any) -> Any:
    answer = await rig.http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def call_and_leave(rig: Rig, path: str, fields: dict[str, Any]) -> int:
    """Send a request and close the connection at once; the status that is not read."""
    received = iter([{"type": "http.request", "body": msgspec.json.encode(fields)}])
    statuses = []

    async def receive() -> dict[str, Any]:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await rig.app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)
    (status,) = statuses
    return int(status)


def sent(rig: Rig, kind: type) -> Any:
    """The last message of this kind that the engine saw."""
    return [message for message in rig.engine.seen if isinstance(message, kind)][-1]


def sent_turn(rig: Rig) -> SessionTurn:
    """Of the last request, without what the frontend adds to it."""
    request = sent(rig, GenerateRequest)
    assert request.rid.startswith(f"{request.session.name}#")
    assert request.session.bos_token_id == rig.front.tokenizer.bos_token_id
    return msgspec.structs.replace(request.session, name=None, bos_token_id=None)


async def test_a_session_is_opened_under_its_id_or_a_new_one(rig: Rig) -> None:
    assert await post(rig, "/open_session", capacity_of_str_len=1000, session_id="mine") == "mine"
    first = await post(rig, "/open_session", capacity_of_str_len=50, streaming=True, timeout=5)
    opened = sent(rig, OpenSession)
    assert msgspec.structs.replace(opened, rid="") == OpenSession(
        rid="", session_id=first, streaming=True, capacity_of_str_len=50, timeout_s=5.0
    )
    assert first != await post(rig, "/open_session")


async def test_one_session_too_many_is_a_503_that_says_so(rig: Rig) -> None:
    for _ in range(MAX_SESSIONS):
        await post(rig, "/open_session")
    answer = await rig.http.post("/open_session", json={})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("too many", "too_many_sessions")


@pytest.mark.parametrize("path", ["/open_session", "/fork_session"])
@pytest.mark.parametrize("end", ["too late", "client gone"])
async def test_a_session_whose_id_no_client_has_learnt_is_not_opened(
    rig: Rig, path: str, end: str
) -> None:
    """Else no client could close it, and it would count among those that may be open."""
    await post(rig, "/open_session", session_id="mine", streaming=True)
    fields = {"session_id": "mine"} if path == "/fork_session" else {}
    rig.engine.stand_still()
    if end == "too late":
        rig.refs.answer_timeout_s = 0.05
        answer = await rig.http.post(path, json=fields)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "call_cancelled"
        assert "no answer within 0.05 s; the call is cancelled, or undone" in error["message"]
    else:
        assert await call_and_leave(rig, path, fields) == 499
    rig.refs.answer_timeout_s = 30.0
    rig.engine.go_on()
    listed = await post(rig, "/list_sessions")
    assert [entry["session_id"] for entry in listed["sessions"]] == ["mine"]
    cancelled = sent(rig, ForkSession if fields else OpenSession)
    assert sent(rig, CancelCall).call == cancelled.rid


async def test_a_session_that_its_client_has_named_is_not_opened_after_a_503(rig: Rig) -> None:
    rig.engine.stand_still()
    rig.refs.answer_timeout_s = 0.05
    answer = await rig.http.post("/open_session", json={"session_id": "named"})
    assert answer.status_code == 503
    rig.refs.answer_timeout_s = 30.0
    rig.engine.go_on()
    assert await post(rig, "/open_session", session_id="named") == "named"


async def test_an_id_in_use_is_a_400_that_names_it(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="mine")
    answer = await rig.http.post("/open_session", json={"session_id": "mine"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == ("the script refuses", "session_id")


async def test_a_session_is_closed_once(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="mine")
    assert await post(rig, "/close_session", session_id="mine") == {}
    assert sent(rig, CloseSession).session_id == "mine"
    assert (await rig.http.post("/close_session", json={"session_id": "mine"})).status_code == 400


async def test_sessions_are_rolled_back_forked_and_listed(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="mine", streaming=True)
    assert await post(rig, "/rollback_session", session_id="mine", num_turns=3) == {
        "num_turns": 3,
        "num_tokens": HISTORY,
    }
    fork = await post(rig, "/fork_session", session_id="mine", new_session_id="other")
    assert fork == {"session_id": "other", "num_tokens": HISTORY}
    assert len((await post(rig, "/fork_session", session_id="mine"))["session_id"]) == 32
    listed = await post(rig, "/list_sessions")
    assert [entry["session_id"] for entry in listed["sessions"]][-2:] == ["mine", "other"]
    assert (await rig.http.get("/list_sessions")).json() == listed
    for path in ("/rollback_session", "/fork_session"):
        answer = await rig.http.post(path, json={"session_id": "missing", "num_turns": 1})
        assert answer.status_code == 400


async def test_session_params_reach_the_engine(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s")
    await post(rig, "/generate", text="hi", rid="first", session_params={"id": "s"})
    assert sent_turn(rig) == SessionTurn(id="s")
    # As clients of SGLang write them.
    params = {"id": "s", "rid": "first", "offset": -1, "replace": True}
    await post(rig, "/generate", text=["hi"], session_params=params)
    assert sent_turn(rig) == SessionTurn(id="s", rid="first", offset=-1, replace=True)
    params = {"id": "s", "rid": None, "offset": None, "drop_previous_output": True}
    await post(rig, "/v1/completions", prompt="hi", session_params=params)
    assert sent_turn(rig) == SessionTurn(id="s", drop_previous_output=True)


async def test_a_turn_of_any_name_that_a_request_may_have_can_be_continued(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s")
    name = "x" * MAX_RID_CHARS
    answer = await post(rig, "/generate", text="hi", rid=name, session_params={"id": "s"})
    assert answer["meta_info"]["id"] == name
    await post(rig, "/generate", text="hi", session_params={"id": "s", "rid": name})
    assert sent_turn(rig) == SessionTurn(id="s", rid=name)


async def test_a_chat_hands_in_the_whole_conversation(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s", streaming=True)
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="none",
        http_client=rig.http,  # type: ignore[arg-type]
        max_retries=0,
    )
    answer = await client.chat.completions.create(
        model="default",
        messages=HI,  # type: ignore[arg-type]
        extra_body={"session_id": "s"},
    )
    assert answer.choices[0].message.content == "hi there"
    assert sent_turn(rig) == SessionTurn(id="s", is_whole=True)
    with pytest.raises(openai.BadRequestError, match="no such session"):
        await client.chat.completions.create(
            model="default",
            messages=HI,  # type: ignore[arg-type]
            extra_body={"session_id": "missing"},
        )


async def test_the_prompt_counts_the_history(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s")
    own = {"input_ids": [70, 71], "sampling_params": {"max_new_tokens": 3}}
    answer = await post(rig, "/generate", **own, session_params={"id": "s"})
    assert answer["meta_info"]["prompt_tokens"] == HISTORY + 2
    text = (
        await rig.http.post(
            "/generate", json={**own, "stream": True, "session_params": {"id": "s"}}
        )
    ).text
    assert f'"prompt_tokens":{HISTORY + 2}' in text
    assert '"prompt_tokens":2,' not in text
    usage = (await post(rig, "/v1/completions", prompt=[70, 71], session_params={"id": "s"}))[
        "usage"
    ]
    assert usage["prompt_tokens"] == HISTORY + 2
    assert usage["total_tokens"] == HISTORY + 2 + usage["completion_tokens"]


async def test_log_probabilities_may_begin_anywhere_in_the_history(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s")
    body = {"input_ids": [70], "return_logprob": True, "logprob_start_len": 60}
    await post(rig, "/generate", **body, session_params={"id": "s"})
    assert sent(rig, GenerateRequest).logprob_start_len == 60
    assert (await rig.http.post("/generate", json=body)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_turn_is_a_plain_400(rig: Rig, stream: bool) -> None:
    for path, fields in (
        ("/generate", {"text": "hi", "session_params": {"id": "unknown"}}),
        ("/v1/chat/completions", {"messages": HI, "session_id": "unknown"}),
    ):
        answer = await rig.http.post(path, json={**fields, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "there is no such session: 'unknown'"


async def test_a_turn_for_which_sessions_have_no_room_is_a_503_of_its_own_kind(rig: Rig) -> None:
    """Programs can tell it from a full queue."""
    await post(rig, "/open_session", session_id="s")
    body = {"text": "hi", "sampling_params": {"seed": FULL_SEED}}
    for more, code in (({"session_params": {"id": "s"}}, "too_many_sessions"), ({}, "queue_full")):
        answer = await rig.http.post("/generate", json={**body, **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)


async def test_a_draining_server_opens_none_but_closes(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s")
    rig.refs.draining = True
    for path in ("/open_session", "/fork_session"):
        assert (await rig.http.post(path, json={"session_id": "s"})).status_code == 503
    await post(rig, "/close_session", session_id="s")


async def test_a_dead_engine_is_a_503(rig: Rig) -> None:
    rig.front.fail("gone")
    answer = await rig.http.post("/close_session", json={"session_id": "s"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
