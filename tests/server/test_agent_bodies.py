"""The bodies that coding agents send get an answer, with default settings and without changes."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.scheduler.driver import make_sizes
from tests.server.conftest import TOOLS_TEMPLATE, Rig, serving, text_workers
from tests.server.oracle_engine import oracle_engine

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


PAGE = 32
# The turns of each client in the order of its conversations; without counts and schemas.
TURNS = (
    *("codex-first", "codex-few-tools", "codex-parallel-results", "codex-namespace-result"),
    *("codex-subagent", "codex-compaction", "claude_code-first", "claude_code-parallel-results"),
    *("claude_code-subagent", "claude_code-subagent-result", "claude_code-compaction"),
    *("claude_code-after-compaction", "claude_code-known-model", "claude_code-web_search"),
    *("opencode-title", "opencode-first", "opencode-parallel-results", "opencode-subagent"),
    *("opencode-task-result", "opencode-summary"),
)
ID_HEADERS = {
    "codex": "thread-id",
    "claude_code": "x-claude-code-session-id",
    "opencode": "x-session-id",
}


def turn(name: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The route, the body for one token of output, and the header with the conversation's id."""
    client = name.partition("-")[0]
    limit = "max_output_tokens" if client == "codex" else "max_tokens"
    body = body_of(name) | {"stream": False, limit: 1}
    return route_of(name), body, {ID_HEADERS[client]: "sub" if "subagent" in name else "main"}


def usage_in(answer: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and the cached ones of them."""
    usage = answer["usage"]
    if "cache_creation" in usage:
        cached, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == created
        assert (cached + created) % PAGE == 0
        return usage["input_tokens"] + cached + created, cached
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def test_each_turn_finds_the_whole_pages_of_all_turns_before_it(
    tools_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: Any = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    tokenizer = Tokenizer.load(str(tools_folder))
    async with serving(tools_folder, tokenizer, max_request_tokens=ROOM, **parsers) as rig:
        for name in TURNS:
            route, body, headers = turn(name)
            assert (await rig.http.post(route, json=body, headers=headers)).status_code == 200
        prompts = [request.input_ids for request in sent(rig)]
    expected = []
    for number, prompt in enumerate(prompts):
        longest = max((num_common(prompt, before) for before in prompts[:number]), default=0)
        expected.append((len(prompt), min(longest, len(prompt) - 1) // PAGE * PAGE))
    sizes = make_sizes(
        page_size=PAGE,
        num_pages=1 + sum(map(len, prompts)) // PAGE + len(prompts),
        max_context_len=ROOM,
        max_chunk_tokens=4096,
        num_rows=3,
        vocab_size=512,
    )
    engine = oracle_engine(monkeypatch, sizes)
    async with serving(tools_folder, tokenizer, engine=engine, **parsers) as rig:
        found = []
        for name in TURNS:
            route, body, headers = turn(name)
            answer = await rig.http.post(route, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            found.append(usage_in(answer.json()))
            await rig.until_idle()
    assert found == expected
    assert sum(cached > 0 for _, cached in found) > 8


async def test_the_first_request_of_claude_code_is_a_head_of_the_root(rig: Rig) -> None:
    assert (await rig.http.head("/")).status_code < 500
