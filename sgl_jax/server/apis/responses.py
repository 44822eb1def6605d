"""OpenAI's Responses API: body, chat, items, events.

Answers are kept, so that a conversation goes on by an id.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct, field
from pydantic import Discriminator, Field, Tag

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.answer_stream import json_response, named_event
from sgl_jax.server.chat import ChatAnswer, answer_chat
from sgl_jax.server.chat_request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ChatRequest,
    FunctionDefinition,
)
from sgl_jax.server.errors import ApiError
from sgl_jax.server.fields import Part, RequestFields, StrictModel, in_range
from sgl_jax.server.guards.json_body import JsonRoute
from sgl_jax.server.guards.keys import caller_of
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.references import References, references_of
from sgl_jax.text.output_events import Arguments, CallBegun, Content, Event, Reasoning

_MAX_METADATA = 16
_Id = Annotated[str, Field(max_length=256)]
# A message of a chat, as `ChatMessage` takes it.
Message = dict[str, Any]


class InputText(Part):
    """A piece of text; images, files and audio are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | Annotated[list[InputText], Field(fail_fast=True)]


class MessageItem(Part):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class CallItem(CalledFunction):
    type: Literal["function_call"]
    call_id: _Id


class CallOutputItem(Part):
    type: Literal["function_call_output"]
    call_id: _Id
    output: _Text


class InputReasoning(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(Part):
    """Reasoning of the model before the next item."""

    type: Literal["reasoning"]
    content: Annotated[list[InputReasoning], Field(fail_fast=True)] | None = None


def _type_of(item: Any) -> str | None:
    """None for a value that is no item at all."""
    if isinstance(item, dict):
        return str(item.get("type", "message"))
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(_type_of),
]


class ResponseTool(FunctionDefinition):
    type: Literal["function"]


class ChosenTool(StrictModel):
    type: Literal["function"]
    name: str


class AllowedTools(StrictModel):
    """The tools that the model may call, or one of which it must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class TextFormat(StrictModel):
    """Any text, a JSON object, or JSON by a schema, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None


class ReasoningOptions(Part):
    """The amount of reasoning, for chat templates with that setting."""

    effort: str | None = None


