"""The one way from a chat to its answer, for every API: body -> chat -> requests -> parts -> bytes.

A chat's body passes eight names until the engine has its requests:

- `apis/chat.py`: `chat_completions` gets it as a `ChatRequest`, which other APIs' bodies make;
- `chat.py`: `answer_chat`;
- `requests.py`: `chat_requests` checks it, `encode_chat` has it tokenized, and `prompt_requests`
  makes a request of each choice, by `RequestChecks.prepare` of `engine/request_checks.py`;
- `answer_stream.py`: a `StreamGroup` submits each by `Frontend.submit` of `engine/frontend.py`,
  to be sent by `ZmqEngineClient.send`.

Their chunks return to the group. The API's `AnswerFormat` reads them with a `ChatAnswer` as parts,
and writes these as events, or as one answer at the end.
"""

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request, Response

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.answer_stream import AnswerFormat, StreamGroup, named_event, respond
from sgl_jax.server.chat_request import ChatRequest
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import chat_requests, prompt_tail
from sgl_jax.text.output_events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)


async def answer_chat(
    request: Request, chat: ChatRequest, answer_format: AnswerFormat, names: Mapping[str, str]
) -> Response:
    """Run `chat`, which the body of `request` makes, and respond in `answer_format`.

    Errors name fields by `names`, as for `client_names`.
    """
    refs = references_of(request)
    if chat.holds_calls:
        names = {**names, "ebnf": "tools"}
    requests = await chat_requests(request, chat, names)
    marks = refs.answer_parser.marks(
        has_tools=bool(chat.shown_tools), has_reasoning=chat.separates_reasoning
    )
    kept = frozenset(refs.frontend.tokenizer.special_ids_of(marks).values())
    group = StreamGroup(request, requests, streaming=chat.stream, names=names, kept_tokens=kept)
    return await respond(group, answer_format)


PartKind = Literal["content", "reasoning", "call"]
_KINDS: dict[type[Event], PartKind] = {
    Content: "content",
    Reasoning: "reasoning",
    **dict.fromkeys((CallBegun, Arguments, CallEnded), "call"),
}


@dataclass
class AnswerPart:
    """Content, reasoning or a call, as far as it is made."""

    index: int  # in the answer
    kind: PartKind
    text: str = ""  # of a call: the JSON of its arguments
    name: str = ""  # of the tool that is called
    call_id: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class ChatAnswer:
    """One choice of a chat: its parts, which grow with each chunk."""

    def __init__(self, refs: References, chat: ChatRequest, stream: RequestStream) -> None:
        self._parser = refs.answer_parser
        self._reader = self._parser.reader(
            chat.schemas,
            prompt_tail(refs, stream.request.input_ids),
            has_reasoning=chat.separates_reasoning,
        )
        self._is_parallel = chat.calls_in_parallel
        self._num_calls = 0  # also of calls that are not handed out
        self._is_amid_call = False
        self.parts: list[AnswerPart] = []

    @property
    def num_calls(self) -> int:
        return self._num_calls if self._is_parallel else min(self._num_calls, 1)

    def feed(self, chunk: Chunk) -> Iterator[tuple[AnswerPart, str | None]]:
        """A part and the text that it gains; "" where it begins, None where it is complete.

        Each part is complete before the next begins. Read one before the next is made.
        """
        for event in self._reader.feed(chunk.text, is_last=chunk.finish is not None):
            kind = _KINDS[type(event)]
            if kind == "call":
                self._num_calls += isinstance(event, CallBegun)
                if self._num_calls > 1 and not self._is_parallel:
                    continue
                self._is_amid_call = not isinstance(event, CallEnded)
            last = self.parts[-1] if self.parts else None
            if isinstance(event, CallBegun) or last is None or last.kind != kind:
                self.parts.append(AnswerPart(len(self.parts), kind))
                if isinstance(event, CallBegun):
                    self.parts[-1].name = event.name
                    self.parts[-1].call_id = event.id or self._parser.call_id(self.parts[-1].id)
                if last is not None:
                    yield last, None
                yield self.parts[-1], ""
            if isinstance(event, (Content, Reasoning, Arguments)) and event.text:
                self.parts[-1].text += event.text
                yield self.parts[-1], event.text
        if chunk.finish is not None and self.parts:
            yield self.parts[-1], None

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """The name in OpenAI's API. A call that a stop string has cut off does not count."""
        if finish is None:
            return None
        has_calls = self._num_calls > 0 and not self._is_amid_call
        return "tool_calls" if finish.type == "stop" and has_calls else finish.type


# The name of a server-sent event and its fields, written before the answer grows further.
NamedEvent = tuple[str, dict[str, Any]]


class PartsFormat(AnswerFormat):
    """Writes an answer with one choice as named events. The whole answer is `_object`, as the last
    event leaves it."""

    _object: Any

    def __init__(self, refs: References, chat: ChatRequest) -> None:
        self._refs, self._chat = refs, chat
        self._answer: ChatAnswer | None = None
        self._finish: FinishReason | None = None

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        return b"".join(map(self._write, self._events(chunk, stream)))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        return b"".join(map(self._write, self._ended(streams[0])))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        self.event(0, chunks[0], streams[0])
        self.closing(streams)
        return self._object

    @property
    def _parts(self) -> list[AnswerPart]:
        return [] if self._answer is None else self._answer.parts

    def _events(self, chunk: Chunk, stream: RequestStream) -> Iterator[NamedEvent]:
        if self._answer is None:
            yield from self._begun(stream)
            self._answer = ChatAnswer(self._refs, self._chat, stream)
        self._finish = chunk.finish
        for part, gain in self._answer.feed(chunk):
            yield from self._changed(part, gain)

    def _write(self, event: NamedEvent) -> bytes:
        name, fields = event
        return named_event(name, {"type": name, **fields})

    @abstractmethod
    def _begun(self, stream: RequestStream) -> Iterator[NamedEvent]: ...

    @abstractmethod
    def _changed(self, part: AnswerPart, gain: str | None) -> Iterator[NamedEvent]:
        """`gain` as of `ChatAnswer.feed`."""

    @abstractmethod
    def _ended(self, stream: RequestStream) -> Iterator[NamedEvent]:
        """All parts are complete."""
