"""How answers of `/v1/responses` are written, streamed or whole."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.chat_answer import ChatAnswer
from sgl_jax.server.context import ServerContext
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import named_event
from sgl_jax.server.openai_protocol import ChatRequest
from sgl_jax.server.response_items import OutputItem, ResponseItems, StreamEvent
from sgl_jax.server.responses_protocol import ResponsesBody


class ResponseUsage(Struct, frozen=True):
    """Tokens; those of reasoning as the tokenizer counts its text."""

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


class _Ending(NamedTuple):
    status: str
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None


class ResponsesFormat:
    """Of one response, whose request has one prompt and one choice."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesBody,
        chat: ChatRequest,
        keep: Callable[[ResponseObject], None],
    ) -> None:
        """`keep` gets the response when it is whole."""
        self._context, self._chat, self._keep = context, chat, keep
        self._answer: ChatAnswer | None = None
        self._items = ResponseItems(self._call_id)
        self._finish: FinishReason | None = None
        self._num_events = 0
        self._response = _begun(context.model_name, body, self._items.items)

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        told = b""
        if not self._num_events:
            begun = {"response": self._response}
            told = self._write([("response.created", begun), ("response.in_progress", begun)])
        return told + self._write(self._take(chunk, stream))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        ending = _ending(self._finish)
        told = self._write(self._items.finish(_item_status(ending)))
        self._complete(ending, streams[0])
        return told + self._write([(f"response.{ending.status}", {"response": self._response})])

    def failure(self, error: ApiError) -> bytes:
        told = {"code": error.code, "message": str(error.detail), "param": error.param}
        return self._write([("error", told)])

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> ResponseObject:
        for _ in self._take(chunks[0], streams[0]):
            pass  # what a stream is told of is in the items
        ending = _ending(self._finish)
        for _ in self._items.finish(_item_status(ending)):
            pass
        self._complete(ending, streams[0])
        return self._response

    def _take(self, chunk: Chunk, stream: RequestStream) -> Iterable[StreamEvent]:
        if self._answer is None:
            self._answer = ChatAnswer.of(self._context, self._chat, stream)
        self._finish = chunk.finish
        for event in self._answer.events(chunk):
            yield from self._items.take(event)

    def _call_id(self, given: str | None) -> str:
        assert self._answer is not None
        return self._answer.call_id(given)

    def _complete(self, ending: _Ending, stream: RequestStream) -> None:
        response, encode = self._response, self._context.frontend.tokenizer.encode
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
        """At once: the next event changes the items that these tell of."""
        told = b""
        for name, fields in events:
            numbered = {"type": name, "sequence_number": self._num_events, **fields}
            told += named_event(name, numbered)
            self._num_events += 1
        return told


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


def _item_status(ending: _Ending) -> str:
    return "completed" if ending.status == "completed" else "incomplete"
