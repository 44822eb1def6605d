"""Bodies of the OpenAI routes: what clients may send, with SGLang's additions.

Every field is known (`unserved_fields` has those that are taken only where they ask for nothing):
one that is not, or that asks for something this server cannot do, is refused by name rather than
ignored. A null counts as not given.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import lenient
from sgl_jax.core.messages import SessionId
from sgl_jax.core.request_limits import MAX_CHOICES, check_num_requests
from sgl_jax.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from sgl_jax.server import unserved_fields
from sgl_jax.server.request_fields import RequestFields
from sgl_jax.server.sampling_fields import SamplingFields, in_range
from sgl_jax.server.session_protocol import SessionParams, refuse_several
from sgl_jax.server.strict_model import ForEach, StrictModel, TokenIds
from sgl_jax.server.tool_protocol import (
    AllowedToolChoice,
    NamedTool,
    Tool,
    ToolCalls,
    ToolChoice,
    Tools,
)

MAX_MESSAGES = 16_384


class StreamOptions(StrictModel):
    """`include_usage`: a last event with the usage; `continuous_usage_stats`: in every event."""

    unserved = unserved_fields.PART

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(StrictModel):
    """A schema with a name. Without `strict`, what of it no grammar can hold counts for nothing."""

    name: str
    description: str | None = None
    json_value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def held(self) -> dict[str, Any]:
        """The schema that the answer is held to."""
        return _held(self.json_value, is_strict=self.strict)


class ResponseFormat(StrictModel):
    """What the answer's text is: anything, a JSON object, JSON by a schema, tags (SGLang's)."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = Field(
        default=None, description="of a structural_tag: each with begin, schema and end"
    )
    triggers: list[str] | None = Field(default=None, description="of a structural_tag")

    def grammar(self) -> dict[str, str]:
        """The sampling parameter that says the same, by name; none for text."""
        if self.type == "json_object":
            return {"json_schema": '{"type": "object"}'}
        if self.type == "structural_tag":
            tags = {"structures": self.structures, "triggers": self.triggers}
            return {"structural_tag": json.dumps(tags)}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequestError(
                    "a response_format of type json_schema has a json_schema", "response_format"
                )
            return {"json_schema": json.dumps(self.json_schema.held)}
        return {}


class GenerationFields(RequestFields, SamplingFields):
    """What chat and completions have in common."""

    stream_options: StreamOptions | None = None
    min_tokens: int | None = in_range("min_new_tokens", "same as min_new_tokens")
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(
        default=None, description="of prompt and output; not in a stream"
    )

    def to_sampling(self, choice: int) -> SamplingParams:
        """As the engine takes them."""
        sampling = super().to_sampling(choice)
        if self.response_format is None:
            return sampling
        return msgspec.structs.replace(sampling, **self.response_format.grammar())

    @model_validator(mode="after")
    def _whole_answers_only(self) -> "GenerationFields":
        for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if self.stream and getattr(self, name, None):
                raise InvalidRequestError(f"{name} is not there in a stream", name)
        return self


class TextPart(StrictModel):
    """A piece of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    unserved = unserved_fields.PART

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        default=None, description="may be missing beside tool_calls"
    )
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ToolCalls | None = Field(default=None, description="of the assistant")
    tool_call_id: str | None = Field(default=None, description="of a tool: the call it answers")

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError("only the assistant has tool_calls", "tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequestError("only a tool has a tool_call_id", "tool_call_id")
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError("content is missing: it must be a text", "content")
        return self

    @property
    def num_chars(self) -> int:
        """Characters that the template is going to write of it, at least."""
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self._text) + calls

    @property
    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: one string, and no developers.

        The string is there without content, too: many templates add it to others.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._text}
        for extra in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, extra) is not None:
                message[extra] = getattr(self, extra)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ChatRequest(GenerationFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(
        default=None, description="none: the model is not told of the tools"
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: of several calls only the first is handed out"
    )
    separate_reasoning: bool | None = Field(
        default=None, description="false: reasoning stays in content"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_prompt_token_ids: bool | None = Field(default=None, description="not in a stream")
    return_meta_info: bool | None = Field(
        default=None, description="as in /generate; not in a stream"
    )
    session_id: SessionId | None = Field(
        default=None, description="of a streaming session, which finds what is new by itself"
    )

    @model_validator(mode="after")
    def _supported_combination(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.session_id is not None:
            refuse_several(self.num_choices, "n")
        return self

    @property
    def told_tools(self) -> list[Tool]:
        """Tools that the model is told of."""
        return (self.tools or []) if self.tool_choice != "none" else []

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """By name of each told tool the schema of its arguments; None without any."""
        functions = [tool.function for tool in self.told_tools]
        return {function.name: function.parameters or {} for function in functions} or None

    @property
    def held_schemas(self) -> dict[str, dict[str, Any]]:
        """By name of each tool that may be called the schema that its arguments are held to.

        Raises `InvalidRequestError` if a tool is chosen that there is not.
        """
        functions = [tool.function for tool in self.told_tools]
        schemas = {each.name: _held(each.parameters, is_strict=each.strict) for each in functions}
        match self.tool_choice:
            case NamedTool(function=function):
                chosen = {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                chosen = {tool.function.name for tool in allowed.tools}
            case _:
                chosen = {*schemas}
        if not chosen or not chosen <= schemas.keys():
            raise InvalidRequestError("tool_choice: there is no such tool in tools", "tool_choice")
        return {name: schema for name, schema in schemas.items() if name in chosen}

    @property
    def must_call(self) -> bool:
        """Whether the answer is to call a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            choice = choice.allowed_tools.mode
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def holds_calls(self) -> bool:
        """Whether calls, if there are any, are held to `held_schemas`."""
        has_strict = any(tool.function.strict for tool in self.told_tools)
        return has_strict or isinstance(self.tool_choice, AllowedToolChoice)

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told from content."""
        return self.separate_reasoning is not False

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return effort | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationFields):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | ForEach[str] | ForEach[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0, description="0 only with echo")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="must equal n")
    session_params: SessionParams | None = None

    @model_validator(mode="after")
    def _supported_combination(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                f"best_of must equal n ({self.num_choices}), got {self.best_of}", "best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens 0 is allowed only with echo", "max_tokens")
        if self.session_params is not None:
            refuse_several(self.num_choices, "n")
            refuse_several(len(self.prompts), "prompt")
            if self.echo:
                raise InvalidRequestError("a session's turn cannot be echoed", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        prompts: list[str | list[int]] = [prompt] if is_one else prompt
        check_num_requests(len(prompts), self.num_choices, "prompt")
        return prompts


def _held(schema: dict[str, Any] | None, *, is_strict: bool | None) -> dict[str, Any]:
    return lenient(schema) if schema and not is_strict else schema or {}
