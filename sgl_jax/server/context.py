"""What the routes share: the front, the limits, the model's name, and whether work is taken."""

import asyncio
import dataclasses
import functools
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import Asked, Reply, Tenant
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.frontend import Frontend
from sgl_jax.engine.health import EngineHealth
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.server.api_keys import ANONYMOUS, caller_of
from sgl_jax.server.connection import LoopShare, unless_gone
from sgl_jax.server.errors import ApiError
from sgl_jax.server.json_body import JsonBodies
from sgl_jax.server.limits import Limits
from sgl_jax.server.openai_protocol import ChatRequest
from sgl_jax.server.responses_store import ResponseStore
from sgl_jax.server.tenants import tenant_of
from sgl_jax.server.text_pool import Ids, TextPool
from sgl_jax.server.tool_protocol import NamedTool
from sgl_jax.text.answer_parser import AnswerParser, choose_parser
from sgl_jax.text.jobs import EncodeChat

_PROMPT_TAIL_TOKENS = 16  # that say whether the prompt has opened or closed the reasoning
# What clients and sglang-router send where only one model is known.
_DEFAULT_MODELS = ("default", "unknown")


@dataclasses.dataclass
class ServerContext:
    """One per server; while it serves, `draining` changes, and `engine_info` as the engine says."""

    args: ServerArgs
    frontend: Frontend
    engine_info: dict[str, Any]
    engine_metrics: EngineMetrics
    limits: Limits
    texts: TextPool
    health: EngineHealth
    draining: bool = False
    answer_timeout_s: float = 30.0  # how long the engine may take to answer; it may be in a step
    reader_timeout_s: float = 60.0  # how long a client may take to read a piece of its stream
    json_bodies: JsonBodies = dataclasses.field(init=False)
    answer_parser: AnswerParser = dataclasses.field(init=False)
    responses: ResponseStore = dataclasses.field(init=False)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.json_bodies = JsonBodies(self.limits)
        limits = self.limits
        self.responses = ResponseStore(
            limits.max_stored_responses, limits.max_stored_response_bytes
        )
        tokenizer, args = self.frontend.tokenizer, self.args
        self.answer_parser = choose_parser(
            args.tool_call_parser, args.reasoning_parser, tokenizer.chat_template
        )

    @property
    def model_path(self) -> str:
        """Folder of the weights that are served."""
        return str(self.engine_info["model_path"])

    @property
    def is_paused(self) -> bool:
        """Whether requests wait until generation is continued."""
        return bool(self.engine_info["is_paused"])

    @functools.cached_property
    def model_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.args.served_model_name or Path(self.args.model_path).resolve().name

    def check_model(self, name: str) -> None:
        """Raise 404 unless `name` is the model served here."""
        if name not in (self.model_name, self.args.model_path, *_DEFAULT_MODELS):
            raise ApiError(
                404,
                f"no model {name!r} here; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raise what ends in a 503 if new work is not taken now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.frontend.check_alive()
        self.health.check()

    def check_tools(self, body: ChatRequest) -> None:
        """Raise `InvalidRequestError` if the model is to be told of tools and cannot be."""
        if not body.told_tools:
            return
        if not self.answer_parser.reads_calls:
            raise InvalidRequestError(
                "tools: how this model writes calls is not known; start the server with "
                "--tool-call-parser",
                "tools",
            )
        if "tools" not in self.frontend.tokenizer.chat_template:
            raise InvalidRequestError(
                "tools: the model's chat template does not tell it of tools; start the server "
                "with another --chat-template",
                "tools",
            )

    def call_grammar(self, body: ChatRequest) -> dict[str, str]:
        """The sampling parameter that holds the answer to calls, if `body` asks for that.

        Raises `InvalidRequestError` for tools whose calls cannot be held to their schemas.
        """
        if not body.must_call and not body.holds_calls:
            return {}
        schemas, grammar = body.held_schemas, self.answer_parser.call_grammar
        assert grammar is not None, "tools are refused where it is not known how calls are written"
        try:
            marks = self.answer_parser.marks(has_tools=True, has_reasoning=False)
            special = self.frontend.tokenizer.special_ids_of(marks)
            if not body.must_call:
                return {"ebnf": grammar.calls_amid_content(schemas, special)}
            is_single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
            return {"ebnf": grammar.calls(schemas, special, is_single=is_single)}
        except ValueError as error:
            raise InvalidRequestError(f"tools: {error}", "tools") from error

    def reasoning_after(self, prompt: Sequence[int]) -> tuple[str, str] | None:
        """The marks of the reasoning that a chat's answer may begin with, whatever its grammar."""
        return self.answer_parser.reasoning_after(self.prompt_tail(prompt))

    def prompt_tail(self, prompt: Sequence[int]) -> str:
        """The last characters of a prompt, special tokens included."""
        tokens = list(prompt[-_PROMPT_TAIL_TOKENS:])
        return self.frontend.tokenizer.decode(tokens, skip_special_tokens=False)

    def parsed_tokens(self, body: ChatRequest) -> frozenset[int]:
        """Special tokens that are read in the answer to `body`."""
        marks = self.answer_parser.marks(
            has_tools=bool(body.told_tools), has_reasoning=body.tells_reasoning
        )
        return frozenset(self.frontend.tokenizer.special_ids_of(marks).values())

    async def encode_prompts(
        self, request: Request, prompts: Sequence[str | list[int]], tenant: Tenant | None
    ) -> list[list[int]]:
        """Token ids of each prompt of `request`, which is `tenant`'s.

        Raises:
            InvalidRequestError: a prompt is empty or too long, or they are too many.
            QueueFullError, TenantQueueFullError: the engine has no room for so many: then nothing
                is tokenised.
            ApiError: it took too long, or the client went away.
        """
        self.frontend.check_room(len(prompts), tenant)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.frontend.checks.check_text(text)
        share = LoopShare()
        ids = []
        for each in await self.encode_texts(request, texts):
            ids.append(self._unpack(each))
            await share.pause()
        encoded = iter(ids)
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def encode_texts(
        self, request: Request, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[Ids]:
        """Token ids of each text of `request`, whether or not the engine could take them.

        Raises:
            InvalidRequestError: a text is too long for any prompt, or there is no tokenizer.
            ApiError: it took too long, or the client went away.
        """
        tokenizer, special = self.frontend.tokenizer, add_special_tokens
        for text in texts:
            self.frontend.checks.check_length(len(text))
        if self.texts.is_short(texts):
            return [
                array("i", tokenizer.encode(text, add_special_tokens=special)) for text in texts
            ]
        encoding = self.texts.encode(_client_of(request), texts, add_special_tokens=special)
        return await unless_gone(request.receive, encoding)

    async def encode_chat(self, request: Request, body: ChatRequest) -> list[list[int]]:
        """Token ids of the conversation, the one prompt of `request`. Raises as
        `encode_prompts`."""
        messages = [message.for_template() for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.told_tools]
        told = msgspec.json.encode(tools or None)
        num_chars = sum(message.num_chars for message in body.messages) + len(told)
        self.frontend.check_room(1, tenant_of(request, body.user))
        self.frontend.checks.check_length(num_chars)
        job = EncodeChat(
            msgspec.json.encode(messages),
            told,
            bool(body.continue_final_message),
            msgspec.json.encode(body.template_args),
            self.limits.max_prompt_chars,
            self.frontend.facts.max_request_tokens,
            self.limits.text_seconds(num_chars),
        )
        encoding = self.texts.encode_chat(_client_of(request), job)
        return [self._unpack(await unless_gone(request.receive, encoding))]

    def _unpack(self, ids: Ids) -> list[int]:
        self.frontend.checks.check_num_tokens(len(ids))
        return ids.tolist()

    async def ask(
        self,
        question: Asked,
        timeout_s: float | None = None,
        *,
        on_unheard: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Ask the engine and wait for its answer.

        Args:
            timeout_s: by default `answer_timeout_s`.
            on_unheard: gets the answer if this call no longer waits for it, because time was up or
                it was cancelled: the engine does what it was asked all the same.

        Raises:
            ApiError: 503, no answer in time.
            EngineStuckError: there would be none.
        """
        self.health.check()
        timeout_s = self.answer_timeout_s if timeout_s is None else timeout_s
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def on_reply(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)
            elif on_unheard is not None:
                on_unheard(reply)

        self.frontend.ask(question, on_reply)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            if on_unheard is not None and answer.done() and not answer.cancelled():
                on_unheard(answer.result())  # it came in the moment of giving up
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ApiError(503, f"the engine gave no answer within {timeout_s:g} s") from error


def context_of(request: Request) -> ServerContext:
    """The context of the app that serves `request`."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def _client_of(request: Request) -> str:
    """The client for which the text pool queues a request: a key's name, or an address."""
    caller = caller_of(request)
    if caller.name != ANONYMOUS.name:
        return caller.name
    return "" if request.client is None else request.client.host
