"""Anthropic's Messages API: body, chat, blocks, events."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Struct, field
from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import FinishReason
from sgl_jax.core.sampling_params import MAX_STOP_STRINGS
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.answer_stream import json_response, named_event
from sgl_jax.server.chat import ChatAnswer, answer_chat, check_chat
from sgl_jax.server.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatRequest, FunctionName
from sgl_jax.server.errors import (
    MESSAGES_PATH,
    ApiError,
    MessagesError,
    client_names,
    messages_error,
)
from sgl_jax.server.fields import Part, RequestFields, StrictModel, User, in_range
from sgl_jax.server.guards.json_body import JsonRoute
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import encode_chat
from sgl_jax.text.output_events import Arguments, CallBegun, Content, Event, Reasoning

_MAX_BLOCKS = 16_384
_Id = Annotated[str, Field(max_length=256)]


class TextBlock(Part):
    """A piece of text; images and documents are not supported."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """Reasoning of the model before the next block."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: _Id
    name: FunctionName
    input: dict[str, Any]


_Text = str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=_MAX_BLOCKS)]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: _Id
    content: _Text = ""


def _type_of(block: Any) -> str | None:
    """None for a value that is no block at all."""
    return str(block.get("type")) if isinstance(block, dict) else getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_type_of),
]


class Message(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=_MAX_BLOCKS)]

    @property
    def blocks(self) -> Sequence[Any]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class MessagesTool(Part):
    """A tool that the model may call. Anthropic's own tools are not there."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(
        default=None, description="calls, if there are any, have an input that the schema allows"
    )


class MessagesToolChoice(StrictModel):
    """The model calls a tool: as it likes, any of them, the one named, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(default=None, description="of the tool that is called")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="true: of several calls only the first is handed out"
    )


class Thinking(Part):
    """Reasoning comes first, for chat templates with that setting."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(StrictModel):
    """The answer's text is JSON that a schema allows."""

    type: Literal["json_schema"]
    json_value: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    format: OutputFormat | None = None
    effort: str | None = Field(default=None, description="for chat templates with reasoning_effort")


class Metadata(StrictModel):
    user_id: User | None = Field(default=None, description="the same as user, which goes first")


