"""How answers of `/v1/messages` are written, streamed or whole."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from pydantic_core import from_json

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.chat_answer import ChatAnswer
from sgl_jax.server.context import ServerContext
from sgl_jax.server.errors import ApiError, messages_error
from sgl_jax.server.generation import named_event
from sgl_jax.server.openai_protocol import ChatRequest
from sgl_jax.text.output_events import Arguments, CallBegun, Content, Event, Reasoning


class TextAnswer(Struct, tag_field="type", tag="text"):
    """What is said."""

    text: str = ""


class ThinkingAnswer(Struct, tag_field="type", tag="thinking"):
    """What is thought. There are no signatures: nothing is hidden that one could prove."""

    thinking: str = ""
    signature: str = ""


class ToolUseAnswer(Struct, tag_field="type", tag="tool_use"):
    """A call. Of an answer that was cut off, `input` has what was complete."""

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
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesFormat:
    """Of one message, whose request has one prompt and one choice."""

    def __init__(self, context: ServerContext, chat: ChatRequest) -> None:
        self._context, self._chat = context, chat
        self._answer: ChatAnswer | None = None
        self._blocks: list[AnswerBlock] = []
        self._arguments = ""  # of the last block, if it is a call
        self._finish: FinishReason | None = None

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        told = b""
        if self._answer is None:
            begun = self._message(stream, num_output_tokens=0)
            told = _write({"type": "message_start", "message": begun})
        return told + b"".join(map(_write, self._take(chunk, stream)))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        last = b"".join(map(_write, self._close()))
        message = self._message(streams[0], streams[0].num_output_tokens)
        ending = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        last += _write({"type": "message_delta", "delta": ending, "usage": message.usage})
        return last + _write({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", messages_error(error))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> MessageObject:
        for _ in [*self._take(chunks[0], streams[0]), *self._close()]:
            pass  # what a stream is told of is in the blocks
        return self._message(streams[0], streams[0].num_output_tokens)

    def _take(self, chunk: Chunk, stream: RequestStream) -> Iterator[dict[str, Any]]:
        """What a chunk brings, as events of a stream."""
        if self._answer is None:
            self._answer = ChatAnswer.of(self._context, self._chat, stream)
        self._finish = chunk.finish
        if chunk.finish is not None and chunk.finish.type == "abort":
            raise ApiError(503, chunk.finish.message or "the request was aborted", code="aborted")
        for event in self._answer.events(chunk):
            yield from self._add(event, self._answer)

    def _add(self, event: Event, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
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
            case CallBegun(name, given_id):
                yield from self._open(ToolUseAnswer(answer.call_id(given_id), name))
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
        """An event of the last block."""
        return {"type": name, "index": len(self._blocks) - 1, **fields}

    def _message(self, stream: RequestStream, num_output_tokens: int) -> MessageObject:
        finish, cached = self._finish, stream.cached_tokens
        stop_reason = None if finish is None else self._stop_reason(finish)
        return MessageObject(
            id=f"msg_{uuid.uuid4().hex}",
            model=self._context.model_name,
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
