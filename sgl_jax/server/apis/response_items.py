"""The items of an input to the Responses API, and the messages of a chat that they are."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, TypeAdapter

from sgl_jax.server.chat_request import (
    IMAGE_URL,
    CalledFunction,
    Detail,
    ImageForm,
    ImageUrl,
    content_of,
    result_of,
    text_or_image,
)
from sgl_jax.server.fields import Items
from sgl_jax.server.hint_fields import MarkedPart
from sgl_jax.server.offered_tools import offered_name
from sgl_jax.server.strict_model import Part, StrictModel

# The fields of a `ChatMessage`.
Message = dict[str, Any]


class InputText(MarkedPart):
    """A piece of text; files and audio are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(ImageForm):
    """An image: PNG, JPEG or WebP."""

    type: Literal["input_image"]
    image_url: str = Field(description=IMAGE_URL)
    detail: Detail = "auto"

    @property
    def image(self) -> ImageUrl:
        return ImageUrl(url=self.image_url, detail=self.detail)


_Shown = Annotated[
    Annotated[InputText, Tag("Text")] | Annotated[InputImage, Tag("Image")],
    text_or_image("input_image", "input_text", "output_text", "text"),
]
_Content = str | Items[_Shown]


class MessageItem(MarkedPart):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class CallItem(CalledFunction):
    type: Literal["function_call"]
    call_id: str
    namespace: str | None = Field(default=None, description="of the function")


class CallOutputItem(MarkedPart):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class InputReasoning(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(MarkedPart):
    """Reasoning of the model before the next item."""

    type: Literal["reasoning"]
    content: Items[InputReasoning] | None = None


class ItemReference(Part):
    """An item of a stored response or of its input."""

    type: Literal["item_reference"]
    id: str = Field(pattern=r"^(msg|rs|fc|resp)_[0-9a-f]{32}_[0-9]+$", max_length=64)


def _with_type(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, dict) else item


InputItem = Annotated[
    Annotated[
        MessageItem | CallItem | CallOutputItem | ReasoningInput | ItemReference,
        Field(discriminator="type"),
    ],
    BeforeValidator(_with_type),
]
ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


def messages_of(items: Iterable[Any]) -> list[Message]:
    """Convert items to messages of a chat. Assistant messages include calls and reasoning."""
    messages: list[Message] = []
    thought = ""
    for item in items:
        is_own = isinstance(item, CallItem) or getattr(item, "role", "") == "assistant"
        if isinstance(item, ReasoningInput):
            thought += "".join(part.text for part in item.content or ())
            continue
        if thought and not is_own:  # the answer was cut off before its text
            messages.append(_assistant("", thought))
            thought = ""
        match item:
            case CallOutputItem():
                result = result_of(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": result})
            case MessageItem(role="assistant"):
                messages.append(_assistant(content_of(item.content), thought))
            case MessageItem():
                messages.append({"role": item.role, "content": content_of(item.content)})
            case CallItem():
                if not messages or messages[-1]["role"] != "assistant" or thought:
                    messages.append(_assistant("", thought))
                name = offered_name(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        thought = ""
    if thought:
        messages.append(_assistant("", thought))
    return messages


def _assistant(content: str | list[Any], thought: str) -> Message:
    own: Message = {"role": "assistant", "content": content}
    return own | ({"reasoning_content": thought} if thought else {})
