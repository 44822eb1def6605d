"""The real application on a scripted engine, in one process."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from sgl_jax.core.engine_messages import (
    EngineFailed,
    EngineInfo,
    EngineMessage,
    Heartbeat,
)
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import EngineClient, SocketChannel
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.server.app import build_app, with_cors
from sgl_jax.server.guards.keys import ApiKeys
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.references import References
from sgl_jax.server.text_pool import TextPool
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.worker_process import TextWorkers
from tests.engine.scripted_engine import ScriptedEngine
from tests.support.tokenizers import byte_level, save, save_with_template
from tests.support.waiting import meanwhile_until

MAX_QUEUED = 100
HEARTBEAT_TIMEOUT_S = 30.0
TOOLS_SPECIALS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "[TOOL_CALLS]"]
# The first message is what the model shall say.
TOOLS_TEMPLATE = (
    "{{ messages[0].content }}</s>"
    "{% if tools %}{% for t in tools %}{{ t.function.name }}: "
    "{{ t.function.parameters.properties | length }}; {% endfor %}{% endif %}"
    "{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "={{ c.id }}{% endfor %}"
    "{{ m.tool_call_id or '' }}</s>{% endfor %}"
    "<|assistant|>{% if enable_thinking %}<think>{% endif %}"
    "{% if enable_thinking is false %}<think></think>\n\n{% endif %}"
)
ROOM = 1000  # tokens of a request with tools


@functools.cache
def text_workers(folder: Path) -> TextWorkers:
    """One process tokenises for all applications: it takes a second to start."""
    return TextWorkers(str(folder))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = save(byte_level(), tmp_path_factory.mktemp("model") / "scripted")
    yield folder
    text_workers(folder).close()


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(str(model_folder))


@dataclass
class Rig:
    http: httpx.AsyncClient
    engine: ScriptedEngine
    refs: References
    app: ASGIApp

    @property
    def front(self) -> Frontend:
        return self.refs.frontend

    async def until_idle(self) -> None:
        """Wait until the engine runs nothing any more."""
        await meanwhile_until(
            lambda: not self.engine.running and not self.front.num_open, "the engine is idle"
        )


@asynccontextmanager
async def serving(
    model_folder: Path,
    tokenizer: Tokenizer,
    *,
    step_s: float = 0.0,
    limits: dict[str, Any] | None = None,
    max_request_tokens: int = ScriptedEngine.max_request_tokens,
    engine: Any = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """An application whose engine runs in a thread behind real sockets.

    `limits` take the place of the defaults, `engine` that of a scripted one; `settings` are those
    of `ServerArgs`.
    """
    engine = engine or ScriptedEngine(
        step_s=step_s,
        max_request_tokens=max_request_tokens,
        tokenizer_folder=str(model_folder),
    )
    client = EngineClient()
    channel = SocketChannel(client.engine_end)
    thread = threading.Thread(target=run_quietly, args=(engine, channel), daemon=True)
    settings.setdefault("max_queued_requests", MAX_QUEUED)
    args = ServerArgs(model_path=str(model_folder), **settings)
    front = Frontend(args, tokenizer, engine.info, client.send)
    health = EngineHealth(HEARTBEAT_TIMEOUT_S)
    bounds = replace(Limits.of(args, front.checks.max_prompt_chars), **(limits or {}))
    texts = TextPool(text_workers(model_folder))
    texts.abilities = tokenizer.abilities if tokenizer.chat_template else None
    engine_metrics = EngineMetrics(front.metrics)
    refs = References(args, front, engine.info, engine_metrics, bounds, texts, health)
    app = with_cors(build_app(refs, ApiKeys.from_args(args)), args)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def on_message(message: EngineMessage) -> None:
        if isinstance(message, EngineFailed):
            front.fail(message.message)
        elif isinstance(message, EngineInfo):
            refs.engine_info.update(message.info)
        elif isinstance(message, Heartbeat):
            health.note(message)
        else:
            front.handle(message)

    client.listen(on_message, lambda error: front.fail(str(error)))
    thread.start()
    texts.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield Rig(http, engine, refs, app)
    finally:
        await texts.close()
        engine.stopped = True
        await asyncio.to_thread(thread.join, 5.0)
        channel.close()
        client.close()


def run_quietly(engine: ScriptedEngine, channel: SocketChannel) -> None:
    """The engine thread; a scripted crash is reported as the real process would."""
    try:
        engine.run(channel)
    except RuntimeError as error:
        channel.send(EngineFailed(message=str(error)))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def rig(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer) as rig:
        yield rig


Served = tuple[Rig, openai.AsyncOpenAI]


def save_tools_model(folder: Path, template: str = TOOLS_TEMPLATE) -> Path:
    """Save a tokenizer with the marks of calls, and this chat template."""
    return save_with_template(folder, template, TOOLS_SPECIALS)


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = save_tools_model(tmp_path_factory.mktemp("tools") / "model")
    yield folder
    text_workers(folder).close()


@asynccontextmanager
async def served(
    folder: Path,
    tool: str = "hermes",
    reasoning: str = "none",
    max_request_tokens: int = ROOM,
    **settings: Any,
) -> AsyncIterator[Served]:
    async with serving(
        folder,
        Tokenizer.load(str(folder)),
        max_request_tokens=max_request_tokens,
        tool_call_parser=tool,
        reasoning_parser=reasoning,
        **settings,
    ) as rig:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="-",
            http_client=rig.http,  # type: ignore[arg-type]
            max_retries=0,
        )
        yield rig, client


@pytest.fixture
async def served_tools(tools_folder: Path) -> AsyncIterator[Served]:
    async with served(tools_folder, "hermes", "qwen3") as rig_and_client:
        yield rig_and_client


@pytest.fixture
def tools_rig(served_tools: Served) -> Rig:
    """An application whose model calls tools and reasons."""
    return served_tools[0]


def prompt_of(rig: Rig) -> str:
    (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
    text = rig.front.tokenizer.decode(request.input_ids, skip_special_tokens=False)
    return text.partition("</s>")[2]
