"""OpenAI's Responses API: body, chat, routes. `response_events.py` writes the answer.

Responses are kept (`response_store.py`), so that a conversation can continue from an id.
"""

import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from pydantic import Field, Tag, ValidationError

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.shares import holder_of
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.apis.chat import AssistantMessage
from sgl_jax.server.apis.response_events import ResponseObject, ResponsesFormat
from sgl_jax.server.apis.response_items import (
    ITEM,
    InputItem,
    ItemReference,
    Message,
    MessageItem,
    messages_of,
)
from sgl_jax.server.apis.response_store import ResponseStore, StoredResponse
from sgl_jax.server.chat import answer_chat
from sgl_jax.server.chat_request import MAX_MESSAGES, ChatRequest, ToolList
from sgl_jax.server.errors import ApiError
from sgl_jax.server.fields import Items, Metadata, RequestFields, in_range
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.keys import caller_of, tenant_of
from sgl_jax.server.hint_fields import longest_mark
from sgl_jax.server.offered_tools import (
    HostedTool,
    NamespaceTool,
    OfferedFunctions,
    ResponseTool,
    tool_kind,
)
from sgl_jax.server.references import references_of
from sgl_jax.server.strict_model import Part, StrictModel

_Id = Annotated[str, Field(max_length=256)]
_Tool = Annotated[
    Annotated[ResponseTool, Tag("Function")]
    | Annotated[NamespaceTool, Tag("Namespace")]
    | Annotated[HostedTool, Tag("Hosted")],
    tool_kind("function", "namespace"),
]


class ChosenTool(StrictModel):
    type: Literal["function"]
    name: str
    namespace: str | None = None

    def of_chat(self, functions: OfferedFunctions) -> dict[str, Any]:
        name = functions.chosen(self.namespace, self.name)
        return {"type": "function", "function": {"name": name}}


class ChosenTools(StrictModel):
    """The subset of tools that the model may call, or of which it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ToolList[ChosenTool] = Field(min_length=1)

    def of_chat(self, functions: OfferedFunctions) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.of_chat(functions) for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TextFormat(StrictModel):
    """Any text, a JSON object, or JSON by a schema, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def of_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        if self.json_value is None:
            raise InvalidRequestError("text.format: a json_schema has a schema", "text")
        name = self.name or "answer"
        schema = {"name": name, "schema": self.json_value, "strict": self.strict}
        return {"type": "json_schema", "json_schema": schema}


class TextOptions(Part):
    format: TextFormat | None = None


class ReasoningOptions(Part):
    """The amount of reasoning, for chat templates with that setting."""

    effort: str | None = None


class ResponsesBody(RequestFields):
    """Body of `/v1/responses`."""

    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(default=None, description="a system's message, for this once")
    previous_response_id: _Id | None = Field(
        default=None, description="its conversation, without its instructions, comes before"
    )
    store: bool | None = Field(default=None, description="false: it is not kept")
    metadata: Metadata | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    tools: ToolList[_Tool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenTool | ChosenTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input)

    @property
    def functions(self) -> OfferedFunctions:
        return OfferedFunctions(self.tools or [])

    def chat(self, conversation: list[Message], functions: OfferedFunctions) -> ChatRequest:
        """Return the equivalent chat for `conversation`, which ends with this body's messages.

        Raises `InvalidRequestError` if there is no equivalent chat.
        """
        said = self.instructions
        first = [] if said is None else [{"role": "system", "content": said}]
        choice, given = self.tool_choice, self.text and self.text.format
        return ChatRequest.of(
            self,
            "input",
            tools=functions.definitions,
            cache_control=longest_mark(self),
            messages=first + conversation,
            max_completion_tokens=self.max_output_tokens,
            tool_choice=choice
            if choice is None or isinstance(choice, str)
            else choice.of_chat(functions),
            response_format=given and given.of_chat,
            reasoning_effort=self.reasoning and self.reasoning.effort,
        )


router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=JsonRoute)
# Name in a chat or the engine -> name in the body.
_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "text": "input",
    "input_ids": "input",
    "messages": "input",
    "json_schema": "text",
}


