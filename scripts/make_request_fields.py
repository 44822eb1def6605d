"""Write docs/reference/request_fields.md: every field of a request, and its effect.

    python scripts/make_request_fields.py

All of it is read from the bodies in `sgl_jax/server/` and from `unserved_fields.py` there.
"""

import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic.fields import FieldInfo

from sgl_jax.core.messages import CALL_OF
from sgl_jax.server.admin.call_routes import body_of
from sgl_jax.server.apis.completions import CompletionRequest
from sgl_jax.server.apis.context_edits import (
    ClearThinking,
    ClearToolUses,
    ContextManagement,
)
from sgl_jax.server.apis.embeddings import EmbeddingsBody
from sgl_jax.server.apis.message_blocks import (
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from sgl_jax.server.apis.messages import (
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    OutputFormat,
    Thinking,
)
from sgl_jax.server.apis.native import AbortBody, GenerateBody, NativeSampling
from sgl_jax.server.apis.response_items import (
    CallItem,
    CallOutputItem,
    InputText,
    ItemReference,
    MessageItem,
    ReasoningInput,
)
from sgl_jax.server.apis.responses import (
    ReasoningOptions,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from sgl_jax.server.apis.scores import RerankBody, ScoreBody, ScoreTokensBody
from sgl_jax.server.apis.text import DetokenizeBody, TokenizeBody
from sgl_jax.server.chat_request import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    TextPart,
    ToolCall,
)
from sgl_jax.server.fields import (
    RequestFields,
    ResponseFormat,
    SamplingFields,
    SessionParams,
    StreamOptions,
)
from sgl_jax.server.offered_tools import HOSTED, NamespaceTool, ResponseTool
from sgl_jax.server.strict_model import StrictModel
from sgl_jax.server.unserved_fields import PART, REQUEST, Unserved, advice, as_json

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "request_fields.md"

_HEAD = """# Fields of requests

Made by `python scripts/make_request_fields.py`, which reads the code; a test compares.

Every field is of one class:

- **applied**: it is in the sections of its route below. A value outside the range given there is
  refused with a 400;
- **accepted without effect**: no value of it changes an answer here. With `--strict-fields` any
  value is refused;
- **refused**: it would change the answer, and is not supported. Null, false, 0 and empty request
  nothing, and are accepted, because clients, benches and routers send them.

[Fields that are not applied](#fields-that-are-not-applied) lists the last two. A null counts as not
given. A field that is not listed at all is refused by name.

Ranges hold in float32 arithmetic: a `temperature` below 1e-6 is greedy, and `top_p` may be
any number above 0 (a tiny one keeps only the likeliest token).
"""

# The titles of fields that several bodies share.
_SHARED: dict[type[StrictModel], str] = {
    RequestFields: "Every request",
    SamplingFields: "Sampling",
}
_BODIES: tuple[tuple[str, type[StrictModel]], ...] = (
    *((title, body) for body, title in _SHARED.items()),
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
    ("`/v1/responses`: a reference of `input`", ItemReference),
    ("`/v1/responses`: a function of `tools`", ResponseTool),
    ("`/v1/responses`: a namespace of `tools`", NamespaceTool),
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
    ("`/v1/messages`: `context_management`", ContextManagement),
    ("`/v1/messages`: `clear_tool_uses_20250919` of `edits`", ClearToolUses),
    ("`/v1/messages`: `clear_thinking_20251015` of `edits`", ClearThinking),
    ("`/v1/messages/count_tokens`", CountTokensBody),
    ("`/generate`", GenerateBody),
    ("`/generate`: `sampling_params`", NativeSampling),
    ("`session_params` of `/generate` and `/v1/completions`", SessionParams),
    ("`/abort_request`", AbortBody),
    ("`/tokenize`", TokenizeBody),
    ("`/detokenize`", DetokenizeBody),
    ("`/v1/embeddings`", EmbeddingsBody),
    ("`/v1/rerank`", RerankBody),
    ("`/v1/score`", ScoreBody),
    ("`/score_tokens`", ScoreTokensBody),
    *((f"`{call.route}`", body_of(call)) for call in CALL_OF.values() if call.route),
)


def render() -> str:
    sections = [_section(title, body) for title, body in _BODIES if body.model_fields]
    return "\n".join([_HEAD, *sections, *_unserved_sections()])


def _section(title: str, body: type[StrictModel]) -> str:
    bases = [base for base in _SHARED if base in body.__mro__[1:]]
    shared = {name: repr(field) for base in bases for name, field in base.model_fields.items()}
    own = {name for name in body.model_fields if shared.get(name) != repr(body.model_fields[name])}
    rows = sorted((body.model_fields[name].alias or name, body.model_fields[name]) for name in own)
    lines = [f"## {title}", ""]
    if bases:
        names = (f"[{_SHARED[base]}](#{_SHARED[base].lower().replace(' ', '-')})" for base in bases)
        lines += [f"The fields of {' and '.join(names)}, and:" if rows else "", ""]
    lines += ["| field | type | |", "|---|---|---|"] if rows else []
    lines += [f"| `{name}` | {_kind(field)} | {_notes(field)} |" for name, field in rows]
    return "\n".join(lines) + "\n"


def _unserved_sections() -> list[str]:
    lines = ["## Fields that are not applied", ""]
    for title, table in (("In requests", REQUEST), ("In messages, parts and tools", PART)):
        lines += [f"### {title}", "", "| field | class | why |", "|---|---|---|"]
        lines += [_unserved_row(name, table[name]) for name in sorted(table)]
        lines.append("")
    lines += ["### Tools", "", "| type of a tool | class | why |", "|---|---|---|"]
    why = "it runs in the service of the API; left out of the prompt, in any dated version"
    lines += [f"| `{kind}` | accepted without effect | {why} |" for kind in HOSTED]
    return ["\n".join(lines) + "\n"]


def _unserved_row(name: str, field: Unserved) -> str:
    kind = "refused" if field.is_refused else "accepted without effect"
    return f"| `{name}`{_exception(name)} | {kind} | {field.reason} |"


def _exception(name: str) -> str:
    values = advice(name).removeprefix("leave it out").removeprefix(" or send ")
    return f" (only `{values}`)" if values else ""


def _kind(field: FieldInfo) -> str:
    return _type(field.annotation, field.metadata)


def _notes(field: FieldInfo) -> str:
    notes = ["required"] if field.is_required() else []
    has_default = field.default is not None and not isinstance(field.default, StrictModel)
    if not field.is_required() and has_default:
        notes.append(f"default `{as_json(field.default)}`")
    return "; ".join([*notes, *([field.description] if field.description else [])])


def _type(annotation: Any, metadata: list[Any]) -> str:
    """Return a type as in JSON, with its range."""
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
