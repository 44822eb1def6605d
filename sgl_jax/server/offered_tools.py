"""Tools of `/v1/responses` and `/v1/messages` other than plain functions of the client.

Hosted tools run in OpenAI's or Anthropic's service. Clients offer them to every server, so they are
left out of the prompt. A `tool_choice` that requires one is refused.
"""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Discriminator, Field, ValidationInfo, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server.chat_request import FunctionDefinition, FunctionName, ToolList
from sgl_jax.server.hint_fields import MarkedPart
from sgl_jax.server.strict_model import StrictModel
from sgl_jax.server.unserved_fields import STRICT, without_effect

# Names without the date suffix that most have.
HOSTED = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("mcp", "mcp_toolset", "tool_search", "tool_search_tool_regex", "tool_search_tool_bm25"),
    *("web_fetch", "code_execution", "advisor", "programmatic_tool_calling"),
)
_DATE = re.compile(r"_\d{8}$|_\d{4}_\d{2}_\d{2}$")


class HostedTool(StrictModel):
    """A tool of the API's service, left out of the prompt; its settings have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: str

    @model_validator(mode="after")
    def _refused_if_strict(self, info: ValidationInfo) -> "HostedTool":
        if info.context == STRICT:
            raise InvalidRequestError(without_effect(f"a tool {self.type}"), "type")
        return self


def tool_kind(*kinds: str) -> Discriminator:
    """Choose the model of a tool by its `type`, the first of `kinds` by default. Tags of models
    begin with a capital (`Function`, `Hosted`), so error paths omit them."""

    def kind_of(tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        kind = kinds[0] if kind is None else kind
        if isinstance(kind, str) and _DATE.sub("", kind) in HOSTED:
            return "Hosted"
        return kind.capitalize() if kind in kinds else None

    return Discriminator(
        kind_of,
        custom_error_type="unknown_tool",
        custom_error_message=f"type must be {' or '.join(kinds)}; hosted tools are left out",
    )


class ResponseTool(FunctionDefinition):
    type: Literal["function"]


class NamespaceTool(MarkedPart):
    """Functions under a name. The model sees each as `<namespace>__<name>`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = Field(
        default=None, description="written before the first function's description"
    )
    tools: ToolList[ResponseTool]


# Namespace (or None) and name of a function in the client's request.
ClientName = tuple[str | None, str]


def offered_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function of `namespace`."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class OfferedFunctions:
    """The functions in a list of tools, by the names that the model sees.

    Raises `InvalidRequestError` if two functions, one of them in a namespace, would share a name.
    """

    def __init__(self, tools: list[Any]) -> None:
        self.definitions: list[FunctionDefinition] = []
        self._client_names: dict[str, ClientName] = {}
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                for number, inner in enumerate(tool.tools):
                    about = "" if number else tool.description or ""
                    self._add(tool.name, inner, f"{tool.name}: {about}\n\n" if about else "")
            elif isinstance(tool, FunctionDefinition):
                self._add(None, tool, "")

    def _add(self, namespace: str | None, tool: FunctionDefinition, about: str) -> None:
        name = offered_name(namespace, tool.name)
        own = (namespace, tool.name)
        if self._client_names.setdefault(name, own) != own:
            raise InvalidRequestError(f"tools: two of them are {name!r} for the model", "tools")
        changed = {"name": name, "description": about + (tool.description or "") or None}
        self.definitions.append(tool.model_copy(update=changed))

    def client_name(self, name: str) -> ClientName:
        return self._client_names.get(name, (None, name))

    def chosen(self, namespace: str | None, name: str) -> str:
        """Return the model's name of a function in `tool_choice`, with or without namespace."""
        if namespace is None and name not in self._client_names:
            inner = [each for each, (_, own) in self._client_names.items() if own == name]
            return inner[0] if len(inner) == 1 else name
        return offered_name(namespace, name)