class CountTokensBody(RequestFields):
    """Body of `/v1/messages/count_tokens`: the parts of a prompt."""

    system: _Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the last is continued, if the model's"
    )
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = Field(default=None, description="by default as the template does")
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises `InvalidRequestError` if no chat can be like it."""
        messages = [each for message in self.messages for each in _chat_messages(message)]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        if not messages:
            raise InvalidRequestError("messages: all of them are empty", "messages")
        last = messages[-1]
        choice, output = self.tool_choice, self.output_config
        body: dict[str, Any] = {
            **self.model_dump(include=set(RequestFields.model_fields)),
            **self._sampling,
            "user": self.user or (self.metadata and self.metadata.user_id),
            "messages": messages,
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_tool_choice(choice),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }
        if self.thinking is not None:
            is_enabled = self.thinking.type != "disabled"
            body["chat_template_kwargs"] = {"enable_thinking": is_enabled}
        if output is not None:
            body["reasoning_effort"] = output.effort
            body["response_format"] = _response_format(output.format)
        return ChatRequest.of(body, "messages")

    @property
    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    top_k: int | None = in_range("top_k", "-1 or 0: all")

    @property
    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _chat_messages(message: Message) -> Iterator[dict[str, Any]]:
    """The message as messages of a chat: results of calls come first, each by itself."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for block in message.blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thought += block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                yield result | {"content": _text(block.content)}
    if texts or calls or thought:
        own = {"role": message.role, "content": "\n".join(texts)}
        yield own | _given(tool_calls=calls, reasoning_content=thought)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _chat_tool_choice(choice: MessagesToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "tool_choice: name is missing: it must be that of a tool", "tool_choice"
            )
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _response_format(given: OutputFormat | None) -> dict[str, Any] | None:
    if given is None:
        return None
    schema = {"name": "answer", "schema": given.json_value, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


class TextAnswer(Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingAnswer(Struct, tag_field="type", tag="thinking"):
    """Reasoning. Nothing is hidden, so there is nothing to sign."""

    thinking: str = ""
    signature: str = ""


class ToolUseAnswer(Struct, tag_field="type", tag="tool_use"):
    """A call. If the answer was cut off, `input` has the complete part."""

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessagesUsage(Struct, frozen=True):
    """Tokens; `input_tokens` without those read from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(Struct):
    """An answer, as far as it is made."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: str = "message"
    role: str = "assistant"


class InputTokens(Struct, frozen=True):
    input_tokens: int


router = APIRouter(prefix=MESSAGES_PATH, tags=["Anthropic"], route_class=JsonRoute)
# Name in a chat or the engine -> name in the body.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "text": "messages",
    "input_ids": "messages",
    "json_schema": "output_config",
}


@router.post("", responses=streamed_answers(MessageObject, MessagesError))
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    chat = body.chat()
    return await answer_chat(request, chat, MessagesFormat(references_of(request), chat), _NAMES)


@router.post("/count_tokens", responses=answers(InputTokens, MessagesError))
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Count the tokens that a message's prompt would have."""
    refs, chat = references_of(request), body.chat()
    check_chat(refs, chat)
    with client_names(_NAMES):
        ids = await encode_chat(request, chat)
    return json_response(InputTokens(len(ids)))


class MessagesFormat:
    """One message: its request has one prompt and one choice."""

    def __init__(self, refs: References, chat: ChatRequest) -> None:
        self._refs, self._chat = refs, chat
        self._answer: ChatAnswer | None = None
        self._blocks: list[AnswerBlock] = []
        self._arguments = ""  # of the last block, if it is a call
        self._finish: FinishReason | None = None

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        written = b""
        if self._answer is None:
            begun = self._message(stream, num_output_tokens=0)
            written = _write({"type": "message_start", "message": begun})
            self._answer = ChatAnswer(self._refs, self._chat, stream)
        self._finish = chunk.finish
        if chunk.finish is not None and chunk.finish.type == "abort":
            raise ApiError(503, chunk.finish.message or "the request was aborted", code="aborted")
        for event in self._answer.events(chunk):
            written += b"".join(map(_write, self._add(event)))
        return written

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        last = b"".join(map(_write, self._close()))
        message = self._message(streams[0], streams[0].num_output_tokens)
        ending = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        last += _write({"type": "message_delta", "delta": ending, "usage": message.usage})
        return last + _write({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", messages_error(error))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> MessageObject:
        self.event(0, chunks[0], streams[0])
        self.closing(streams)
        return self._message(streams[0], streams[0].num_output_tokens)

    def _add(self, event: Event) -> Iterator[dict[str, Any]]:
        last = self._blocks[-1] if self._blocks else None
        match event:
            case Content(text):
                if not isinstance(last, TextAnswer):
                    last = TextAnswer()
                    yield from self._open(last)
                last.text += text
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                if not isinstance(last, ThinkingAnswer):
                    last = ThinkingAnswer()
                    yield from self._open(last)
                last.thinking += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegun(name, str(call_id)):
                yield from self._open(ToolUseAnswer(call_id, name))
            case Arguments(text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _open(self, block: AnswerBlock) -> Iterator[dict[str, Any]]:
        """The block before is complete, and `block` begins."""
        yield from self._close()
        self._blocks.append(block)
        yield self._about("content_block_start", content_block=block)

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._blocks:
            return
        last = self._blocks[-1]
        if isinstance(last, ToolUseAnswer):
            last.input = from_json(self._arguments or "{}", allow_partial=True)
            self._arguments = ""
        yield self._about("content_block_stop")

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return self._about("content_block_delta", delta=delta)

    def _about(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": name, "index": len(self._blocks) - 1, **fields}

    def _message(self, stream: RequestStream, num_output_tokens: int) -> MessageObject:
        finish, cached = self._finish, stream.cached_tokens
        stop_reason = None if finish is None else self._stop_reason(finish)
        return MessageObject(
            id=f"msg_{uuid.uuid4().hex}",
            model=self._refs.model_name,
            content=self._blocks,
            stop_reason=stop_reason,
            stop_sequence=str(finish.matched) if finish and stop_reason == _AT_STOP else None,
            usage=MessagesUsage(stream.num_prompt_tokens - cached, cached, num_output_tokens),
        )

    def _stop_reason(self, finish: FinishReason) -> str:
        if finish.type == "length":
            return "max_tokens"
        if self._answer is not None and self._answer.finish_reason(finish) == "tool_calls":
            return "tool_use"
        return _AT_STOP if isinstance(finish.matched, str) else "end_turn"


_AT_STOP = "stop_sequence"


def _write(event: dict[str, Any]) -> bytes:
    return named_event(event["type"], event)
