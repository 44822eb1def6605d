"""Bodies of OpenAI's Responses API, and the chat that each of them asks for."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server import unserved_fields
from sgl_jax.server.openai_protocol import MAX_MESSAGES, ChatRequest
from sgl_jax.server.request_fields import RequestFields
from sgl_jax.server.sampling_fields import in_range
from sgl_jax.server.strict_model import StrictModel
from sgl_jax.server.tool_protocol import MAX_TOOLS, CalledFunction, FunctionDefinition

_MAX_METADATA = 16
_Id = Annotated[str, Field(max_length=256)]
# A message of a chat, as `ChatMessage` takes it.
Message = dict[str, Any]


class InputText(StrictModel):
    """A piece of text; images, files and audio are not supported."""

    unserved = unserved_fields.PART

    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | Annotated[list[InputText], Field(fail_fast=True)]


class MessageItem(StrictModel):
    """A message of the conversation."""

    unserved = unserved_fields.PART

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class CallItem(CalledFunction):
    """A call that the model made."""

    unserved = unserved_fields.PART

    type: Literal["function_call"]
    call_id: _Id


class CallOutputItem(StrictModel):
    """The result of a call."""

    unserved = unserved_fields.PART

    type: Literal["function_call_output"]
    call_id: _Id
    output: _Text


class ReasoningText(StrictModel):
    """A piece of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(StrictModel):
    """What the model thought before the item that follows."""

    unserved = unserved_fields.PART

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


def _type_of(item: Any) -> str | None:
    """None for what is no item at all."""
    if isinstance(item, dict):
        return str(item.get("type", "message"))
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(_type_of),
]


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    unserved = unserved_fields.PART

    type: Literal["function"]


class ChosenTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(StrictModel):
    """Of the tools those that the model may call, or one of which it must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class TextFormat(StrictModel):
    """What the text is: anything, a JSON object, or JSON by a schema, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """Of the answer's text."""

    unserved = unserved_fields.PART

    format: TextFormat | None = None


class ReasoningOptions(StrictModel):
    """How much the model shall think, for chat templates that know of it."""

    unserved = unserved_fields.PART

    effort: str | None = None


class ResponsesBody(RequestFields):
    """Body of `/v1/responses`."""

    input: (
        str
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = Field(default=None, description="a system's message, for this once")
    previous_response_id: _Id | None = Field(
        default=None, description="its conversation, without its instructions, comes before"
    )
    store: bool | None = Field(default=None, description="false: it cannot be asked for later")
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def items(self) -> list[Any]:
        """The items of the input."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input)

    def chat(self, history: Sequence[Message]) -> ChatRequest:
        """The same as a chat, after the messages of `history`.

        Raises `InvalidRequestError` for what no chat can be.
        """
        messages = [*history, *messages_of(self.items)]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        body: dict[str, Any] = {
            **self.model_dump(include=set(RequestFields.model_fields)),
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": self._chat_tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise InvalidRequestError(f"input: {error.errors()[0]['msg']}", "input") from error

    @property
    def _chat_tool_choice(self) -> Any:
        match self.tool_choice:
            case ChosenTool() as chosen:
                return _chat_tool_name(chosen)
            case AllowedTools(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [_chat_tool_name(tool) for tool in tools]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        return self.tool_choice

    @property
    def _response_format(self) -> dict[str, Any] | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.type != "json_schema":
            return {"type": given.type}
        if given.json_value is None:
            raise InvalidRequestError("text.format: a json_schema has a schema", "text")
        schema = given.model_dump(include={"strict"}) | {
            "name": given.name or "answer",
            "schema": given.json_value,
        }
        return {"type": "json_schema", "json_schema": schema}


def messages_of(items: Iterable[Any]) -> list[Message]:
    """The items as messages of a chat: calls are part of the assistant's message."""
    messages: list[Message] = []
    thought = ""
    for item in items:
        match item:
            case ReasoningInput():
                thought += "".join(part.text for part in item.content or ())
                continue
            case CallOutputItem():
                text = _text(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
            case CallItem():
                if not messages or messages[-1]["role"] != "assistant" or thought:
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _text(content: str | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def _chat_tool_name(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}
