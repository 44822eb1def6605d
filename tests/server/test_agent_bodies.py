"""The bodies that coding agents send get an answer, with default settings and without changes."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import TOOLS_TEMPLATE, Rig, serving, text_workers

pytestmark = pytest.mark.anyio

BODIES = {
    path.stem: path for path in sorted((Path(__file__).parent / "agent_bodies").glob("*.json"))
}
ROUTES = {
    "codex": "/v1/responses",
    "claude_code": "/v1/messages",
    "opencode": "/v1/chat/completions",
}
ROOM = 40_000  # tokens of a request; the tokenizer of the tests makes nearly one of each byte
# As the templates that accept one system message, which must be the first.
GUARD = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)


def body_of(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(BODIES[name].read_text())
    return body | {"model": "default"}


def route_of(name: str) -> str:
    route = ROUTES[name.partition("-")[0]]
    return f"{route}/count_tokens" if "-count-" in name else route


@pytest.fixture(scope="module")
def guarded_folder(tools_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("guarded") / "model"
    shutil.copytree(tools_folder, folder)
    (folder / "chat_template.jinja").write_text(GUARD + TOOLS_TEMPLATE)
    yield folder
    text_workers(folder).close()


@pytest.fixture(params=["any template", "one system message"])
async def rig(
    request: pytest.FixtureRequest, tools_folder: Path, guarded_folder: Path
) -> AsyncIterator[Rig]:
    folder = tools_folder if request.param == "any template" else guarded_folder
    parsers: Any = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    tokenizer = Tokenizer.load(str(folder))
    async with serving(folder, tokenizer, max_request_tokens=ROOM, **parsers) as rig:
        yield rig


def sent(rig: Rig) -> list[GenerateRequest]:
    return [message for message in rig.engine.seen if isinstance(message, GenerateRequest)]


def events_in(text: str) -> list[dict[str, Any]]:
    """The data of each server-sent event except the last one of OpenAI's chats."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_each_body_is_answered(rig: Rig) -> None:
    assert len(BODIES) == 24
    wrong = {}
    for name in BODIES:
        for streams in (True, False):
            body = body_of(name)
            if "stream" in body:
                body["stream"] = streams
            answer = await rig.http.post(route_of(name), json=body)
            events = events_in(answer.text) if body.get("stream") else [answer.json()]
            if answer.status_code != 200 or any(event.get("error") for event in events):
                wrong[name] = answer.text[:300]
    assert wrong == {}


async def test_the_first_request_of_claude_code_is_a_head_of_the_root(rig: Rig) -> None:
    assert (await rig.http.head("/")).status_code < 500
