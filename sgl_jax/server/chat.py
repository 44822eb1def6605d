"""The path of a chat to its answer, shared by all APIs: body -> chat -> requests -> parts -> bytes.

A route calls `answer_chat`, which encodes the prompt, makes the engine's requests
(`requests.py`) and submits them as a `StreamGroup` (`answer_stream.py`). The API's `AnswerFormat`
reads the group's chunks as parts with a `ChatAnswer`, and writes events or one answer at the end.
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
from sgl_jax.server.agent_hints import call_token_ids
from sgl_jax.server.answer_stream import AnswerFormat, StreamGroup, named_event, respond
from sgl_jax.server.chat_request import ChatRequest, NamedTool
from sgl_jax.server.errors import client_names
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import admit, encode_chat, prompt_requests
from sgl_jax.text.reader import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

_PROMPT_TAIL_TOKENS = 16  # where a prompt may open or close the reasoning


async def answer_chat(
    request: Request, chat: ChatRequest, answer_format: AnswerFormat, names: Mapping[str, str]
) -> Response:
    """Run `chat`, built from the body of `request`, and respond in `answer_format`.

    Errors name fields by `names`, which maps engine fields to the client's fields.
    """
    refs = check_chat(request, chat)
    parser = refs.answer_parser
    grammar = _call_grammar(refs, chat)
    if grammar:
        names = {**names, "ebnf": "tools"}
    with client_names(names):
        prompt = await encode_chat(request, chat)
        samplings = [
            msgspec.structs.replace(chat.to_sampling(choice), **grammar)
            for choice in range(chat.num_choices)
        ]
    if samplings[0].grammar is not None:
        reasoning = parser.reasoning_after(_prompt_tail(refs, prompt.input_ids))
        samplings = [msgspec.structs.replace(each, reasoning=reasoning) for each in samplings]
    turn = None if chat.session_id is None else SessionTurn(id=chat.session_id, is_whole=True)
    requests = await prompt_requests(
        request,
        chat,
        [prompt.input_ids],
        [samplings],
        names,
        images=[prompt.images],
        turn=turn,
        call_token_ids=call_token_ids(refs) if chat.shown_tools else (),
        return_logprob=bool(chat.logprobs),
        top_logprobs_num=chat.top_logprobs or 0,
    )
    del prompt  # its images are long, and the group drops the requests once they are sent
    marks = parser.marks(has_tools=bool(chat.shown_tools), has_reasoning=chat.separate_reasoning)
    kept = frozenset(refs.frontend.tokenizer.special_ids_of(marks).values())
    group = StreamGroup(request, requests, streaming=chat.stream, names=names, kept_tokens=kept)
    return await respond(group, answer_format)


def check_chat(request: Request, chat: ChatRequest) -> References:
    """Raise unless this server can take `chat` now (see `admit`), with its tools."""
    admit(request, chat, chat.num_choices)
    refs = references_of(request)
    if not chat.shown_tools:
        return refs
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
    return refs


def _call_grammar(refs: References, chat: ChatRequest) -> dict[str, str | None]:
    """Return the sampling parameters that constrain tool calls to the tools' schemas.

    They are empty if calls are free, unless the text must be JSON: then calls are its alternative.
    Raises `InvalidRequestError` if the calls cannot be constrained.
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
        return {"ebnf": calls} if text_schema is None else {"ebnf": calls, "json_schema": None}
    except ValueError as error:
        if not chat.holds_calls:
            return {}
        raise InvalidRequestError(f"tools: {error}", "tools") from error


def _prompt_tail(refs: References, prompt: Sequence[int]) -> str:
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
    """Content, reasoning or a call, as far as it is generated."""

    index: int  # position in the answer
    kind: PartKind
    text: str = ""  # for a call: the JSON of its arguments
    name: str = ""  # of the called tool
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
        self._num_calls = 0  # including suppressed calls
        self._is_amid_call = False
        self.parts: list[AnswerPart] = []

    @property
    def num_calls(self) -> int:
        return self._num_calls if self._is_parallel else min(self._num_calls, 1)

    def feed(self, chunk: Chunk) -> Iterator[tuple[AnswerPart, str | None]]:
        """Yield each part with its new text: "" at its beginning, None when it is complete.

        Each part is complete before the next begins. Consume each item before requesting the next.
        """
        gain = ""  # of the last part
        for event in self._reader.feed(chunk.text, is_last=chunk.finish is not None):
            kind = _KINDS[type(event)]
            last = self.parts[-1] if self.parts else None
            begins = isinstance(event, CallBegun) or last is None or last.kind != kind
            if begins and last is not None and gain:
                yield last, gain
                gain = ""
            if kind == "call":
                self._num_calls += isinstance(event, CallBegun)
                if self._num_calls > 1 and not self._is_parallel:
                    continue
                self._is_amid_call = not isinstance(event, CallEnded)
            if begins:
                self.parts.append(AnswerPart(len(self.parts), kind))
                if isinstance(event, CallBegun):
                    self.parts[-1].name = event.name
                    self.parts[-1].call_id = event.id or self._parser.call_id(self.parts[-1].id)
                if last is not None:
                    yield last, None
                yield self.parts[-1], ""
            if isinstance(event, (Content, Reasoning, Arguments)):
                gain += event.text
                self.parts[-1].text += event.text
        if gain:
            yield self.parts[-1], gain
        if chunk.finish is not None and self.parts:
            yield self.parts[-1], None

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """Return OpenAI's name of the reason. A call cut off by a stop string does not count."""
        if finish is None:
            return None
        has_calls = self._num_calls > 0 and not self._is_amid_call
        return "tool_calls" if finish.type == "stop" and has_calls else finish.type


# A server-sent event with its name as `type`, to be written before the answer grows further.
NamedEvent = dict[str, Any]


class PartsFormat(AnswerFormat):
    """Writes an answer with one choice as named events; the last completes the whole, `_object`."""

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
        return named_event(event["type"], event)

    @abstractmethod
    def _begun(self, stream: RequestStream) -> Iterator[NamedEvent]: ...

    @abstractmethod
    def _changed(self, part: AnswerPart, gain: str | None) -> Iterator[NamedEvent]:
        """Yield the events for new text of `part`: "" at its beginning, None at its end."""

    @abstractmethod
    def _ended(self, stream: RequestStream) -> Iterator[NamedEvent]:
        """Yield the last events. All parts are complete."""
