"""The one way to answer a chat, for every API: chat -> requests -> events."""

import uuid
from collections.abc import Iterator, Mapping, Sequence

from fastapi import Request, Response

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.answer_stream import AnswerFormat, StreamGroup, respond
from sgl_jax.server.chat_request import ChatRequest, NamedTool
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import chat_requests
from sgl_jax.text.output_events import Arguments, CallBegun, CallEnded, Event, joined

_PROMPT_TAIL_TOKENS = 16  # in which a prompt opens or closes the reasoning


async def answer_chat(
    request: Request, chat: ChatRequest, answer_format: AnswerFormat, names: Mapping[str, str]
) -> Response:
    """Run `chat`, the body of `request` as a chat, and answer in `answer_format`.

    Errors name fields by `names`, as for `client_names`.
    """
    refs = references_of(request)
    check_chat(refs, chat)
    grammar = _call_grammar(refs, chat)
    names = {**names, **dict.fromkeys(grammar, "tools")}

    def reasoning_after(prompt: Sequence[int]) -> tuple[str, str] | None:
        return refs.answer_parser.reasoning_after(_prompt_tail(refs, prompt))

    requests = await chat_requests(request, chat, names, grammar, reasoning_after)
    marks = refs.answer_parser.marks(
        has_tools=bool(chat.shown_tools), has_reasoning=chat.separates_reasoning
    )
    kept_tokens = frozenset(refs.frontend.tokenizer.special_ids_of(marks).values())
    group = StreamGroup(
        request, requests, streaming=chat.stream, names=names, kept_tokens=kept_tokens
    )
    return await respond(request, group, answer_format)


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


def _call_grammar(refs: References, chat: ChatRequest) -> dict[str, str]:
    """The sampling parameter that holds the answer to calls, if `chat` requires that.

    Raises `InvalidRequestError` for tools whose calls cannot be held to their schemas.
    """
    if not chat.must_call and not chat.holds_calls:
        return {}
    schemas, grammar = chat.held_schemas, refs.answer_parser.call_grammar
    assert grammar is not None, "tools are refused where the format of calls is unknown"
    try:
        marks = refs.answer_parser.marks(has_tools=True, has_reasoning=False)
        special = refs.frontend.tokenizer.special_ids_of(marks)
        if not chat.must_call:
            return {"ebnf": grammar.calls_amid_content(schemas, special)}
        is_single = chat.parallel_tool_calls is False or isinstance(chat.tool_choice, NamedTool)
        return {"ebnf": grammar.calls(schemas, special, is_single=is_single)}
    except ValueError as error:
        raise InvalidRequestError(f"tools: {error}", "tools") from error


def _prompt_tail(refs: References, prompt: Sequence[int]) -> str:
    tokens = list(prompt[-_PROMPT_TAIL_TOKENS:])
    return refs.frontend.tokenizer.decode(tokens, skip_special_tokens=False)


class ChatAnswer:
    """One choice of a chat: the events of its chunks, as they arrive."""

    def __init__(self, refs: References, chat: ChatRequest, stream: RequestStream) -> None:
        self._parser = refs.answer_parser
        tail = _prompt_tail(refs, stream.request.input_ids)
        self._reader = self._parser.reader(
            chat.schemas, tail, has_reasoning=chat.separates_reasoning
        )
        self._is_parallel = chat.parallel_tool_calls is not False
        self.num_calls = 0
        self._is_amid_call = False

    def events(self, chunk: Chunk) -> Iterator[Event]:
        """Events of a chunk for the client, calls with an id; counts calls as they begin."""
        events = self._reader.feed(chunk.text)
        if chunk.finish is not None:
            events = joined([*events, *self._reader.finish()])
        for event in events:
            if isinstance(event, CallBegun):
                self.num_calls += 1
                event = event._replace(id=event.id or self._parser.call_id(uuid.uuid4().hex))
            is_of_call = isinstance(event, (CallBegun, Arguments, CallEnded))
            if is_of_call and self.num_calls > 1 and not self._is_parallel:
                continue
            if is_of_call:
                self._is_amid_call = not isinstance(event, CallEnded)
            if not isinstance(event, CallEnded):
                yield event

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """The name in OpenAI's API. A call that a stop string has cut off does not count."""
        if finish is None:
            return None
        has_calls = self.num_calls > 0 and not self._is_amid_call
        return "tool_calls" if finish.type == "stop" and has_calls else finish.type
