"""Anthropic's Messages API: body, chat, blocks, events."""

import functools
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, Tag

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.surrogates import replace_in_json_text
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response, named_event
from sgl_jax.server.apis.context_edits import ContextManagement, edited
from sgl_jax.server.apis.message_blocks import BlockText, Message, chat_messages
from sgl_jax.server.chat import AnswerPart, NamedEvent, PartsFormat, answer_chat, check_chat
from sgl_jax.server.chat_request import (
    MAX_MESSAGES,
    ChatRequest,
    FunctionName,
    ToolList,
    content_of,
)
from sgl_jax.server.errors import (
    MESSAGES_PATH,
    ApiError,
    MessagesError,
    client_names,
    messages_error,
    refuse_abort,
)
from sgl_jax.server.fields import Items, RequestFields, StopStrings, User, in_range
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.hint_fields import MarkedPart, longest_mark
from sgl_jax.server.offered_tools import HostedTool, tool_kind
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import count_chat
from sgl_jax.server.strict_model import Part, StrictModel
from sgl_jax.text.call_arguments import readable_part


class MessagesTool(MarkedPart):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")
    strict: bool | None = Field(
        default=None, description="calls, if there are any, have an input that the schema allows"
    )


_Tool = Annotated[
    Annotated[MessagesTool, Tag("Custom")] | Annotated[HostedTool, Tag("Hosted")],
    tool_kind("custom"),
]


class MessagesToolChoice(StrictModel):
    """The called tool: the model's choice or none (`auto`), any tool, the named tool, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(default=None, description="of the tool that is called")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="true: of several calls only the first is handed out"
    )

    @property
    def of_chat(self) -> Any:
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise InvalidRequestError(
                "tool_choice: name is missing: it must be that of a tool", "tool_choice"
            )
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Part):
    """Reasoning before the answer, for chat templates with that setting."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(StrictModel):
    """Constrains the answer's text to JSON by a schema."""

    type: Literal["json_schema"]
    json_value: dict[str, Any] = Field(alias="schema")

    @property
    def of_chat(self) -> dict[str, Any]:
        schema = {"name": "answer", "schema": self.json_value, "strict": True}
        return {"type": "json_schema", "json_schema": schema}


class OutputConfig(Part):
    format: OutputFormat | None = None
    effort: str | None = Field(default=None, description="for chat templates with reasoning_effort")


class Metadata(StrictModel):
    user_id: User | None = Field(default=None, description="the same as user, which goes first")


class CountTokensBody(RequestFields):
    """Body of `/v1/messages/count_tokens`: the parts of a prompt."""

    system: BlockText | None = None
    messages: Items[Message] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the last is continued, if the model's"
    )
    tools: ToolList[_Tool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = Field(default=None, description="by default as the template does")
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None

    def chat(self) -> ChatRequest:
        """Return the equivalent chat. Raises `InvalidRequestError` if there is none."""
        messages = [each for message in self.messages for each in chat_messages(message)]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": content_of(self.system)})
        if not messages:
            raise InvalidRequestError("messages: all of them are empty", "messages")
        last, choice, output = messages[-1], self.tool_choice, self.output_config
        given: dict[str, Any] = {
            "user": self.user or (self.metadata and self.metadata.user_id),
            "cache_control": longest_mark(self),
            "metadata": None,
            "messages": messages,
            "continue_final_message": last["role"] == "assistant" and not last.get("tool_calls"),
            "tool_choice": None if choice is None else choice.of_chat,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }
        if self.thinking is not None:
            given["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if output is not None:
            given["reasoning_effort"] = output.effort
            given["response_format"] = output.format and output.format.of_chat
        tools = [tool for tool in self.tools or () if isinstance(tool, MessagesTool)]
        return ChatRequest.of(self, "messages", tools=tools, **given)


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=0, description="0: the prompt is computed and cached, no output")
    stop: StopStrings | None = Field(default=None, alias="stop_sequences")
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    top_k: int | None = in_range("top_k", "-1 or 0: all")


class CacheCreation(Struct, frozen=True):
    """The tokens written to the cache, by the longest `ttl` of the prompt's marks."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(Struct, frozen=True):
    """Tokens of the prompt: read from the cache, written to it (whole pages before the last token),
    and the rest."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class MessageObject(Struct):
    """An answer, as far as it is generated; `content` holds texts, thinking and uses of tools.

    `context_management` has the `applied_edits` of a request that sends some.
    """

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    context_management: dict[str, Any] | UnsetType = UNSET
    type: str = "message"
    role: str = "assistant"


class CountedTokens(Struct, frozen=True):
    """Tokens of the prompt after the edits of `context_management`, and before them."""

    input_tokens: int
    context_management: dict[str, int] | UnsetType = UNSET


router = APIRouter(prefix=MESSAGES_PATH, tags=["Anthropic"], route_class=JsonRoute)
# Name in a chat or the engine -> name in the body.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "text": "messages",
    "input_ids": "messages",
    "json_schema": "output_config",
}


