"""A conversation with its tools and settings: the body of `/v1/chat/completions`, and the form to
which the bodies of `/v1/responses` and `/v1/messages` are converted."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

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
LOW_DETAIL_PIXELS = 512 * 512


IMAGE_URL = "a data URI, or a URL of a domain in --allowed-media-domains"
Detail = Annotated[
    Literal["auto", "low", "high", "original"],
    Field(description=f"low: at most {LOW_DETAIL_PIXELS} pixels after resizing"),
]


class TextPart(MarkedPart):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    url: str = Field(description=IMAGE_URL)
    detail: Detail = "auto"


class ImageForm(MarkedPart):
    """A part of a message that is an image, in the form of some API."""

    @property
    @abstractmethod
    def image(self) -> ImageUrl: ...


def _as_url(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


class ImagePart(ImageForm):
    """An image: PNG, JPEG or WebP."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_as_url)]

    @property
    def image(self) -> ImageUrl:
        return self.image_url


def text_or_image(image: str, *texts: str) -> Discriminator:
    """Choose the model of a part by its `type`: tag `Image` for `image`, and `Text` for `texts`.
    Error paths omit tags that begin with a capital."""

    def kind_of(part: Any) -> str | None:
        kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        if kind in texts:
            return "Text"
        return "Image" if kind == image else None

    return Discriminator(
        kind_of,
        custom_error_type="unknown_part",
        custom_error_message=f"type must be {' or '.join((*texts, image))}",
    )


_ChatPart = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image")],
    text_or_image("image_url", "text"),
]


class ChatMessage(MarkedPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[_ChatPart] | None = Field(
        default=None,
        description="may be omitted if there are tool_calls or reasoning_content; images: in "
        "messages of the user and of tools",
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
        if self.role not in ("user", "tool") and images_in(self.content):
            raise InvalidRequestError(
                f"a message of the {self.role} has text only: images are in messages of the user "
                "and of tools",
                "content",
            )
        return self

    @property
    def num_chars(self) -> int:
        """Return a lower bound on the characters that the template writes for this message."""
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(joined_text(self.content)) + calls

    def for_template(self) -> dict[str, Any]:
        """Return the form expected by chat templates; the worker adapts it to the model's template.

        `content` is a string even without content, because many templates concatenate it. An image
        is a part without its source, for which templates write the model's placeholder.
        """
        written = {"content"} if self.tool_calls else {"content", "tool_calls"}
        others = self.model_dump(exclude=written, exclude_none=True)
        return {"content": content_of(self.content, for_template=True), **others}


Content = str | list[Any] | None


def images_in(content: Content) -> list[ImageUrl]:
    if not isinstance(content, list):
        return []
    return [part.image for part in content if isinstance(part, ImageForm)]


def joined_text(content: Content) -> str:
    """Return a content's text. Parts, which have a `text` or an image each, are joined by
    newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if not isinstance(part, ImageForm))


def content_of(content: Content, *, for_template: bool = False) -> str | list[dict[str, Any]]:
    """Return a content of a `ChatMessage`: a string, or a list if it has several parts or an image.

    With `for_template`, images have no source.
    """
    if not isinstance(content, list) or (len(content) < 2 and not images_in(content)):
        return joined_text(content)
    return [_chat_part(part, for_template=for_template) for part in content]


def result_of(content: Content) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result: a list only if it has an image."""
    return content_of(content) if images_in(content) else joined_text(content)


def _chat_part(part: Any, *, for_template: bool) -> dict[str, Any]:
    if not isinstance(part, ImageForm):
        return {"type": "text", "text": part.text}
    if for_template:
        return {"type": "image"}
    return {"type": "image_url", "image_url": part.image.model_dump()}


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
    def images(self) -> list[ImageUrl]:
        return [image for message in self.messages for image in images_in(message.content)]

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
