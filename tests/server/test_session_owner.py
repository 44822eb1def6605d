"""With API keys, a session belongs to the key that opened it."""

from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from sgl_jax.core.messages import CloseSession, GenerateRequest
from sgl_jax.core.request_limits import check_session_id
from sgl_jax.server.guards.keys import Caller, SessionOwner
from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio


ALICE, BOB = (Caller(name, is_admin=False) for name in ("alice", "b:o/b ä"))
ADMIN = Caller("root", is_admin=True)


async def call(rig: Rig, caller: Caller, path: str, **fields: Any) -> httpx.Response:
    """As a request whose API key has been checked."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"caller": caller}
        await rig.app(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        return await http.post(path, json=fields)


async def listed(rig: Rig, caller: Caller) -> list[str]:
    sessions = (await call(rig, caller, "/list_sessions")).json()["sessions"]
    return [entry["session_id"] for entry in sessions]


async def test_sessions_are_listed_to_their_owner_and_to_the_admin(rig: Rig) -> None:
    for caller in (ALICE, BOB):  # the same id, and neither learns of the other
        assert (await call(rig, caller, "/open_session", session_id="chat")).json() == "chat"
    unnamed = (await call(rig, BOB, "/open_session")).json()
    fork = await call(rig, ALICE, "/fork_session", session_id="chat", new_session_id="two")
    assert fork.json()["session_id"] == "two"
    assert await listed(rig, ALICE) == ["chat", "two"]
    assert sorted(await listed(rig, BOB)) == sorted(["chat", unnamed])
    assert len(await listed(rig, ADMIN)) == 4
    assert "alice:chat" in await listed(rig, ADMIN)


async def test_no_caller_closes_forks_or_continues_the_session_of_another(rig: Rig) -> None:
    await call(rig, ALICE, "/open_session", session_id="chat", streaming=True)
    stolen = {"session_id": "alice:chat"}
    for fields in ({"session_id": "chat"}, stolen):
        for path, more in (
            ("/close_session", {}),
            ("/rollback_session", {"num_turns": 0}),
            ("/fork_session", {}),
        ):
            answer = await call(rig, BOB, path, **fields, **more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
    turn = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
    for name in ("chat", "alice:chat"):
        answer = await call(rig, BOB, "/generate", **turn, session_params={"id": name})
        assert answer.status_code == 400
    own = await call(rig, ALICE, "/generate", **turn, session_params={"id": "chat"})
    assert own.status_code == 200
    (request,) = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)][2:]
    assert request.session is not None
    assert request.session.id == "alice:chat"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert (
        await call(rig, BOB, "/v1/chat/completions", **chat, session_id="chat")
    ).status_code == 400
    assert (
        await call(rig, ALICE, "/v1/chat/completions", **chat, session_id="chat")
    ).status_code == 200
    assert (await call(rig, ADMIN, "/close_session", session_id="alice:chat")).status_code == 200
    assert [m.session_id for m in rig.engine.seen if isinstance(m, CloseSession)][
        -1
    ] == "alice:chat"


async def test_a_refused_turn_names_the_session_as_its_caller_does(rig: Rig) -> None:
    turn = {"text": "hi", "session_params": {"id": "chat"}}
    for more in ({}, {"stream": True}):
        answer = await call(rig, BOB, "/generate", **turn, **more)
        assert answer.status_code == 400
        assert "'chat'" in answer.json()["error"]["message"]


async def test_without_keys_ids_are_as_they_are(rig: Rig) -> None:
    await rig.http.post("/open_session", json={"session_id": "chat"})
    assert rig.engine.sessions == {"chat"}


def test_an_id_is_as_long_as_without_keys() -> None:
    owner = SessionOwner(Caller("ä" * 64, is_admin=False))
    engine_id = owner.engine_id("s" * 256)
    assert owner.client_id(engine_id) == "s" * 256
    check_session_id(engine_id)
    assert SessionOwner(ALICE).client_id(engine_id) is None
    message = SessionOwner(ALICE).for_client("there is no session 'alice:x'")
    assert message == "there is no session 'x'"