@router.post("", responses=answers(MessageObject, MessagesError, streams=True))
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    refs, chat = references_of(request), body.chat()
    applied = None
    if body.context_management is not None:
        check_chat(request, chat)
        with client_names(_NAMES):
            chat, applied = await _edited(request, chat, body.context_management)
    return await answer_chat(request, chat, MessagesFormat(refs, chat, applied), _NAMES)


@router.post("/count_tokens", responses=answers(CountedTokens, MessagesError))
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Count the tokens of a message's prompt."""
    chat = body.chat()
    check_chat(request, chat)
    with client_names(_NAMES):
        if body.context_management is None:
            return json_response(CountedTokens(await count_chat(request, chat)))
        original = await count_chat(request, chat)
        chat, applied = await _edited(request, chat, body.context_management)
        num_tokens = await count_chat(request, chat) if applied else original
    return json_response(CountedTokens(num_tokens, {"original_input_tokens": original}))


async def _edited(
    request: Request, chat: ChatRequest, management: ContextManagement
) -> tuple[ChatRequest, list[dict[str, Any]]]:
    most = references_of(request).frontend.facts.max_request_tokens
    return await edited(chat, management, functools.partial(count_chat, request), most)


# Kind of part -> type of the events that add text to it, and the field with the text.
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Reason in a chat -> reason in a message, unless a stop string ended it.
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessagesFormat(PartsFormat):
    """One message: each part of the answer is a block."""

    def __init__(
        self, refs: References, chat: ChatRequest, applied: list[dict[str, Any]] | None
    ) -> None:
        """Set up the format. `applied`: edits of the conversation, to be reported at the end."""
        super().__init__(refs, chat)
        mark = chat.cache_control if refs.args.expects_returns else None
        self._is_kept_for_an_hour = mark is not None and mark.ttl == "1h"
        self._report = {} if applied is None else {"context_management": {"applied_edits": applied}}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        refuse_abort(chunk.finish)
        return super().event(index, chunk, stream)

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", messages_error(error))

    def _begun(self, stream: RequestStream) -> Iterator[NamedEvent]:
        message = self._message(stream, num_output_tokens=0)
        yield {"type": "message_start", "message": message}

    def _changed(self, part: AnswerPart, gain: str | None) -> Iterator[NamedEvent]:
        at = {"index": part.index}
        if gain is None:
            yield {"type": "content_block_stop", **at}
        elif not gain:
            yield {"type": "content_block_start", **at, "content_block": _block(part)}
        else:
            kind, name = _DELTAS[part.kind]
            yield {"type": "content_block_delta", **at, "delta": {"type": kind, name: gain}}

    def _ended(self, stream: RequestStream) -> Iterator[NamedEvent]:
        message = self._message(stream, stream.num_output_tokens)
        self._object = msgspec.structs.replace(message, **self._report)
        ending = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": ending, "usage": message.usage, **self._report}
        yield {"type": "message_stop"}

    def _message(self, stream: RequestStream, num_output_tokens: int) -> MessageObject:
        cached, stop_reason, stop_sequence = stream.cached_tokens, None, None
        if self._answer is not None and self._finish is not None:
            stop_reason = _STOP_REASONS.get(self._answer.finish_reason(self._finish) or "")
            if stop_reason == "end_turn" and isinstance(self._finish.matched, str):
                stop_reason, stop_sequence = "stop_sequence", self._finish.matched
        return MessageObject(
            id=f"msg_{uuid.uuid4().hex}",
            model=self._refs.model_name,
            content=list(map(_block, self._parts)),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(stream.num_prompt_tokens, cached, num_output_tokens),
        )

    def _usage(self, num_prompt: int, cached: int, num_output_tokens: int) -> MessagesUsage:
        created, page_size = 0, self._refs.frontend.facts.page_size
        if not self._refs.args.disable_radix_cache:
            created = max((num_prompt - 1) // page_size * page_size - cached, 0)
        in_hour = created if self._is_kept_for_an_hour else 0
        return MessagesUsage(
            input_tokens=num_prompt - cached - created,
            cache_read_input_tokens=cached,
            cache_creation_input_tokens=created,
            cache_creation=CacheCreation(created - in_hour, in_hour),
            output_tokens=num_output_tokens,
        )


def _block(part: AnswerPart) -> dict[str, Any]:
    """Return the block of a part. The input of a cut-off call is the part that can be parsed."""
    match part.kind:
        case "content":
            return {"type": "text", "text": part.text}
        case "reasoning":  # nothing is hidden, so no signature is needed
            return {"type": "thinking", "thinking": part.text, "signature": ""}
    text = replace_in_json_text(part.text or "{}")
    arguments = readable_part(text, has_cut_string=False)
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}
