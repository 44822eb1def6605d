"""Bodies and answers of `/tokenize` and `/detokenize`: vLLM's and SGLang's names."""

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server import unserved_fields
from sgl_jax.server.openai_protocol import ChatMessage, ChatRequest
from sgl_jax.server.strict_model import ForEach, StrictModel, TokenIds
from sgl_jax.server.tool_protocol import Tools

_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(StrictModel):
    """Body of `/tokenize`: a text, several, or a conversation."""

    unserved = unserved_fields.REQUEST

    model: str = "default"
    prompt: str | ForEach[str] | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, description="instead of prompt: as the chat template writes it"
    )
    add_special_tokens: bool | None = Field(
        default=None, description="of a prompt; default: true. Templates write their own"
    )
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(
        default=None, description="of messages: must be the opposite of continue_final_message"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = Field(default=None, description="of messages: those of the request")

    @model_validator(mode="after")
    def _one_kind(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", "prompt")
        if self.messages is None:
            for name in _CHAT_FIELDS:
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} is for messages, not for a prompt", name)
        elif self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is for a prompt: the chat template writes its own",
                "add_special_tokens",
            )
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(
            self.continue_final_message
        ):
            raise InvalidRequestError(
                "add_generation_prompt must be the opposite of continue_final_message",
                "add_generation_prompt",
            )
        return self

    @property
    def texts(self) -> list[str]:
        """The prompts, one or several."""
        assert self.prompt is not None
        return self.prompt if isinstance(self.prompt, list) else [self.prompt]

    @property
    def chat(self) -> ChatRequest:
        """The conversation, as its own route takes it."""
        assert self.messages is not None
        return ChatRequest(
            messages=self.messages,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )


class DetokenizeBody(StrictModel):
    """Body of `/detokenize`: the tokens of a text, or of several."""

    model: str = "default"
    tokens: TokenIds | ForEach[TokenIds]
    skip_special_tokens: bool | None = Field(default=None, description="default: true")

    @property
    def is_list(self) -> bool:
        """Whether several texts were sent, and so are answered."""
        return bool(self.tokens) and isinstance(self.tokens[0], list)

    @property
    def each(self) -> list[list[int]]:
        """The token ids of each text."""
        tokens: Any = self.tokens
        return tokens if self.is_list else [tokens]


class Tokenized(Struct, frozen=True):
    """Token ids and their number; of several prompts a list of each. `max_model_len` in tokens."""

    tokens: list[Any]
    count: int | list[int]
    max_model_len: int
    token_strs: list[Any] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """The text, under SGLang's name and under vLLM's; of several a list."""

    text: str | list[str]
    prompt: str | list[str]
