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


class FunctionOfCall(Struct):
    """`arguments` is the text of a JSON object, unless the answer was cut off."""

    name: str
    arguments: str = ""


class ToolCallAnswer(Struct, frozen=True):
    id: str
    function: FunctionOfCall
    type: str = "function"


class AssistantMessage(Struct, frozen=True):
    """`content` is null where there are tool calls alone."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


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


class FunctionDelta(Struct, frozen=True):
    """The next piece of a call's arguments; its name comes once, before them."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """`index` tells the calls of an answer apart; id and type come once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    """What a chunk adds to the message."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
