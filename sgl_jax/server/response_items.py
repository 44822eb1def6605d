"""The items of a response, as an answer's events arrive, and the stream's events about them."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, field

from sgl_jax.text.output_events import Arguments, CallBegun, Content, Event, Reasoning

# A server-sent event: its type and the rest of its fields.
StreamEvent = tuple[str, dict[str, Any]]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning's text."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """What is said."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """What is thought."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call; `arguments` is the text of a JSON object, unless the answer was cut off."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall
# Of each kind of item with text the name of its events, and how its part begins.
_TEXTS: dict[type[OutputItem], tuple[str, type[OutputText | ReasoningText]]] = {
    OutputMessage: ("output_text", OutputText),
    OutputReasoning: ("reasoning_text", ReasoningText),
}


class ResponseItems:
    """The output of one response. Of its items all are complete but the last."""

    def __init__(self, call_id: Callable[[str | None], str]) -> None:
        """`call_id` gives the id of a call that the model gave this id, or none."""
        self.items: list[OutputItem] = []
        self._call_id = call_id

    def take(self, event: Event) -> Iterator[StreamEvent]:
        """What a piece of the answer brings."""
        match event:
            case Content(text):
                yield from self._add_text(OutputMessage, text)
            case Reasoning(text):
                yield from self._add_text(OutputReasoning, text)
            case CallBegun(name, given_id):
                yield from self._close("completed")
                call = OutputCall(_new_id("fc"), "in_progress", self._call_id(given_id), name)
                yield from self._open(call)
            case Arguments(text):
                last = self.items[-1]
                assert isinstance(last, OutputCall)
                last.arguments += text
                yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """The answer has ended; `status` is that of its last item."""
        if not self.items:
            yield from self._open(OutputMessage(_new_id("msg"), "in_progress", []))
            yield from self._begin_text(OutputMessage)
        yield from self._close(status)

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        thoughts = (item for item in self.items if isinstance(item, OutputReasoning))
        return "".join(part.text for item in thoughts for part in item.content)

    def _add_text(
        self, kind: type[OutputMessage] | type[OutputReasoning], text: str
    ) -> Iterator[StreamEvent]:
        if not self.items or not isinstance(self.items[-1], kind):
            yield from self._close("completed")
            prefix = "msg" if kind is OutputMessage else "rs"
            yield from self._open(kind(_new_id(prefix), "in_progress", []))
            yield from self._begin_text(kind)
        item = self.items[-1]
        assert not isinstance(item, OutputCall)
        item.content[0].text += text
        told = {**self._place, "content_index": 0, "delta": text}
        yield f"response.{_TEXTS[kind][0]}.delta", told | _logprobs(kind)

    def _open(self, item: OutputItem) -> Iterator[StreamEvent]:
        self.items.append(item)
        index = len(self.items) - 1
        yield "response.output_item.added", {"output_index": index, "item": item}

    def _begin_text(
        self, kind: type[OutputMessage] | type[OutputReasoning]
    ) -> Iterator[StreamEvent]:
        item: Any = self.items[-1]
        item.content.append(_TEXTS[kind][1](""))
        told = {**self._place, "content_index": 0, "part": item.content[0]}
        yield "response.content_part.added", told

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """The last item, if there is one, is complete."""
        if not self.items:
            return
        item = self.items[-1]
        item.status = status
        if isinstance(item, OutputCall):
            told: dict[str, Any] = {"arguments": item.arguments, "name": item.name}
            yield "response.function_call_arguments.done", {**self._place, **told}
        else:
            part = item.content[0]
            place = {**self._place, "content_index": 0}
            told = {"text": part.text} | _logprobs(type(item))
            yield f"response.{_TEXTS[type(item)][0]}.done", {**place, **told}
            yield "response.content_part.done", {**place, "part": part}
        index = len(self.items) - 1
        yield "response.output_item.done", {"output_index": index, "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _logprobs(kind: type[OutputItem]) -> dict[str, Any]:
    return {"logprobs": []} if kind is OutputMessage else {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
