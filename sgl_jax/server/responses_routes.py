"""OpenAI's Responses API: answers that are kept, so that a conversation goes on by an id."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct

from sgl_jax.server.api_keys import caller_of
from sgl_jax.server.chat import answer_chat
from sgl_jax.server.context import context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import json_response
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.responses_format import ResponseObject, ResponsesFormat
from sgl_jax.server.responses_protocol import Message, ResponsesBody, messages_of
from sgl_jax.server.responses_store import StoredResponse

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=JsonRoute)

# Names of a chat's fields, and of the engine's -> those of the body.
_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "text": "input",
    "input_ids": "input",
    "messages": "input",
    "json_schema": "text",
}


class Deleted(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True):
    """Items of an input, all in one page."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


@router.post("", responses=streamed_answers(ResponseObject))
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer an input, after the conversation of an earlier response if one is named."""
    context, owner = context_of(request), caller_of(request).name
    history: list[Message] = []
    if body.previous_response_id is not None:
        before = context.responses.get(body.previous_response_id, owner, "previous_response_id")
        history = msgspec.json.decode(before.messages)

    def keep(response: ResponseObject) -> None:
        if body.store is False:
            return
        said = [*history, *messages_of(body.items), *_as_messages(response)]
        items = [item.model_dump(exclude_none=True) for item in body.items]
        named = [{"id": f"{response.id}_{i}", **item} for i, item in enumerate(items)]
        stored = [msgspec.json.encode(each) for each in (response, named, said)]
        context.responses.put(response.id, StoredResponse(owner, *stored))

    chat = body.chat(history)
    return await answer_chat(request, chat, ResponsesFormat(context, body, chat, keep), _NAMES)


@router.get("/{response_id}", responses=answers(ResponseObject))
async def get_response(response_id: str, request: Request) -> Response:
    """A response that was stored."""
    return Response(_stored(response_id, request).response, media_type="application/json")


@router.delete("/{response_id}", responses=answers(Deleted))
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    context_of(request).responses.delete(response_id, caller_of(request).name)
    return json_response(Deleted(response_id))


@router.get("/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(response_id: str, request: Request) -> Response:
    """What the body of a response's request held, in its order."""
    items = msgspec.json.decode(_stored(response_id, request).input_items)
    return json_response(ItemList(items, items[0]["id"], items[-1]["id"]))


@router.post("/{response_id}/cancel", responses=answers(ResponseObject))
async def cancel_response(response_id: str, request: Request) -> Response:
    """Refused: a stored response has ended, because none runs in the background."""
    _stored(response_id, request)
    raise ApiError(400, "only background responses can be cancelled, and there are none here")


def _stored(response_id: str, request: Request) -> StoredResponse:
    return context_of(request).responses.get(response_id, caller_of(request).name)


def _as_messages(response: ResponseObject) -> list[Message]:
    """The output as a turn of the conversation."""
    message: Message = {"role": "assistant", "content": ""}
    for item in msgspec.to_builtins(response.output):
        match item["type"]:
            case "message":
                message["content"] += "".join(part["text"] for part in item["content"])
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return [message]
