"""Tools in the bodies of chats: those that the model may call, and calls in the conversation."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server import unserved_fields
from sgl_jax.server.strict_model import StrictModel

MAX_TOOLS = 1024
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionDefinition(StrictModel):
    """What a tool does, and the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None, description="calls, if there are any, have arguments that parameters allow"
    )


class Tool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(StrictModel):
    """`arguments` is the text of a JSON object."""

    name: FunctionName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _must_be_an_object(cls, arguments: str) -> str:
        try:
            is_object = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise InvalidRequestError("arguments must be the text of a JSON object", None)
        return arguments or "{}"


class ToolCall(StrictModel):
    """A call that the model made earlier in the conversation."""

    unserved = unserved_fields.PART

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        call = {"type": self.type, "function": self.function.model_dump()}
        return call if self.id is None else {"id": self.id, **call}


class NamedFunction(StrictModel):
    """Of a tool."""

    name: FunctionName


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """Of the tools that the model is told of, those that it may call, or one of which it must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(StrictModel):
    """`AllowedTools`, as one of the choices."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]
)
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolCalls = Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
