"""Anthropic's Messages API."""

from fastapi import APIRouter, Request, Response

from sgl_jax.server.chat import answer_chat
from sgl_jax.server.context import context_of
from sgl_jax.server.errors import MESSAGES_PATH, MessagesError, client_names
from sgl_jax.server.generation import json_response
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.messages_format import InputTokens, MessageObject, MessagesFormat
from sgl_jax.server.messages_protocol import CountTokensBody, MessagesBody
from sgl_jax.server.openapi import answers, streamed_answers

router = APIRouter(prefix=MESSAGES_PATH, tags=["Anthropic"], route_class=JsonRoute)

# Names of a chat's fields, and of the engine's -> those of the body.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "text": "messages",
    "input_ids": "messages",
    "json_schema": "output_config",
}


@router.post("", responses=streamed_answers(MessageObject, MessagesError))
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    chat = body.chat()
    return await answer_chat(request, chat, MessagesFormat(context_of(request), chat), _NAMES)


@router.post("/count_tokens", responses=answers(InputTokens, MessagesError))
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Count the tokens that a message's prompt would have."""
    context, chat = context_of(request), body.chat()
    context.check_open()
    context.check_model(chat.model)
    context.check_tools(chat)
    with client_names(_NAMES):
        (ids,) = await context.encode_chat(request, chat)
    return json_response(InputTokens(len(ids)))
