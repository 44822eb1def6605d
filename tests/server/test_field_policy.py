"""Fields without effect are accepted, and refused with `--strict-fields`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.server.apis.messages import MessagesBody
from sgl_jax.server.apis.responses import ResponsesBody
from sgl_jax.server.chat_request import ChatRequest
from sgl_jax.server.unserved_fields import PART, REQUEST
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.server.test_agent_bodies import body_of, route_of

pytestmark = pytest.mark.anyio

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": HI, "max_tokens": 3}),
    "/v1/responses": (ResponsesBody, {"model": "default", "input": HI, "max_output_tokens": 3}),
    "/v1/messages": (MessagesBody, {"model": "default", "messages": HI, "max_tokens": 3}),
}
IGNORED = {
    path: [
        name for name in REQUEST if not REQUEST[name].is_refused and name not in body.model_fields
    ]
    for path, (body, _) in BODIES.items()
}


@pytest.fixture
async def strict(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer, strict_fields=True) as rig:
        yield rig


@pytest.mark.parametrize("path", BODIES)
async def test_fields_without_effect_are_accepted_at_any_value(rig: Rig, path: str) -> None:
    _, body = BODIES[path]
    fields = {name: {"a": [1]} for name in IGNORED[path]}
    assert len(fields) > 20
    answer = await rig.http.post(path, json=body | fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_strict_fields_refuse_each_of_them_by_name(strict: Rig, path: str) -> None:
    _, body = BODIES[path]
    for name in IGNORED[path]:
        answer = await strict.http.post(path, json=body | {name: "x"})
        assert answer.status_code == 400, name
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{name}: it has no effect here")
    assert strict.engine.seen == []
    nulls: dict[str, Any] = dict.fromkeys(IGNORED[path])
    answer = await strict.http.post(path, json=body | nulls | {"return_hidden_states": False})
    assert answer.status_code == 200, answer.text


async def test_strict_fields_refuse_them_in_messages_and_tools_too(strict: Rig) -> None:
    marked = [{**HI[0], "annotations": [{"type": "url_citation"}]}]
    tools = {"tools": [{"type": "web_search"}]}
    for path, fields, param in (
        ("/v1/chat/completions", {"messages": marked}, "messages[0].annotations"),
        ("/v1/chat/completions", {"metadata": {"a": "b"}}, "metadata"),
        ("/v1/responses", tools, "tools[0].type"),
    ):
        _, body = BODIES[path]
        answer = await strict.http.post(path, json={**body, **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "has no effect here" in error["message"]
        assert error["param"] == param
    answer = await strict.http.post(route_of("codex-few-tools"), json=body_of("codex-few-tools"))
    assert answer.status_code == 400


def test_each_field_that_is_not_applied_has_a_reason() -> None:
    for table in (REQUEST, PART):
        assert all(field.reason for field in table.values())
