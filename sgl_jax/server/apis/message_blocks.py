"""The blocks of Anthropic's Messages API, and their conversion to messages of a chat."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from sgl_jax.server.chat_request import (
    IMAGE_URL,
    ImageForm,
    ImageUrl,
    content_of,
    result_of,
    text_or_image,
)
from sgl_jax.server.fields import Items
from sgl_jax.server.hint_fields import MarkedPart
from sgl_jax.server.strict_model import Part, StrictModel

_MAX_BLOCKS = 16_384


class TextBlock(MarkedPart):
    """A piece of text; documents are not supported."""

    type: Literal["text"]
    text: str


class Base64Source(Part):
    type: Literal["base64"]
    media_type: str = Field(description="without effect: the file's first bytes have its format")
    data: str

    @property
    def url(self) -> str:
        return self.data


class UrlSource(Part):
    type: Literal["url"]
    url: str = Field(description=IMAGE_URL)


class ImageBlock(ImageForm):
    """An image: PNG, JPEG or WebP."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def image(self) -> ImageUrl:
        return ImageUrl(url=self.source.url)


class ThinkingBlock(Part):
    """Reasoning of the model before the next block."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(MarkedPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockText = str | Annotated[Items[TextBlock], Field(max_length=_MAX_BLOCKS)]


_Shown = Annotated[
    Annotated[TextBlock, Tag("Text")] | Annotated[ImageBlock, Tag("Image")],
    text_or_image("image", "text"),
]


class ToolResultBlock(MarkedPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[Items[_Shown], Field(max_length=_MAX_BLOCKS)] = ""


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[Block], Field(max_length=_MAX_BLOCKS)]


def chat_messages(message: Message) -> Iterator[dict[str, Any]]:
    """Yield the message as messages of a chat: first each result of a call, then the rest."""
    content = message.content
    shown, thought, calls = list[TextBlock | ImageBlock](), "", []
    for block in [TextBlock(type="text", text=content)] if isinstance(content, str) else content:
        match block:
            case TextBlock() | ImageBlock():
                shown.append(block)
            case ThinkingBlock():
                thought += block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                result = result_of(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    if shown or thought or calls:
        own = {"role": message.role, "content": content_of(shown)}
        yield own | {"reasoning_content": thought or None, "tool_calls": calls or None}
