"""What a chat's answer says: content, reasoning and tool calls, whole or in deltas."""

import uuid
from collections.abc import Iterator

from msgspec import UNSET

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.context import ServerContext
from sgl_jax.server.openai_protocol import ChatRequest
from sgl_jax.server.openai_responses import (
    AssistantMessage,
    Delta,
    FunctionDelta,
    FunctionOfCall,
    ToolCallAnswer,
    ToolCallDelta,
)
from sgl_jax.text.answer_parser import AnswerParser
from sgl_jax.text.output_events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    joined,
)
from sgl_jax.text.reader import AnswerReader


class ChatAnswer:
    """One choice of a chat, as its chunks arrive."""

    def __init__(self, parser: AnswerParser, reader: AnswerReader, *, is_parallel: bool) -> None:
        """`is_parallel`: whether more than one call is handed out."""
        self._parser = parser
        self._reader = reader
        self._is_parallel = is_parallel
        self._num_calls = 0
        self._is_amid_call = False
        self._has_begun = False

    @classmethod
    def of(cls, context: ServerContext, chat: ChatRequest, stream: RequestStream) -> "ChatAnswer":
        """The answer to `chat` that comes in `stream`."""
        parser, tail = context.answer_parser, context.prompt_tail(stream.request.input_ids)
        reader = parser.reader(chat.schemas, tail, has_reasoning=chat.tells_reasoning)
        return cls(parser, reader, is_parallel=chat.parallel_tool_calls is not False)

    def deltas(self, chunk: Chunk) -> list[Delta]:
        """What a streamed chunk brings; the first of all has the role, and may say nothing."""
        deltas = [self._delta(event) for event in self.events(chunk)]
        if not self._has_begun:
            deltas = deltas or [self.empty_delta()]
            deltas[0].role = "assistant"
            self._has_begun = True
        return deltas

    def empty_delta(self) -> Delta:
        """One that says nothing; where there are no calls, clients look for content in it."""
        return Delta() if self._num_calls else Delta(content="")

    def message(self, chunk: Chunk) -> AssistantMessage:
        """The whole answer, which `chunk` holds."""
        content, reasoning, calls = "", "", list[ToolCallAnswer]()
        for event in self.events(chunk):
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegun(name, given_id):
                    calls.append(ToolCallAnswer(self.call_id(given_id), FunctionOfCall(name)))
                case Arguments(text):
                    calls[-1].function.arguments += text
        return AssistantMessage(
            None if calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """As OpenAI calls it. A call that a stop string has cut off is none to make."""
        if finish is None:
            return None
        has_calls = self._num_calls > 0 and not self._is_amid_call
        return "tool_calls" if finish.type == "stop" and has_calls else finish.type

    def events(self, chunk: Chunk) -> Iterator[Event]:
        """Those of a chunk that are handed out; counts calls as they begin."""
        events = self._reader.feed(chunk.text)
        if chunk.finish is not None:
            events = joined([*events, *self._reader.finish()])
        for event in events:
            if isinstance(event, CallBegun):
                self._num_calls += 1
            is_of_call = isinstance(event, (CallBegun, Arguments, CallEnded))
            if is_of_call and self._num_calls > 1 and not self._is_parallel:
                continue
            if is_of_call:
                self._is_amid_call = not isinstance(event, CallEnded)
            if not isinstance(event, CallEnded):
                yield event

    def _delta(self, event: Event) -> Delta:
        index = self._num_calls - 1
        match event:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text)
            case CallBegun(name, given_id):
                begin = FunctionDelta("", name)
                call = ToolCallDelta(index, begin, self.call_id(given_id), "function")
                return Delta(tool_calls=[call])
            case Arguments(text):
                return Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
        raise AssertionError(event)

    def call_id(self, given: str | None) -> str:
        """A call's id: of the answer's own format, if it has them."""
        return given or self._parser.call_id(uuid.uuid4().hex)
