"""Routes without the engine: tokenize and detokenize."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server import unserved_fields
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.apis.openai import token_text
from sgl_jax.server.chat_request import ChatMessage, ChatRequest, Tool, ToolList
from sgl_jax.server.fields import ForEach, Items, TokenIds
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import LoopShare
from sgl_jax.server.images import ids_for_client
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import encode_chat, encode_texts
from sgl_jax.server.strict_model import StrictModel

router = APIRouter(tags=["text"], route_class=JsonRoute)
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(StrictModel):
    """Body of `/tokenize`: a text, several texts, or a conversation."""

    unserved = unserved_fields.REQUEST

    model: str = "default"
    prompt: str | ForEach[str] | None = None
    messages: Items[ChatMessage] | None = Field(
        default=None, min_length=1, description="instead of prompt: as the chat template writes it"
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="of a prompt; default: true. Chat templates write special tokens themselves",
    )
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(
        default=None, description="of messages: must be the opposite of continue_final_message"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList[Tool] | None = Field(default=None, description="only with messages")

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
                "add_special_tokens is for a prompt: the chat template writes special tokens",
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


class DetokenizeBody(StrictModel):
    """Body of `/detokenize`: the tokens of a text, or of several texts."""

    model: str = "default"
    tokens: TokenIds | ForEach[TokenIds]
    skip_special_tokens: bool | None = Field(default=None, description="default: true")


class Tokenized(Struct, frozen=True):
    """Token ids and their number; for several prompts a list of each. `max_model_len` in tokens."""

    tokens: list[Any]
    count: int | list[int]
    max_model_len: int
    token_strs: list[Any] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """The text (for several, a list), under SGLang's name and under vLLM's."""

    text: str | list[str]
    prompt: str | list[str]


@router.post("/tokenize", responses=answers(Tokenized))
@router.post("/v1/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return token ids of a prompt, of several, or of a conversation in the chat template."""
    refs = references_of(request)
    refs.check_model(body.model)
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        ids = [ids_for_client(refs, await encode_chat(request, chat))]
    else:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        special = body.add_special_tokens is not False
        packed = await encode_texts(request, texts, add_special_tokens=special)
        ids = [each.tolist() for each in packed]

    def shaped(values: list[Any]) -> Any:
        return values if isinstance(body.prompt, list) else values[0]

    strings: Any = UNSET
    if body.return_token_strs:
        strings = shaped([await _strings(refs, each) for each in ids])
    most = refs.frontend.facts.max_context_len
    return json_response(Tokenized(shaped(ids), shaped(list(map(len, ids))), most, strings))


@router.post("/detokenize", responses=answers(Detokenized))
@router.post("/v1/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, or of each of several lists."""
    refs = references_of(request)
    refs.check_model(body.model)
    tokens: Any = body.tokens
    is_list = bool(tokens) and isinstance(tokens[0], list)
    each: list[list[int]] = tokens if is_list else [tokens]
    vocab_size = refs.frontend.facts.vocab_size
    largest = max(map(max, filter(None, each)), default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"tokens holds {largest}, outside the vocabulary [0, {vocab_size})", "tokens"
        )
    skips = body.skip_special_tokens is not False
    decode = refs.frontend.tokenizer.decode
    # In a thread, because the tokens of a whole book take seconds.
    texts = [await asyncio.to_thread(decode, ids, skip_special_tokens=skips) for ids in each]
    text = texts if is_list else texts[0]
    return json_response(Detokenized(text, text))


@router.get("/tokenizer_info", responses=answers())
async def tokenizer_info(request: Request) -> Response:
    """Return class, special tokens and chat template of the tokenizer."""
    refs = references_of(request)
    most = refs.frontend.facts.max_context_len
    return json_response({**refs.frontend.tokenizer.facts, "model_max_length": most})


async def _strings(refs: References, ids: Sequence[int]) -> list[str]:
    token_bytes, share = refs.frontend.tokenizer.token_bytes, LoopShare()
    strings = []
    for token in ids:
        strings.append(token_text(token_bytes(token)))
        await share.pause()
    return strings
