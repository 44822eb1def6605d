"""How chat and completion answers are written, streamed or whole."""

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.context import ServerContext
from sgl_jax.server.generation import event
from sgl_jax.server.logprobs import CompletionLogprobsWriter, chat_logprobs, native_logprobs
from sgl_jax.server.meta_info import MetaInfo, describe
from sgl_jax.server.openai_protocol import ChatRequest, CompletionRequest, GenerationFields
from sgl_jax.server.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    Delta,
    PromptTokensDetails,
    Usage,
)


class UsageFormat:
    """Counts tokens over prompts and choices, and knows when clients want to see it."""

    def __init__(self, body: GenerationFields) -> None:
        options = body.stream_options
        self.at_end = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._num_choices = body.num_choices

    def of_chunk(self, chunk: Chunk, stream: RequestStream) -> Usage | UnsetType | None:
        """What the `usage` field of one streamed chunk says."""
        if self._always:
            return _usage(stream.num_prompt_tokens, chunk.num_output_tokens, stream.cached_tokens)
        return None if self.at_end else UNSET

    def total(self, streams: Sequence[RequestStream]) -> Usage:
        """Prompts count once, however many choices each of them has."""
        prompts = streams[:: self._num_choices]
        return _usage(
            sum(stream.num_prompt_tokens for stream in prompts),
            sum(stream.num_output_tokens for stream in streams),
            sum(stream.cached_tokens for stream in prompts),
        )


class _Format:
    """What both kinds of answers share: name, time, model and counts of tokens."""

    _kind: str  # what new names begin with
    _event_type: type[ChatCompletionChunk | Completion]

    def __init__(self, context: ServerContext, body: GenerationFields) -> None:
        rid = body.rid[0] if isinstance(body.rid, list) else body.rid
        self._head = (
            rid or f"{self._kind}-{uuid.uuid4().hex}",
            int(time.time()),
            context.model_name,
        )
        self._tokenizer = context.frontend.tokenizer
        self._shows_ids = bool(body.return_token_ids)
        self._usage = UsageFormat(body)

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        """The counts, where they are wanted at the end."""
        if not self._usage.at_end:
            return b""
        return event(self._event_type(*self._head, [], self._usage.total(streams)))


class ChatFormat(_Format):
    """Answers of `/v1/chat/completions`."""

    _kind, _event_type = "chatcmpl", ChatCompletionChunk

    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        super().__init__(context, body)
        self._logprobs = bool(body.logprobs)
        self._shows_prompt_ids = bool(body.return_prompt_token_ids or body.return_token_ids)
        self._shows_meta_info = bool(body.return_meta_info)
        self._begun: set[int] = set()

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        first = index not in self._begun
        self._begun.add(index)
        choice = ChatChunkChoice(
            index,
            Delta(chunk.text, "assistant" if first else UNSET),
            chat_logprobs(self._tokenizer, chunk.logprobs) if self._logprobs else None,
            *_ending(chunk.finish),
        )
        usage = self._usage.of_chunk(chunk, stream)
        return event(ChatCompletionChunk(*self._head, [choice], usage))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                AssistantMessage(chunk.text),
                chat_logprobs(self._tokenizer, chunk.logprobs) if self._logprobs else None,
                *_ending(chunk.finish),
                stream.request.input_ids if self._shows_prompt_ids else UNSET,
                chunk.token_ids if self._shows_ids else UNSET,
                self._meta_info(chunk, stream) if self._shows_meta_info else UNSET,
            )
            for index, (chunk, stream) in enumerate(zip(chunks, streams, strict=True))
        ]
        return ChatCompletion(*self._head, choices, self._usage.total(streams))

    def _meta_info(self, chunk: Chunk, stream: RequestStream) -> MetaInfo:
        logprobs = native_logprobs(stream.request, self._tokenizer, chunk.logprobs, ())
        return describe(stream, chunk.num_output_tokens, chunk.finish, **logprobs)


class CompletionFormat(_Format):
    """Answers of `/v1/completions`. With `echo` the text begins with the prompt."""

    _kind, _event_type = "cmpl", Completion

    def __init__(
        self, context: ServerContext, body: CompletionRequest, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts`: what to echo for each choice; empty without `echo`."""
        super().__init__(context, body)
        self._with_logprobs = body.logprobs is not None
        self._echoes = dict(enumerate(prompt_texts))
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        choice = self._choice(index, chunk, stream)
        return event(Completion(*self._head, [choice], self._usage.of_chunk(chunk, stream)))

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Completion:
        choices = list(map(self._choice, range(len(chunks)), chunks, streams))
        return Completion(*self._head, choices, self._usage.total(streams))

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> CompletionChoice:
        text = self._echoes.pop(index, "") + chunk.text
        logprobs = None
        if self._with_logprobs:
            writer = self._writers.setdefault(index, CompletionLogprobsWriter(self._tokenizer))
            logprobs = writer.write([*chunk.prompt_logprobs, *chunk.logprobs])
        choice = CompletionChoice(index, text, logprobs, *_ending(chunk.finish))
        if not self._shows_ids:  # as in every stream
            return choice
        ids = {"prompt_token_ids": stream.request.input_ids, "token_ids": chunk.token_ids}
        return replace(choice, **ids)


def _ending(finish: FinishReason | None) -> tuple[str | None, int | str | None]:
    """`finish_reason` and `matched_stop`."""
    return (None, None) if finish is None else (finish.type, finish.matched)


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