class ResponsesBody(RequestFields):
    """Body of `/v1/responses`."""

    input: (
        str
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = Field(default=None, description="a system's message, for this once")
    previous_response_id: _Id | None = Field(
        default=None, description="its conversation, without its instructions, comes before"
    )
    store: bool | None = Field(default=None, description="false: it is not kept")
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input)

    def chat(self, history: Sequence[Message]) -> ChatRequest:
        """The same as a chat, after the messages of `history`.

        Raises `InvalidRequestError` if no chat can be like it.
        """
        messages = [*history, *messages_of(self.items)]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        body: dict[str, Any] = {
            **self.model_dump(include=set(RequestFields.model_fields)),
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": self._chat_tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        return ChatRequest.of(body, "input")

    @property
    def _chat_tool_choice(self) -> Any:
        match self.tool_choice:
            case ChosenTool() as chosen:
                return _chat_tool_name(chosen)
            case AllowedTools(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [_chat_tool_name(tool) for tool in tools]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        return self.tool_choice

    @property
    def _response_format(self) -> dict[str, Any] | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.type != "json_schema":
            return {"type": given.type}
        if given.json_value is None:
            raise InvalidRequestError("text.format: a json_schema has a schema", "text")
        schema = given.model_dump(include={"strict"}) | {
            "name": given.name or "answer",
            "schema": given.json_value,
        }
        return {"type": "json_schema", "json_schema": schema}


def messages_of(items: Iterable[Any]) -> list[Message]:
    """The items as messages of a chat: calls are part of the assistant's message."""
    messages: list[Message] = []
    thought = ""
    for item in items:
        match item:
            case ReasoningInput():
                thought += "".join(part.text for part in item.content or ())
                continue
            case CallOutputItem():
                text = _text(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
            case CallItem():
                if not messages or messages[-1]["role"] != "assistant" or thought:
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _text(content: str | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def _chat_tool_name(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


# A server-sent event: its type and the rest of its fields.
StreamEvent = tuple[str, dict[str, Any]]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call; `arguments` is the text of a JSON object, unless the answer was cut off."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseUsage(Struct, frozen=True):
    """Tokens; reasoning tokens as the tokenizer counts its text."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class ResponseObject(Struct):
    """A response, as far as it is made. `created_at` in seconds since 1970."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    metadata: dict[str, str]
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[Any]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    store: bool
    output: list[OutputItem]
    status: str = "in_progress"  # then completed, incomplete or failed
    usage: ResponseUsage | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    truncation: str = "disabled"
    background: bool = False


router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=JsonRoute)
# Name in a chat or the engine -> name in the body.
_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "text": "input",
    "input_ids": "input",
    "messages": "input",
    "json_schema": "text",
}


class Deleted(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True):
    """Items of an input, all in one page."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


@router.post("", responses=streamed_answers(ResponseObject))
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer an input, after the conversation of an earlier response if one is named."""
    refs, owner = references_of(request), caller_of(request).name
    history: list[Message] = []
    if body.previous_response_id is not None:
        before = _store(request).get(body.previous_response_id, owner, "previous_response_id")
        history = msgspec.json.decode(before.messages)

    def keep(response: ResponseObject) -> None:
        if body.store is False:
            return
        conversation = [*history, *messages_of(body.items), *_as_messages(response)]
        items = [item.model_dump(exclude_none=True) for item in body.items]
        named = [{"id": f"{response.id}_{i}", **item} for i, item in enumerate(items)]
        stored = [msgspec.json.encode(each) for each in (response, named, conversation)]
        _store(request).put(response.id, StoredResponse(owner, *stored))

    chat = body.chat(history)
    return await answer_chat(request, chat, ResponsesFormat(refs, body, chat, keep), _NAMES)


@router.get("/{response_id}", responses=answers(ResponseObject))
async def get_response(response_id: str, request: Request) -> Response:
    """A response that was stored."""
    return Response(_stored(response_id, request).response, media_type="application/json")


@router.delete("/{response_id}", responses=answers(Deleted))
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    _store(request).delete(response_id, caller_of(request).name)
    return json_response(Deleted(response_id))


@router.get("/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(response_id: str, request: Request) -> Response:
    """The items of the request's body, in their order."""
    items = msgspec.json.decode(_stored(response_id, request).input_items)
    return json_response(ItemList(items, items[0]["id"], items[-1]["id"]))


@router.post("/{response_id}/cancel", responses=answers(ResponseObject))
async def cancel_response(response_id: str, request: Request) -> Response:
    """Refused: a stored response has ended, because none runs in the background."""
    _stored(response_id, request)
    raise ApiError(400, "only background responses can be cancelled, and there are none here")


def _store(request: Request) -> "ResponseStore":
    store: ResponseStore = request.app.state.responses
    return store


def _stored(response_id: str, request: Request) -> "StoredResponse":
    return _store(request).get(response_id, caller_of(request).name)


def _as_messages(response: ResponseObject) -> list[Message]:
    """The output as a turn of the conversation."""
    message: Message = {"role": "assistant", "content": ""}
    for item in msgspec.to_builtins(response.output):
        match item["type"]:
            case "message":
                message["content"] += "".join(part["text"] for part in item["content"])
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return [message]


class _Ending(NamedTuple):
    status: str
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None


class ResponsesFormat:
    """One response: its request has one prompt and one choice."""

    def __init__(
        self,
        refs: References,
        body: ResponsesBody,
        chat: ChatRequest,
        keep: Callable[[ResponseObject], None],
    ) -> None:
        """`keep` gets the response when it is whole."""
        self._refs, self._chat, self._keep = refs, chat, keep
        self._answer: ChatAnswer | None = None
        self._items = ResponseItems()
        self._finish: FinishReason | None = None
        self._num_events = 0
        self._response = _begun(refs.model_name, body, self._items.items)

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        written = b""
        if self._answer is None:
            self._answer = ChatAnswer(self._refs, self._chat, stream)
            begun = {"response": self._response}
            written = self._write([("response.created", begun), ("response.in_progress", begun)])
        self._finish = chunk.finish
        for event in self._answer.events(chunk):
            written += self._write(self._items.take(event))
        return written

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        ending = _ending(self._finish)
        is_whole = ending.status == "completed"
        written = self._write(self._items.finish("completed" if is_whole else "incomplete"))
        self._complete(ending, streams[0])
        return written + self._write([(f"response.{ending.status}", {"response": self._response})])

    def failure(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": str(error.detail), "param": error.param}
        return self._write([("error", fields)])

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> ResponseObject:
        self.event(0, chunks[0], streams[0])
        self.closing(streams)
        return self._response

    def _complete(self, ending: _Ending, stream: RequestStream) -> None:
        response, encode = self._response, self._refs.frontend.tokenizer.encode
        response.status, response.error, response.incomplete_details = ending
        num_input, num_output = stream.num_prompt_tokens, stream.num_output_tokens
        response.usage = ResponseUsage(
            num_input,
            num_output,
            num_input + num_output,
            {"cached_tokens": stream.cached_tokens},
            {"reasoning_tokens": min(len(encode(self._items.reasoning)), num_output)},
        )
        self._keep(response)

    def _write(self, events: Iterable[StreamEvent]) -> bytes:
        """At once: the next event changes the items in these."""
        written = b""
        for name, fields in events:
            numbered = {"type": name, "sequence_number": self._num_events, **fields}
            written += named_event(name, numbered)
            self._num_events += 1
        return written


def _begun(model: str, body: ResponsesBody, items: list[OutputItem]) -> ResponseObject:
    given = body.model_dump(by_alias=True, exclude_none=True)
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=model,
        instructions=body.instructions,
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        tools=given.get("tools", []),
        tool_choice=given.get("tool_choice", "auto"),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": {"type": "text"}} | given.get("text", {}),
        reasoning={"effort": None, "summary": None} | given.get("reasoning", {}),
        store=body.store is not False,
        output=items,
    )


def _ending(finish: FinishReason | None) -> _Ending:
    if finish is not None and finish.type == "length":
        return _Ending("incomplete", incomplete_details={"reason": "max_output_tokens"})
    if finish is not None and finish.type == "abort":
        message = finish.message or "the request was aborted"
        return _Ending("failed", error={"code": "server_error", "message": message})
    return _Ending("completed")


# Kind of item with text -> the name of its events, and the type of its part.
_TEXTS: dict[type[OutputItem], tuple[str, type[OutputText | ReasoningText]]] = {
    OutputMessage: ("output_text", OutputText),
    OutputReasoning: ("reasoning_text", ReasoningText),
}


class ResponseItems:
    """The output of one response. All its items but the last are complete."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []

    def take(self, event: Event) -> Iterator[StreamEvent]:
        """The gain of a piece of the answer."""
        match event:
            case Content(text):
                yield from self._add_text(OutputMessage, text)
            case Reasoning(text):
                yield from self._add_text(OutputReasoning, text)
            case CallBegun(name, str(call_id)):
                yield from self._close("completed")
                yield from self._open(OutputCall(_new_id("fc"), "in_progress", call_id, name))
            case Arguments(text):
                last = self.items[-1]
                assert isinstance(last, OutputCall)
                last.arguments += text
                yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def finish(self, status: str) -> Iterator[StreamEvent]:
        if not self.items:
            yield from self._open(OutputMessage(_new_id("msg"), "in_progress", []))
            yield from self._begin_text(OutputMessage)
        yield from self._close(status)

    @property
    def reasoning(self) -> str:
        thoughts = (item for item in self.items if isinstance(item, OutputReasoning))
        return "".join(part.text for item in thoughts for part in item.content)

    def _add_text(
        self, kind: type[OutputMessage] | type[OutputReasoning], text: str
    ) -> Iterator[StreamEvent]:
        if not self.items or not isinstance(self.items[-1], kind):
            yield from self._close("completed")
            prefix = "msg" if kind is OutputMessage else "rs"
            yield from self._open(kind(_new_id(prefix), "in_progress", []))
            yield from self._begin_text(kind)
        item = self.items[-1]
        assert not isinstance(item, OutputCall)
        item.content[0].text += text
        fields = {**self._place, "content_index": 0, "delta": text}
        yield f"response.{_TEXTS[kind][0]}.delta", fields | _logprobs(kind)

    def _open(self, item: OutputItem) -> Iterator[StreamEvent]:
        self.items.append(item)
        index = len(self.items) - 1
        yield "response.output_item.added", {"output_index": index, "item": item}

    def _begin_text(
        self, kind: type[OutputMessage] | type[OutputReasoning]
    ) -> Iterator[StreamEvent]:
        item: Any = self.items[-1]
        item.content.append(_TEXTS[kind][1](""))
        fields = {**self._place, "content_index": 0, "part": item.content[0]}
        yield "response.content_part.added", fields

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """The last item, if there is one, is complete."""
        if not self.items:
            return
        item = self.items[-1]
        item.status = status
        if isinstance(item, OutputCall):
            fields: dict[str, Any] = {"arguments": item.arguments, "name": item.name}
            yield "response.function_call_arguments.done", {**self._place, **fields}
        else:
            part = item.content[0]
            place = {**self._place, "content_index": 0}
            fields = {"text": part.text} | _logprobs(type(item))
            yield f"response.{_TEXTS[type(item)][0]}.done", {**place, **fields}
            yield "response.content_part.done", {**place, "part": part}
        index = len(self.items) - 1
        yield "response.output_item.done", {"output_index": index, "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _logprobs(kind: type[OutputItem]) -> dict[str, Any]:
    return {"logprobs": []} if kind is OutputMessage else {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON."""

    owner: str  # name of the caller that may read it
    response: bytes
    input_items: bytes  # a list
    messages: bytes  # of the conversation with the answer, without instructions: a list

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """The latest responses: the oldest go when there are too many, or they take too much."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """The caller's response of this id. Raises `ApiError` 404, which names `param`."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                "there is no such response: it was not stored, was deleted, or is too old",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes
