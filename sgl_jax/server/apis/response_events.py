"""The answer of OpenAI's Responses API: its objects, and the events that announce them."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, field

from sgl_jax.engine.front.request_stream import RequestStream
from sgl_jax.server.apis.chat import AssistantMessage, message_of
from sgl_jax.server.chat import AnswerPart, NamedEvent, PartKind, PartsFormat
from sgl_jax.server.chat_request import ChatRequest
from sgl_jax.server.errors import ApiError
from sgl_jax.server.offered_tools import ClientName
from sgl_jax.server.references import References


class ResponseObject(Struct):
    """A response, as far as it is generated. `created_at` in seconds since 1970.

    `output` holds messages, reasoning and calls of functions. In `usage`, reasoning tokens are the
    tokenizer's count for the reasoning text.
    """

    id: str
    created_at: int
    model: str
    text: dict[str, Any]
    reasoning: dict[str, Any]
    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    tools: list[Any] = field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    store: bool = True
    output: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"  # then completed, incomplete or failed
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    truncation: str = "disabled"
    background: bool = False


# Kind of part -> prefix of its item's id, name of the events about its text, and their constant
# fields.
_EVENTS: dict[PartKind, tuple[str, str, dict[str, Any]]] = {
    "content": ("msg", "output_text", {"content_index": 0, "logprobs": []}),
    "reasoning": ("rs", "reasoning_text", {"content_index": 0}),
    "call": ("fc", "function_call_arguments", {}),
}
# Reason in a chat -> status of the response.
_STATUSES = {"length": "incomplete", "abort": "failed"}


class ResponsesFormat(PartsFormat):
    """One response: each part of the answer is an item."""

    _object: ResponseObject

    def __init__(
        self,
        refs: References,
        chat: ChatRequest,
        response: ResponseObject,
        client_name: Callable[[str], ClientName],
        keep: Callable[[ResponseObject, AssistantMessage], None],
    ) -> None:
        """Fill `response`, and store it at the end by calling `keep` with it and its message.
        `client_name` maps the model's name of a function to its namespace and name."""
        super().__init__(refs, chat)
        self._object, self._client_name, self._keep = response, client_name, keep
        self._num_events = 0

    def failure(self, error: ApiError) -> bytes:
        reason = {"code": error.code, "message": str(error.detail), "param": error.param}
        return self._write({"type": "error", **reason})

    def _write(self, event: NamedEvent) -> bytes:
        self._num_events += 1
        numbered = {"type": event["type"], "sequence_number": self._num_events - 1}
        return super()._write(numbered | event)

    def _begun(self, stream: RequestStream) -> Iterator[NamedEvent]:
        yield {"type": "response.created", "response": self._object}
        yield {"type": "response.in_progress", "response": self._object}

    def _changed(self, part: AnswerPart, gain: str | None) -> Iterator[NamedEvent]:
        prefix, name, fields = _EVENTS[part.kind]
        index, response_id = {"output_index": part.index}, self._object.id.removeprefix("resp_")
        item_id = f"{prefix}_{response_id}_{part.index}"
        text_at = {"item_id": item_id, **index, **fields}
        if gain:
            yield {"type": f"response.{name}.delta", **text_at, "delta": gain}
            return
        contents = [] if part.kind == "call" else [_content(part)]
        content_at = {"item_id": item_id, **index, "content_index": 0}
        if gain is not None:
            item = self._item(part, item_id, "in_progress", [])
            yield {"type": "response.output_item.added", **index, "item": item}
            for content in contents:
                yield {"type": "response.content_part.added", **content_at, "part": content}
            return
        is_cut_off = part is self._parts[-1] and self._status != "completed"
        status = "incomplete" if is_cut_off else "completed"
        item = self._item(part, item_id, status, contents)
        self._object.output.append(item)
        arguments = {"arguments": part.text, "name": item.get("name")}
        done = {"text": part.text} if contents else arguments
        yield {"type": f"response.{name}.done", **text_at, **done}
        for content in contents:
            yield {"type": "response.content_part.done", **content_at, "part": content}
        yield {"type": "response.output_item.done", **index, "item": item}

    @property
    def _status(self) -> str:
        return _STATUSES.get(self._finish.type, "completed") if self._finish else "completed"

    def _ended(self, stream: RequestStream) -> Iterator[NamedEvent]:
        response, finish = self._object, self._finish
        if not self._parts:
            self._parts.append(AnswerPart(0, "content"))
            for gain in ("", None):
                yield from self._changed(self._parts[0], gain)
        response.status = self._status
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        elif finish is not None and response.status == "failed":
            message = finish.message or "the request was aborted"
            response.error = {"code": "server_error", "message": message}
        thoughts = "".join(part.text for part in self._parts if part.kind == "reasoning")
        num_thought = len(self._refs.frontend.tokenizer.encode(thoughts))
        num_input, num_output = stream.num_prompt_tokens, stream.num_output_tokens
        response.usage = {
            "input_tokens": num_input,
            "output_tokens": num_output,
            "total_tokens": num_input + num_output,
            "input_tokens_details": {"cached_tokens": stream.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": min(num_thought, num_output)},
        }
        if response.store:
            self._keep(response, message_of(self._parts))
        yield {"type": f"response.{response.status}", "response": response}

    def _item(
        self, part: AnswerPart, item_id: str, status: str, contents: list[Any]
    ) -> dict[str, Any]:
        """Return the item of a part. If a call was cut off, its arguments are incomplete JSON."""
        head = {"id": item_id, "status": status}
        match part.kind:
            case "content":
                return {"type": "message", **head, "content": contents, "role": "assistant"}
            case "reasoning":
                return {"type": "reasoning", **head, "content": contents, "summary": []}
        namespace, name = self._client_name(part.name)
        call = {"call_id": part.call_id, "name": name, "arguments": part.text}
        own = {"namespace": namespace} if namespace is not None else {}
        return {"type": "function_call", **head, **call, **own}


def _content(part: AnswerPart) -> dict[str, Any]:
    if part.kind == "content":
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": part.text}
