"""What each message to the engine is stands in one table: handlers, routes, bodies, answers."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_jax.core.calls import Call
from sgl_jax.core.messages import (
    CALL_OF,
    AbortRequest,
    FrontMessage,
    GenerateRequest,
    MemoryMessage,
    OpenSession,
    SessionMessage,
    Shutdown,
    StopRequest,
)
from sgl_jax.core.weight_messages import WeightMessage
from sgl_jax.engine.loop.controls import Controls
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.loop.weight_updates import WeightUpdates
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.scheduler.live_requests import LiveRequests
from sgl_jax.server.admin.call_routes import body_of, message_of
from sgl_jax.server.guards.keys import ANONYMOUS, Caller, SessionOwner
from sgl_jax.sessions.service import SessionService
from sgl_jax.text.tokenizer import Tokenizer
from tests.scheduler.driver import Driver, make_sizes
from tests.server.conftest import serving

ARGUMENTS = {"session_id": "s", "new_session_id": "t", "num_turns": 0}
SESSION_CALLS = [
    call for call in CALL_OF.values() if call.message in typing.get_args(SessionMessage)
]


def message(call: Call) -> Any:
    body = body_of(call)
    fields = {name: value for name, value in ARGUMENTS.items() if name in body.model_fields}
    return message_of(call, body(**fields), SessionOwner(ANONYMOUS))[0]


def test_each_message_has_one_row() -> None:
    messages = [call.message for call in CALL_OF.values()]
    assert set(messages) == set(typing.get_args(FrontMessage))
    assert len(set(messages)) == len(messages)


@pytest.mark.parametrize("call", [*CALL_OF.values()], ids=lambda call: call.message.__name__)
def test_its_handler_takes_that_message(call: Call) -> None:
    owner: type = SessionService if call in SESSION_CALLS else Controls
    if call.message in (AbortRequest, StopRequest):
        owner = LiveRequests
    if call.message in (GenerateRequest, Shutdown):
        owner = EngineCore
    if call.message in typing.get_args(MemoryMessage):
        owner = MemoryReader
    if call.message in typing.get_args(WeightMessage):
        owner = WeightUpdates
    hints = typing.get_type_hints(getattr(owner, call.handler))
    assert hints["message"] is call.message
    assert (hints["return"] is type(None)) == (call.answer is None)


@pytest.mark.parametrize("call", SESSION_CALLS, ids=lambda call: call.message.__name__)
def test_a_session_call_is_answered_as_the_row_says(call: Call) -> None:
    driver = Driver(make_sizes(num_pages=20))
    if call.message is not OpenSession:
        assert driver.session(OpenSession(rid="", session_id="s", streaming=True)).ok
    reply = driver.session(message(call))
    assert reply.ok, reply
    msgspec.convert(reply.data["session_id"] if call.answer is str else reply.data, call.answer)


ROUTES_WITH_CODE = {
    *("/generate", "/v1/completions", "/v1/chat/completions", "/health_generate"),
    *("/abort_request", "/get_server_info", "/server_info", "/metrics", "/v1/loads", "/get_load"),
}


@pytest.mark.anyio
async def test_the_description_lists_every_route_of_the_table(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        paths = (await rig.http.get("/openapi.json")).json()["paths"]
    assert set(paths) >= ROUTES_WITH_CODE
    for call in CALL_OF.values():
        if call.route is None:
            continue
        assert set(paths[call.route]) == {method.lower() for method in call.methods}
        for operation in paths[call.route].values():
            assert operation["description"] in " ".join((call.message.__doc__ or "").split())
            has_body = bool(body_of(call).model_fields)
            assert ("requestBody" in operation) == has_body, call.route


def test_the_session_of_a_body_is_the_callers() -> None:
    owner = SessionOwner(Caller("ann", is_admin=False))
    (call,) = (call for call in CALL_OF.values() if call.message is OpenSession)
    sent, made_up = message_of(call, body_of(call)(session_id="s", timeout=5.0), owner)  # type: ignore[call-arg]
    assert (sent.session_id, sent.timeout_s, made_up) == ("ann:s", 5.0, None)
    sent, made_up = message_of(call, body_of(call)(), owner)
    assert sent.session_id == made_up
    assert made_up is not None
    assert made_up.startswith("ann:")
