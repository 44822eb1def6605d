"""A conversation with its tools and settings: the body of `/v1/chat/completions`, and the form to
which the bodies of `/v1/responses` and `/v1/messages` are converted."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import SessionId
from sgl_jax.core.sampling_params import MAX_TOP_LOGPROBS
from sgl_jax.server.fields import (
    GenerationFields,
    Items,
    Metadata,
    RequestFields,
    held_schema,
    refuse_several,
)
from sgl_jax.server.hint_fields import MarkedPart
from sgl_jax.server.strict_model import Part, StrictModel

T = TypeVar("T")
ToolList = Annotated[Items[T], Field(max_length=1024)]
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionDefinition(MarkedPart):
    """A tool's purpose, and the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None, description="calls, if there are any, have arguments that parameters allow"
    )


class Tool(MarkedPart):
    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(MarkedPart):
    """A call that the model made. Its name may have any length, because answers are sent back."""

    name: str
    arguments: str = Field(
        description="the text of a JSON object, or of its beginning if the answer was cut off"
    )

    @field_validator("arguments")
    @classmethod
    def _without_text_an_object(cls, arguments: str) -> str:
        return arguments or "{}"


class ToolCall(MarkedPart):
    """A call that the model made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(StrictModel):
    name: FunctionName


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """The subset of the shown tools that the model may call, or of which it must call one."""

    mode: Literal["auto", "required"]
    tools: ToolList[NamedTool] = Field(min_length=1)


class AllowedToolChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]
)
MAX_MESSAGES = 16_384


class TextPart(MarkedPart):
    """A piece of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(MarkedPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = Field(
        default=None, description="may be omitted if there are tool_calls or reasoning_content"
    )
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ToolList[ToolCall] | None = Field(default=None, description="of the assistant")
    tool_call_id: str | None = Field(default=None, description="of a tool: id of its call")

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError("only the assistant has tool_calls", "tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequestError("only a tool has a tool_call_id", "tool_call_id")
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise InvalidRequestError("content is missing: it must be a text", "content")
        return self

    @property
    def num_chars(self) -> int:
        """Return a lower bound on the characters that the template writes for this message."""
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(joined_text(self.content)) + calls

    def for_template(self) -> dict[str, Any]:
        """Return the form expected by chat templates; the worker adapts it to the model's template.

        `content` is a string even without content, because many templates concatenate it.
        """
        written = {"content"} if self.tool_calls else {"content", "tool_calls"}
        others = self.model_dump(exclude=written, exclude_none=True)
        return {"content": content_of(self.content), **others}


def joined_text(content: str | list[Any] | None) -> str:
    """Return a content's text. Parts, which have a `text` each, are joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())


def content_of(content: str | list[Any] | None) -> str | list[dict[str, str]]:
    """Return a content for chat templates: a string, or a list if it has several parts."""
    if isinstance(content, list) and len(content) > 1:
        return [{"type": "text", "text": part.text} for part in content]
    return joined_text(content)


class ChatRequest(GenerationFields):
    """Body of `/v1/chat/completions`."""

    ineffective = frozenset({"metadata"})

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=0, description="0: no output")
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: ToolList[Tool] | None = None
    tool_choice: ToolChoice | None = Field(
        default=None, description="none: the model does not see the tools"
    )
    parallel_tool_calls: bool = Field(
        default=True, description="false: of several calls only the first is handed out"
    )
    separate_reasoning: bool = Field(default=True, description="false: reasoning stays in content")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = Field(default=None, description="without effect")
    reasoning_effort: str | None = None
    return_prompt_token_ids: bool | None = Field(default=None, description="not in a stream")
    return_meta_info: bool | None = Field(
        default=None, description="as in /generate; not in a stream"
    )
    session_id: SessionId | None = Field(
        default=None, description="of a streaming session, which finds the new part by itself"
    )

    @classmethod
    def of(
        cls,
        body: RequestFields,
        field: str,
        *,
        tools: Sequence[Part] | None,
        **given: Any,
    ) -> "ChatRequest":
        """Build the chat of another API's body from the fields with a common name, and `given`.

        `tools` have `FunctionDefinition`'s fields. Raises `InvalidRequestError` with `field`.
        """
        own = set(FunctionDefinition.model_fields)
        functions = [tool.model_dump(include=own, exclude_none=True) for tool in tools or ()]
        given["tools"] = [{"type": "function", "function": each} for each in functions] or None
        shared = body.model_dump(include=set(cls.model_fields) - given.keys())
        try:
            return cls.model_validate(shared | given)
        except ValidationError as error:
            raise InvalidRequestError(f"{field}: {error.errors()[0]['msg']}", field) from error

    @model_validator(mode="after")
    def _supported_combination(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.session_id is not None:
            refuse_several(self.num_choices, "n")
        return self

    @property
    def shown_tools(self) -> list[Tool]:
        return (self.tools or []) if self.tool_choice != "none" else []

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """Return the argument schema of each shown tool, by name; None if no tool is shown."""
        functions = [tool.function for tool in self.shown_tools]
        return {function.name: function.parameters or {} for function in functions} or None

    @property
    def _choice(self) -> tuple[str, set[str]]:
        match self.tool_choice:
            case NamedTool(function=function):
                return "required", {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                return allowed.mode, {tool.function.name for tool in allowed.tools}
            case mode:
                return mode or "auto", {tool.function.name for tool in self.shown_tools}

    @property
    def held_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schema that constrains the arguments of each callable tool, by name.

        Raises `InvalidRequestError` if a missing tool is chosen.
        """
        _, chosen = self._choice
        schemas = {
            each.name: held_schema(each.parameters, is_strict=each.strict)
            for each in (tool.function for tool in self.shown_tools)
        }
        if not chosen or not chosen <= schemas.keys():
            raise InvalidRequestError("tool_choice: there is no such tool in tools", "tool_choice")
        return {name: schema for name, schema in schemas.items() if name in chosen}

    @property
    def must_call(self) -> bool:
        return self._choice[0] == "required"

    @property
    def holds_calls(self) -> bool:
        """Return whether calls, if any, are constrained to `held_schemas`."""
        has_strict = any(tool.function.strict for tool in self.shown_tools)
        return self.must_call or has_strict or isinstance(self.tool_choice, AllowedToolChoice)

    @property
    def json_format(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer's text; None if the text need not be JSON."""
        grammar = self.response_format.grammar() if self.response_format else {}
        return json.loads(grammar["json_schema"]) if "json_schema" in grammar else None

    @property
    def template_args(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        effort = self.reasoning_effort
        return given if effort is None else {"reasoning_effort": effort} | given
