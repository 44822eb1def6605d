"""How chat and completion answers are written, streamed or whole."""

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.context import ServerContext
from sgl_jax.server.generation import Answer, event
from sgl_jax.server.logprobs import CompletionLogprobsWriter, chat_logprobs
from sgl_jax.server.openai_protocol import ChatRequest, CompletionRequest, GenerationFields
from sgl_jax.server.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
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

    def total(self, streams: Sequence[RequestStream], *, without_output: bool = False) -> Usage:
        """Prompts count once, however many choices each of them has."""
        prompts = streams[:: self._num_choices]
        return _usage(
            sum(stream.num_prompt_tokens for stream in prompts),
            0 if without_output else sum(stream.num_output_tokens for stream in streams),
            sum(stream.cached_tokens for stream in prompts),
        )


class ChatFormat:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = context.model_name
        self._tokenizer = context.frontend.tokenizer
        self._logprobs = bool(body.logprobs)
        self._usage = UsageFormat(body)
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
        return event(ChatCompletionChunk(self._id, self._created, self._model, [choice], usage))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        if not self._usage.at_end:
            return b""
        usage = self._usage.total(streams)
        return event(ChatCompletionChunk(self._id, self._created, self._model, [], usage))

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                AssistantMessage(answer.text),
                chat_logprobs(self._tokenizer, answer.logprobs) if self._logprobs else None,
                *_ending(answer.finish),
            )
            for index, answer in enumerate(answers)
        ]
        usage = self._usage.total([answer.stream for answer in answers])
        return ChatCompletion(self._id, self._created, self._model, choices, usage)


class CompletionFormat:
    """Answers of `/v1/completions`.

    With `echo` the text begins with the prompt. `max_tokens` 0 asks for the prompt only: the
    engine always generates one token, which is left out here.
    """

    def __init__(
        self, context: ServerContext, body: CompletionRequest, prompt_texts: Sequence[str]
    ) -> None:
        """`prompt_texts`: what to echo for each choice; empty without `echo`."""
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = context.model_name
        self._tokenizer = context.frontend.tokenizer
        self._with_logprobs = body.logprobs is not None
        self._prompt_only = body.max_tokens == 0
        self._usage = UsageFormat(body)
        self._echoes = dict(enumerate(prompt_texts))
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        choice = self._choice(index, chunk)
        usage = self._usage.of_chunk(chunk, stream)
        return event(Completion(self._id, self._created, self._model, [choice], usage))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        if not self._usage.at_end:
            return b""
        usage = self._usage.total(streams, without_output=self._prompt_only)
        return event(Completion(self._id, self._created, self._model, [], usage))

    def whole(self, answers: Sequence[Answer]) -> Completion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        streams = [answer.stream for answer in answers]
        usage = self._usage.total(streams, without_output=self._prompt_only)
        return Completion(self._id, self._created, self._model, choices, usage)

    def _choice(self, index: int, part: Chunk | Answer) -> CompletionChoice:
        text = self._echoes.pop(index, "") + ("" if self._prompt_only else part.text)
        if self._prompt_only and part.finish is not None and part.finish.type == "stop":
            ending: tuple[str | None, int | str | None] = ("length", None)
        else:
            ending = _ending(part.finish)
        return CompletionChoice(index, text, self._logprobs(index, part), *ending)

    def _logprobs(self, index: int, part: Chunk | Answer) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        writer = self._writers.setdefault(index, CompletionLogprobsWriter(self._tokenizer))
        output = [] if self._prompt_only else part.logprobs
        return writer.write([*part.prompt_logprobs, *output])


def _ending(finish: FinishReason | None) -> tuple[str | None, int | str | None]:
    """`finish_reason` and `matched_stop`."""
    return (None, None) if finish is None else (finish.type, finish.matched)


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
