"""Answers of the OpenAI routes, as msgspec structs: they are written once per streamed chunk."""

from msgspec import UNSET, Struct, UnsetType

from sgl_jax.server.meta_info import MetaInfo


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens`: prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    """A token, its natural log-probability, and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A generated token with the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists over tokens; `text_offset` counts characters from the start of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"


class _Head(Struct, frozen=True):
    """What every answer and every chunk begins with; `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class ChatChoice(Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    response_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET


class ChatCompletion(_Head, frozen=True):
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(Struct, frozen=True):
    content: str
    role: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None


class ChatCompletionChunk(_Head, frozen=True):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(_Head, frozen=True):
    """Whole answers and streamed chunks alike."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "sgl_jax"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
