"""The one way from a chat to its answer, for every API: body -> chat -> requests -> parts -> bytes.

A chat's body passes seven names until the engine has its requests:

- `apis/chat.py`: `chat_completions` gets it as a `ChatRequest`, which other APIs' bodies make;
- `chat.py`: `answer_chat` checks it;
- `requests.py`: `encode_chat` has it tokenized, and `prompt_requests` makes a request of each
  choice, by `RequestChecks.prepare` of `engine/front/request_checks.py`;
- `answer_stream.py`: a `StreamGroup` submits each by `Frontend.submit`
  (`engine/front/frontend.py`), which sends it by `EngineClient.send`.

Their chunks return to the group. The API's `AnswerFormat` reads them with a `ChatAnswer` as parts,
and writes these as events, or as one answer at the end.
"""

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from fastapi import Request, Response

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import opened
from sgl_jax.core.messages import SessionTurn
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.answer_stream import AnswerFormat, StreamGroup, named_event, respond
from sgl_jax.server.chat_request import ChatRequest, NamedTool
from sgl_jax.server.errors import client_names
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import encode_chat, prompt_requests
from sgl_jax.text.output_events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)

_PROMPT_TAIL_TOKENS = 16  # in which a prompt opens or closes the reasoning


async def answer_chat(
    request: Request, chat: ChatRequest, answer_format: AnswerFormat, names: Mapping[str, str]
) -> Response:
    """Run `chat`, which the body of `request` makes, and respond in `answer_format`.

    Errors name fields by `names`, as for `client_names`.
    """
    refs, parser = references_of(request), references_of(request).answer_parser
    check_chat(refs, chat)
    grammar = _call_grammar(refs, chat)
    if grammar:
        names = {**names, "ebnf": "tools"}
    with client_names(names):
        ids = await encode_chat(request, chat)
        samplings = [
            msgspec.structs.replace(chat.to_sampling(choice), **grammar)
            for choice in range(chat.num_choices)
        ]
    if samplings[0].grammar is not None:
        reasoning = parser.reasoning_after(_prompt_tail(refs, ids))
        samplings = [msgspec.structs.replace(each, reasoning=reasoning) for each in samplings]
    turn = None if chat.session_id is None else SessionTurn(id=chat.session_id, is_whole=True)
    requests = await prompt_requests(
        request,
        chat,
        [ids],
        [samplings],
        names,
        turn=turn,
        return_logprob=bool(chat.logprobs),
        top_logprobs_num=chat.top_logprobs or 0,
    )
    marks = parser.marks(has_tools=bool(chat.shown_tools), has_reasoning=chat.separate_reasoning)
    kept = frozenset(refs.frontend.tokenizer.special_ids_of(marks).values())
    group = StreamGroup(request, requests, streaming=chat.stream, names=names, kept_tokens=kept)
    return await respond(group, answer_format)


def check_chat(refs: References, chat: ChatRequest) -> None:
    """Raise `InvalidRequestError` or `ApiError` if this server cannot take `chat` now."""
    refs.check_open()
    refs.check_model(chat.model)
    if not chat.shown_tools:
        return
    if not refs.answer_parser.reads_calls:
        raise InvalidRequestError(
            "tools: how this model writes calls is not known; start the server with "
            "--tool-call-parser",
            "tools",
        )
    if "tools" not in refs.frontend.tokenizer.chat_template:
        raise InvalidRequestError(
            "tools: the model's chat template does not tell it of tools; start the server "
            "with another --chat-template",
            "tools",
        )


def _call_grammar(refs: References, chat: ChatRequest) -> dict[str, str | None]:
    """The sampling parameters that hold the calls of the answer to the tools' schemas.

    None are needed where calls are free, unless the text of the answer must be JSON: then calls
    are the alternative to it. Raises `InvalidRequestError` for tools whose calls cannot be held.
    """
    text_schema = chat.json_format if chat.shown_tools else None
    if not chat.holds_calls and text_schema is None:
        return {}
    schemas, grammar = chat.held_schemas, refs.answer_parser.call_grammar
    if refs.args.open_json_objects:
        schemas = {name: opened(schema) if schema else {} for name, schema in schemas.items()}
        text_schema = text_schema and opened(text_schema)
    assert grammar is not None, "tools are refused where the format of calls is unknown"
    try:
        marks = refs.answer_parser.marks(has_tools=True, has_reasoning=False)
        special = refs.frontend.tokenizer.special_ids_of(marks)
        if not chat.must_call and text_schema is None:
            return {"ebnf": grammar.calls_amid_content(schemas, special)}
        is_single = not chat.parallel_tool_calls or isinstance(chat.tool_choice, NamedTool)
        or_json = None if chat.must_call else text_schema
        calls = grammar.calls(schemas, special, is_single=is_single, or_json=or_json)
        if text_schema is None:
            return {"ebnf": calls}
        json_part = msgspec.json.encode(chat.json_format).decode()
        return {"ebnf": calls, "json_schema": None, "json_part": json_part}
    except ValueError as error:
        if not chat.holds_calls:
            return {}
        raise InvalidRequestError(f"tools: {error}", "tools") from error


def _prompt_tail(refs: References, prompt: Sequence[int]) -> str:
    """The last characters of a prompt, special tokens included."""
    tokens = list(prompt[-_PROMPT_TAIL_TOKENS:])
    return refs.frontend.tokenizer.decode(tokens, skip_special_tokens=False)


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
            _prompt_tail(refs, stream.request.input_ids),
            has_reasoning=chat.separate_reasoning,
        )
        self._is_parallel = chat.parallel_tool_calls
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
        self._parts: list[AnswerPart] = []
        self._finish: FinishReason | None = None

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        return b"".join(map(self._write, self._events(chunk, stream)))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        return b"".join(map(self._write, self._ended(streams[0])))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        self.event(0, chunks[0], streams[0])
        self.closing(streams)
        return self._object

    def _events(self, chunk: Chunk, stream: RequestStream) -> Iterator[NamedEvent]:
        if self._answer is None:
            yield from self._begun(stream)
            self._answer = ChatAnswer(self._refs, self._chat, stream)
            self._parts = self._answer.parts
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
