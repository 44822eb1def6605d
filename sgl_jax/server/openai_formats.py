"""How chat and completion answers are written, streamed or whole."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.chat_answer import ChatAnswer
from sgl_jax.server.context import ServerContext
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import DONE, event, failure_event
from sgl_jax.server.logprobs import CompletionLogprobsWriter, chat_logprobs, native_logprobs
from sgl_jax.server.meta_info import MetaInfo, describe
from sgl_jax.server.openai_protocol import ChatRequest, CompletionRequest, GenerationFields
from sgl_jax.server.openai_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)


class _Format:
    """What both kinds of answers share: name, time, model and counts of tokens."""

    _kind: str  # what new names begin with
    _event_type: type[ChatCompletionChunk | Completion]
    _whole_type: type[ChatCompletion | Completion]

    def __init__(self, context: ServerContext, body: GenerationFields) -> None:
        rid = body.rid[0] if isinstance(body.rid, list) else body.rid
        self._head = (
            rid or f"{self._kind}-{uuid.uuid4().hex}",
            int(time.time()),
            context.model_name,
        )
        self._tokenizer = context.frontend.tokenizer
        self._body = body
        options = body.stream_options
        self._counts_at_end = bool(options and options.include_usage)
        self._always_counts = bool(options and options.continuous_usage_stats)

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        usage: Usage | UnsetType | None = None if self._counts_at_end else UNSET
        if self._always_counts:
            usage = _usage(stream.num_prompt_tokens, chunk.num_output_tokens, stream.cached_tokens)
        pieces = self._pieces(index, chunk, stream)
        return b"".join(event(self._event_type(*self._head, [piece], usage)) for piece in pieces)

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        """The counts, where they are wanted at the end."""
        if not self._counts_at_end:
            return DONE
        return event(self._event_type(*self._head, [], self._total(streams))) + DONE

    def failure(self, error: ApiError) -> bytes:
        return failure_event(error)

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        choices = list(map(self._choice, range(len(chunks)), chunks, streams))
        return self._whole_type(*self._head, choices, self._total(streams))

    def _total(self, streams: Sequence[RequestStream]) -> Usage:
        return usage_of(streams, self._body.num_choices)

    def _pieces(self, index: int, chunk: Chunk, stream: RequestStream) -> Sequence[Any]:
        """A choice as far as one streamed chunk tells of it, in one event or several."""
        return [self._choice(index, chunk, stream)]

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> Any:
        raise NotImplementedError


class ChatFormat(_Format):
    """Answers of `/v1/chat/completions`."""

    _kind, _event_type, _whole_type = "chatcmpl", ChatCompletionChunk, ChatCompletion
    _body: ChatRequest

    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        super().__init__(context, body)
        self._context = context
        self._answers: dict[int, ChatAnswer] = {}

    def _answer(self, index: int, stream: RequestStream) -> ChatAnswer:
        if index not in self._answers:
            self._answers[index] = ChatAnswer.of(self._context, self._body, stream)
        return self._answers[index]

    def _pieces(self, index: int, chunk: Chunk, stream: RequestStream) -> list[ChatChunkChoice]:
        answer = self._answer(index, stream)
        deltas = answer.deltas(chunk)
        ending = self._ending(chunk, answer)
        if not deltas and (self._always_counts or any(part is not None for part in ending)):
            deltas = [answer.empty_delta()]
        pieces = [ChatChunkChoice(index, delta, None, None, None) for delta in deltas[:-1]]
        return [*pieces, *(ChatChunkChoice(index, delta, *ending) for delta in deltas[-1:])]

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> ChatChoice:
        body, request = self._body, stream.request
        answer = self._answer(index, stream)
        message = answer.message(chunk)
        meta_info: MetaInfo | UnsetType = UNSET
        if body.return_meta_info:
            logprobs = native_logprobs(request, self._tokenizer, chunk.logprobs, ())
            meta_info = describe(stream, chunk.num_output_tokens, chunk.finish, **logprobs)
        return ChatChoice(
            index,
            message,
            *self._ending(chunk, answer),
            request.input_ids if body.return_prompt_token_ids or body.return_token_ids else UNSET,
            chunk.token_ids if body.return_token_ids else UNSET,
            meta_info,
        )

    def _ending(
        self, chunk: Chunk, answer: ChatAnswer
    ) -> tuple[ChatLogprobs | None, str | None, int | str | None]:
        """`logprobs`, `finish_reason` and `matched_stop`."""
        wanted = self._body.logprobs
        logprobs = chat_logprobs(self._tokenizer, chunk.logprobs) if wanted else None
        _, matched = _ending(chunk.finish)
        return logprobs, answer.finish_reason(chunk.finish), matched


class CompletionFormat(_Format):
    """Answers of `/v1/completions`. With `echo` the text begins with the prompt."""

    _kind, _event_type, _whole_type = "cmpl", Completion, Completion
    _body: CompletionRequest

    def __init__(
        self, context: ServerContext, body: CompletionRequest, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts`: what to echo for each choice; empty without `echo`."""
        super().__init__(context, body)
        self._echoes = dict(enumerate(prompt_texts))
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> CompletionChoice:
        logprobs = None
        if self._body.logprobs is not None:
            writer = self._writers.setdefault(index, CompletionLogprobsWriter(self._tokenizer))
            logprobs = writer.write([*chunk.prompt_logprobs, *chunk.logprobs])
        shows_ids = self._body.return_token_ids  # not in a stream
        return CompletionChoice(
            index,
            self._echoes.pop(index, "") + chunk.text,
            logprobs,
            *_ending(chunk.finish),
            stream.request.input_ids if shows_ids else UNSET,
            chunk.token_ids if shows_ids else UNSET,
        )


def _ending(finish: FinishReason | None) -> tuple[str | None, int | str | None]:
    """`finish_reason` and `matched_stop`."""
    return (None, None) if finish is None else (finish.type, finish.matched)


def usage_of(streams: Sequence[RequestStream], num_choices: int = 1) -> Usage:
    """Of all together; prompts count once, however many choices each of them has."""
    prompts = streams[::num_choices]
    return _usage(
        sum(stream.num_prompt_tokens for stream in prompts),
        sum(stream.num_output_tokens for stream in streams),
        sum(stream.cached_tokens for stream in prompts),
    )


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
