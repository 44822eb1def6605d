"""Bodies of Anthropic's Messages API, and the chat that each of them asks for."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import MAX_STOP_STRINGS
from sgl_jax.server import unserved_fields
from sgl_jax.server.openai_protocol import MAX_MESSAGES, ChatRequest
from sgl_jax.server.request_fields import RequestFields
from sgl_jax.server.sampling_fields import in_range
from sgl_jax.server.strict_model import StrictModel, User
from sgl_jax.server.tool_protocol import MAX_TOOLS, FunctionName

_MAX_BLOCKS = 16_384
_Id = Annotated[str, Field(max_length=256)]


class TextBlock(StrictModel):
    """A piece of text; images and documents are not supported."""

    unserved = unserved_fields.PART

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictModel):
    """What the model thought before what follows."""

    unserved = unserved_fields.PART

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(StrictModel):
    """A call that the model made."""

    unserved = unserved_fields.PART

    type: Literal["tool_use"]
    id: _Id
    name: FunctionName
    input: dict[str, Any]


_Text = str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=_MAX_BLOCKS)]


class ToolResultBlock(StrictModel):
    """The result of a call."""

    unserved = unserved_fields.PART

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: _Text = ""


def _type_of(block: Any) -> str | None:
    """None for what is no block at all."""
    return str(block.get("type")) if isinstance(block, dict) else getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_type_of),
]


class Message(StrictModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=_MAX_BLOCKS)]

    @property
    def blocks(self) -> Sequence[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class MessagesTool(StrictModel):
    """A tool that the model may call. Anthropic's own tools are not there."""

    unserved = unserved_fields.PART

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(
        default=None, description="calls, if there are any, have an input that the schema allows"
    )


class MessagesToolChoice(StrictModel):
    """Whether the model calls a tool: as it likes, any of them, the one named, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(default=None, description="of the tool that is called")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="true: of several calls only the first is handed out"
    )


class Thinking(StrictModel):
    """Whether the model thinks first, for chat templates that know of it."""

    unserved = unserved_fields.PART

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(StrictModel):
    """The answer's text is JSON that a schema allows."""

    type: Literal["json_schema"]
    json_value: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Of the answer."""

    unserved = unserved_fields.PART

    format: OutputFormat | None = None
    effort: str | None = Field(
        default=None, description="for chat templates that know of reasoning_effort"
    )


class Metadata(StrictModel):
    """Of the request."""

    user_id: User | None = Field(default=None, description="the same as user, which goes first")


class CountTokensBody(RequestFields):
    """Body of `/v1/messages/count_tokens`: what the prompt is made of."""

    system: _Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the last is continued, if the model's"
    )
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = Field(default=None, description="by default as the template does")
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises `InvalidRequestError` for what no chat can be."""
        messages = [each for message in self.messages for each in _chat_messages(message)]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        if not messages:
            raise InvalidRequestError("messages: all of them are empty", "messages")
        last = messages[-1]
        choice, output = self.tool_choice, self.output_config
        body: dict[str, Any] = {
            **self.model_dump(include=set(RequestFields.model_fields)),
            **self._sampling,
            "user": self.user or (self.metadata and self.metadata.user_id),
            "messages": messages,
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_tool_choice(choice),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }
        if self.thinking is not None:
            is_enabled = self.thinking.type != "disabled"
            body["chat_template_kwargs"] = {"enable_thinking": is_enabled}
        if output is not None:
            body["reasoning_effort"] = output.effort
            body["response_format"] = _response_format(output.format)
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise InvalidRequestError(
                f"messages: {error.errors()[0]['msg']}", "messages"
            ) from error

    @property
    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountTokensBody):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    temperature: float | None = in_range("temperature", "0: greedy")
    top_p: float | None = in_range("top_p")
    top_k: int | None = in_range("top_k", "-1 or 0: all")

    @property
    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _chat_messages(message: Message) -> Iterator[dict[str, Any]]:
    """The message as those of a chat: a call's result is one of its own, before what is said."""
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for block in message.blocks:
        match block:
            case TextBlock():
                said.append(block.text)
            case ThinkingBlock():
                thought += block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                yield result | {"content": _text(block.content)}
    if said or calls or thought:
        told = {"role": message.role, "content": "\n".join(said)}
        yield told | _given(tool_calls=calls, reasoning_content=thought)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _chat_tool_choice(choice: MessagesToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "tool_choice: name is missing: it must be that of a tool", "tool_choice"
            )
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _response_format(wanted: OutputFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    schema = {"name": "answer", "schema": wanted.json_value, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
