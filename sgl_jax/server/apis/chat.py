"""The route `/v1/chat/completions`. Its body is a `ChatRequest`."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.apis.native_answers import MetaInfo, describe, native_logprobs
from sgl_jax.server.apis.openai import (
    LOWEST_LOGPROB,
    AnswerHead,
    OpenAIFormat,
    Usage,
    field_names,
    token_text,
)
from sgl_jax.server.chat import AnswerPart, ChatAnswer, PartKind, answer_chat
from sgl_jax.server.chat_request import ChatRequest
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.images import ids_for_client
from sgl_jax.server.references import References, references_of
from sgl_jax.text.tokenizer import Tokenizer

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)


class TopLogprob(Struct, frozen=True):
    """A token, its natural log-probability, and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A generated token with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class CalledFunctionAnswer(Struct):
    """A called function. `arguments` is the text of a JSON object, unless the answer was cut off.

    In a stream, `name` is sent once, and then `arguments` is the next piece.
    """

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallAnswer(Struct, frozen=True):
    """In a stream, `id` and `type` are sent once, and `index` counts the answer's calls."""

    function: CalledFunctionAnswer
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AssistantMessage(Struct):
    """The whole message, or the gain of a chunk. `content` is null if there are only tool calls."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """A choice, with `delta` in a stream, else `message`."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    response_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET


class ChatCompletion(AnswerHead, frozen=True):
    """A whole answer, or a chunk of a stream: then `object` is `chat.completion.chunk`."""

    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion"


@router.post("/chat/completions", responses=answers(ChatCompletion, streams=True))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = field_names(body, limit, "messages")
    return await answer_chat(request, body, ChatFormat(references_of(request), body), names)


_TEXT_DELTAS: dict[PartKind, Callable[[str], AssistantMessage]] = {
    "content": AssistantMessage,
    "reasoning": lambda gain: AssistantMessage(reasoning_content=gain),
}


class ChatFormat(OpenAIFormat):
    _kind, _type, _chunk_object = "chatcmpl", ChatCompletion, "chat.completion.chunk"
    _body: ChatRequest

    def __init__(self, refs: References, body: ChatRequest) -> None:
        super().__init__(refs, body)
        self._refs = refs
        self._answers: dict[int, ChatAnswer] = {}

    def _pieces(self, index: int, chunk: Chunk, stream: RequestStream) -> list[ChatChoice]:
        is_first = index not in self._answers
        if is_first:
            self._answers[index] = ChatAnswer(self._refs, self._body, stream)
        answer = self._answers[index]
        deltas = [
            _call_delta(part, gain, answer)
            if part.kind == "call"
            else _TEXT_DELTAS[part.kind](gain)
            for part, gain in answer.feed(chunk)
            if gain or (gain is not None and part.kind == "call")
        ]
        is_ending = self._body.logprobs or chunk.finish is not None
        if not deltas and (is_first or is_ending or self._always_counts):
            # Clients expect content if there are no calls.
            deltas = [AssistantMessage() if answer.num_calls else AssistantMessage("")]
        if is_first:
            deltas[0].role = "assistant"
        pieces = [ChatChoice(index, None, None, None, delta=delta) for delta in deltas]
        if is_ending:
            pieces[-1] = ChatChoice(index, *self._ending(chunk, answer), delta=deltas[-1])
        return pieces

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> ChatChoice:
        body, request = self._body, stream.request
        answer = ChatAnswer(self._refs, body, stream)
        for _ in answer.feed(chunk):
            pass
        shows_ids = body.return_prompt_token_ids or body.return_token_ids
        meta_info: MetaInfo | UnsetType = UNSET
        if body.return_meta_info:
            logprobs = native_logprobs(request, self._tokenizer, chunk.logprobs, ())
            meta_info = describe(stream, chunk, **logprobs)
        return ChatChoice(
            index,
            *self._ending(chunk, answer),
            message_of(answer.parts),
            UNSET,
            ids_for_client(self._refs, request) if shows_ids else UNSET,
            chunk.token_ids if body.return_token_ids else UNSET,
            meta_info,
        )

    def _ending(
        self, chunk: Chunk, answer: ChatAnswer
    ) -> tuple[ChatLogprobs | None, str | None, int | str | None]:
        has_logprobs, finish = self._body.logprobs, chunk.finish
        logprobs = _logprobs(self._tokenizer, chunk.logprobs) if has_logprobs else None
        return logprobs, answer.finish_reason(finish), None if finish is None else finish.matched


def _call_delta(part: AnswerPart, gain: str, answer: ChatAnswer) -> AssistantMessage:
    index = answer.num_calls - 1
    call = ToolCallAnswer(CalledFunctionAnswer(gain), index=index)
    if not gain:
        call = ToolCallAnswer(CalledFunctionAnswer("", part.name), part.call_id, "function", index)
    return AssistantMessage(tool_calls=[call])


def message_of(parts: Sequence[AnswerPart]) -> AssistantMessage:
    content = "".join(part.text for part in parts if part.kind == "content")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    calls = [
        ToolCallAnswer(CalledFunctionAnswer(part.text, part.name), part.call_id, "function")
        for part in parts
        if part.kind == "call"
    ]
    shown = None if calls and not content else content
    return AssistantMessage(shown, "assistant", reasoning or UNSET, calls or UNSET)


def _logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token_id)
        return TopLogprob(token_text(data), max(logprob, LOWEST_LOGPROB), list(data))

    content = []
    for entry in entries:
        own = top(entry.token_id, LOWEST_LOGPROB if entry.logprob is None else entry.logprob)
        others = [top(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, others))
    return ChatLogprobs(content)
