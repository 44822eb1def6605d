"""Text to tokens and back, without the engine."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server.connection import LoopShare
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.generation import json_response
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openapi import answers
from sgl_jax.server.text_protocol import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

router = APIRouter(tags=["text"], route_class=JsonRoute)


@router.post("/tokenize", responses=answers(Tokenized))
@router.post("/v1/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a prompt, of several, or of a conversation as the chat template writes it."""
    context = context_of(request)
    context.check_model(body.model)
    if body.prompt is None:
        ids = await context.encode_chat(request, body.chat)
    else:
        special = body.add_special_tokens is not False
        packed = await context.encode_texts(request, body.texts, add_special_tokens=special)
        ids = [each.tolist() for each in packed]
    strings = [await _strings(context, each) for each in ids] if body.return_token_strs else None
    most = context.frontend.facts.max_context_len
    if isinstance(body.prompt, list):
        counts = list(map(len, ids))
        return json_response(Tokenized(ids, counts, most, UNSET if strings is None else strings))
    (own,) = ids
    return json_response(Tokenized(own, len(own), most, UNSET if strings is None else strings[0]))


@router.post("/detokenize", responses=answers(Detokenized))
@router.post("/v1/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids, or of several lists of them."""
    context = context_of(request)
    context.check_model(body.model)
    vocab_size = context.frontend.facts.vocab_size
    for ids in body.each:
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(
                f"tokens holds {max(ids)}, outside the vocabulary [0, {vocab_size})", "tokens"
            )
    skips = body.skip_special_tokens is not False
    decode = context.frontend.tokenizer.decode
    # In a thread: the tokens of a whole book take seconds.
    texts = [await asyncio.to_thread(decode, ids, skip_special_tokens=skips) for ids in body.each]
    text = texts if body.is_list else texts[0]
    return json_response(Detokenized(text, text))


@router.get("/tokenizer_info", responses=answers())
async def tokenizer_info(request: Request) -> Response:
    """Class, special tokens and chat template of the tokenizer."""
    context = context_of(request)
    most = context.frontend.facts.max_context_len
    return json_response({**context.frontend.tokenizer.facts, "model_max_length": most})


async def _strings(context: ServerContext, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself; bytes that are no UTF-8 are replaced."""
    token_bytes, share = context.frontend.tokenizer.token_bytes, LoopShare()
    strings = []
    for token in ids:
        strings.append(token_bytes(token).decode("utf-8", errors="replace"))
        await share.pause()
    return strings
