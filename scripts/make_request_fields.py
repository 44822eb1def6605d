"""Write docs/reference/request_fields.md: every field of a request, and its effect.

    python scripts/make_request_fields.py

All of it is read from the bodies (`sgl_jax/server/*_protocol.py`) and from the tables that they
refer to (`sgl_jax/server/unserved_fields.py`).
"""

import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic.fields import FieldInfo

from sgl_jax.core.calls import CALLS
from sgl_jax.server.call_routes import body_of
from sgl_jax.server.messages_protocol import (
    CountTokensBody,
    Message,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    OutputFormat,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from sgl_jax.server.native_protocol import AbortBody, GenerateBody, NativeSampling
from sgl_jax.server.openai_protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    StreamOptions,
    TextPart,
)
from sgl_jax.server.responses_protocol import (
    CallItem,
    CallOutputItem,
    InputText,
    MessageItem,
    ReasoningInput,
    ReasoningOptions,
    ResponsesBody,
    ResponseTool,
    TextFormat,
    TextOptions,
)
from sgl_jax.server.score_protocol import ScoreBody
from sgl_jax.server.session_protocol import SessionParams
from sgl_jax.server.strict_model import StrictModel
from sgl_jax.server.text_protocol import DetokenizeBody, TokenizeBody
from sgl_jax.server.tool_protocol import CalledFunction, FunctionDefinition, ToolCall
from sgl_jax.server.unserved_fields import NOTHING, UnservedField, as_json

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "request_fields.md"

_HEAD = """# Fields of requests

Made by `python scripts/make_request_fields.py`, which reads the code; a test compares.

A null counts as not given. A field that is not listed is refused by name with a 400, and so is a
value outside the range given here. *Not served* fields are those of OpenAI, SGLang and sglang-jax
that clients, benches and routers send although they ask for nothing: the values listed are taken
(also as a list with one for each prompt), any other is refused. *Without effect* is taken with
any value.

Ranges are those of float32 arithmetic: a `temperature` below 1e-6 is greedy, and a `top_p` that
keeps only the likeliest token may be as small as one likes.
"""

_BODIES: tuple[tuple[str, type[StrictModel]], ...] = (
    ("`/v1/chat/completions`", ChatRequest),
    ("`/v1/chat/completions`: each of `messages`", ChatMessage),
    ("`/v1/chat/completions`: each part of `content`", TextPart),
    ("`/v1/chat/completions`: `function` of each of `tools`", FunctionDefinition),
    ("`/v1/chat/completions`: each of a message's `tool_calls`", ToolCall),
    ("`/v1/chat/completions`: `function` of each of these", CalledFunction),
    ("`/v1/completions`", CompletionRequest),
    ("`stream_options` of both", StreamOptions),
    ("`response_format` of both", ResponseFormat),
    ("`/v1/responses`", ResponsesBody),
    ("`/v1/responses`: a message of `input`", MessageItem),
    ("`/v1/responses`: a part of `content`", InputText),
    ("`/v1/responses`: a call of `input`", CallItem),
    ("`/v1/responses`: a call's result of `input`", CallOutputItem),
    ("`/v1/responses`: reasoning of `input`", ReasoningInput),
    ("`/v1/responses`: each of `tools`", ResponseTool),
    ("`/v1/responses`: `text`", TextOptions),
    ("`/v1/responses`: `format` of `text`", TextFormat),
    ("`/v1/responses`: `reasoning`", ReasoningOptions),
    ("`/v1/messages`", MessagesBody),
    ("`/v1/messages`: each of `messages`", Message),
    ("`/v1/messages`: a text of `content`", TextBlock),
    ("`/v1/messages`: a thought of `content`", ThinkingBlock),
    ("`/v1/messages`: a call of `content`", ToolUseBlock),
    ("`/v1/messages`: a call's result of `content`", ToolResultBlock),
    ("`/v1/messages`: each of `tools`", MessagesTool),
    ("`/v1/messages`: `tool_choice`", MessagesToolChoice),
    ("`/v1/messages`: `thinking`", Thinking),
    ("`/v1/messages`: `output_config`", OutputConfig),
    ("`/v1/messages`: `format` of `output_config`", OutputFormat),
    ("`/v1/messages/count_tokens`", CountTokensBody),
    ("`/generate`", GenerateBody),
    ("`/generate`: `sampling_params`", NativeSampling),
    ("`session_params` of `/generate` and `/v1/completions`", SessionParams),
    ("`/abort_request`", AbortBody),
    ("`/tokenize`", TokenizeBody),
    ("`/detokenize`", DetokenizeBody),
    ("`/v1/score`", ScoreBody),
    *((f"`{call.route}`", body_of(call)) for call in CALLS if call.route),
)


def render() -> str:
    """The whole page."""
    has_fields = [(title, body) for title, body in _BODIES if body.model_fields]
    return "\n".join([_HEAD, *(_section(*body) for body in has_fields)])


def _section(title: str, body: type[StrictModel]) -> str:
    rows = sorted((field.alias or name, field) for name, field in body.model_fields.items())
    lines = [f"## {title}", "", "| field | type | |", "|---|---|---|"]
    lines += [f"| `{name}` | {_kind(field)} | {_notes(field)} |" for name, field in rows]
    if body.unserved:
        lines += ["", "| not served | taken | why |", "|---|---|---|"]
        lines += [_unserved(field) for _, field in sorted(body.unserved.items())]
    return "\n".join(lines) + "\n"


def _kind(field: FieldInfo) -> str:
    return _type(field.annotation, field.metadata)


def _notes(field: FieldInfo) -> str:
    notes = ["required"] if field.is_required() else []
    if not field.is_required() and field.default is not None:
        notes.append(f"default `{as_json(field.default)}`")
    return "; ".join([*notes, *([field.description] if field.description else [])])


def _unserved(field: UnservedField) -> str:
    if field.allowed is None:
        taken = "without effect"
    elif field.allowed == NOTHING:
        taken = "null, empty"
    else:
        taken = ", ".join(["null", *(f"`{as_json(value)}`" for value in field.allowed)])
    return f"| `{field.name}` | {taken} | {field.reason} |"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type as in JSON, with its range."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        flat = [m for item in more for m in (item.metadata if _is_field(item) else [item])]
        return _type(inner, [*metadata, *flat])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [a for a in typing.get_args(annotation) if a is not type(None)]
        return " or ".join(_type(part, metadata) for part in parts)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        return f"list{_bounds(metadata)} of {_type(item, [])}"
    return _plain(annotation) + _bounds(metadata)


def _is_field(item: Any) -> bool:
    return isinstance(item, FieldInfo)


def _plain(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        return "object" if args[1] is Any else f"object of {_type(args[1], [])}"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", Any: "anything"}
    return names.get(annotation, "object")


def _bounds(metadata: list[Any]) -> str:
    low = next((f"[{m.ge}" for m in metadata if isinstance(m, Ge)), "")
    low = low or next((f"({m.gt}" for m in metadata if isinstance(m, Gt)), "")
    high = next((f"{m.le}]" for m in metadata if isinstance(m, Le)), "")
    if low and not high:
        return f" from {low[1:]}"
    least = next((m.min_length for m in metadata if isinstance(m, MinLen)), None)
    most = next((m.max_length for m in metadata if isinstance(m, MaxLen)), None)
    if least is None and most is None:
        return f" in {low}, {high}" if high else ""
    return f" ({least or 0} to {'any number' if most is None else most} long)"


if __name__ == "__main__":
    TARGET.write_text(render())