@router.post("", responses=answers(ResponseObject, streams=True))
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer an input, continuing the conversation of `previous_response_id` if it is given."""
    given = _items_of(body, request)
    conversation = messages_of(given)
    if body.previous_response_id is not None:
        before = _stored(body.previous_response_id, request, "previous_response_id")
        conversation = msgspec.json.decode(before.messages) + conversation

    def keep(response: ResponseObject, message: AssistantMessage) -> None:
        items = [
            {"id": f"{response.id}_{number}", **item.model_dump(exclude_none=True)}
            for number, item in enumerate(given)
        ]
        parts = (response, items, [*conversation, message])
        written, input_items, messages = map(msgspec.json.encode, parts)
        owner, tenant = caller_of(request).name, holder_of(tenant_of(request, body.user))
        stored = StoredResponse(owner, written, input_items, messages, tenant)
        request.app.state.responses.put(response.id, stored)

    functions = body.functions
    chat = body.chat(conversation, functions)
    refs = references_of(request)
    begun = _begun(body, refs.model_name)
    answer_format = ResponsesFormat(refs, chat, begun, functions.client_name, keep)
    return await answer_chat(request, chat, answer_format, _NAMES)


def _items_of(body: ResponsesBody, request: Request) -> list[Any]:
    """Return the items of the input, with references replaced by stored items.

    Raises:
        ApiError: 404 for an item that is not stored or is referenced twice.
        InvalidRequestError: an item that cannot be part of an input.
    """
    items = body.items
    unused = dict[str, dict[str, Any]]()  # response id -> item id -> item
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference):
            continue
        field, response_id = f"input[{number}].id", f"resp_{item.id.split('_')[1]}"
        if response_id not in unused:
            unused[response_id] = _stored(response_id, request, field).items_by_id()
        referred = unused[response_id].pop(item.id, None)
        if referred is None:
            raise ApiError(404, "there is no such item, or it is referred to twice", param=field)
        try:
            items[number] = ITEM.validate_python(referred)
        except ValidationError as error:
            raise InvalidRequestError(f"{field}: {error.errors()[0]['msg']}", field) from error
    return items


def _begun(body: ResponsesBody, model: str) -> ResponseObject:
    shown = set(ResponseObject.__struct_fields__) - {"tools"}
    given = body.model_dump(by_alias=True, exclude_none=True, include=shown)
    given["tools"] = [
        tool.model_dump(by_alias=True, exclude_none=True)
        for tool in body.tools or ()
        if not isinstance(tool, HostedTool)
    ]
    given["text"] = {"format": {"type": "text"}} | given.get("text", {})
    given["reasoning"] = {"effort": None, "summary": None} | given.get("reasoning", {})
    given |= {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(time.time()), "model": model}
    return ResponseObject(**given)


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


@router.get("/{response_id}", responses=answers(ResponseObject))
async def get_response(response_id: str, request: Request) -> Response:
    """Return a stored response."""
    return Response(_stored(response_id, request).response, media_type="application/json")


@router.delete("/{response_id}", responses=answers(Deleted))
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response."""
    request.app.state.responses.delete(response_id, caller_of(request).name)
    return json_response(Deleted(response_id))


@router.get("/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(response_id: str, request: Request) -> Response:
    """Return the items of the request's input, in order."""
    items = msgspec.json.decode(_stored(response_id, request).input_items)
    return json_response(ItemList(items, items[0]["id"], items[-1]["id"]))


@router.post("/{response_id}/cancel", responses=answers(ResponseObject))
async def cancel_response(response_id: str, request: Request) -> Response:
    """Refuse to cancel a response: it has ended, because none runs in the background."""
    _stored(response_id, request)
    raise ApiError(400, "only background responses can be cancelled, and there are none here")


def _stored(response_id: str, request: Request, param: str | None = None) -> StoredResponse:
    store: ResponseStore = request.app.state.responses
    return store.get(response_id, caller_of(request).name, param)
