"""Fields of bodies with hints for the cache (`agent_hints.py`). None of them changes an answer."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sgl_jax.server import unserved_fields
from sgl_jax.server.strict_model import Part, StrictModel

_Name = Annotated[str, Field(max_length=64)]
_Duration = Annotated[float, Field(ge=0)]
# Fields whose parts may have marks.
_PARTS = ("tools", "system", "messages", "input", "content", "output", "function", "tool_calls")


class AgentHints(StrictModel):
    """SGLang's hints of agents."""

    unserved = unserved_fields.AGENT_HINTS
    agent_id: str | None = Field(default=None, description="of the conversation, without a header")
    expected_tool_duration_ms: _Duration | None = Field(
        default=None, description="from the answer to the next request"
    )
    cache_ttl_ms: _Duration | None = None
    reuse_hint: _Name | None = None


class CacheControl(StrictModel):
    """Anthropic's mark of a prefix to be kept for a time."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def keep_s(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class KvAction(StrictModel):
    """An action of vLLM's `kv_hints`; those of an unknown type are ignored."""

    model_config = ConfigDict(extra="ignore")
    action_type: _Name
    payload: Any = None


class KvHints(StrictModel):
    model_config = ConfigDict(extra="ignore")
    actions: list[KvAction] = Field(default=[], max_length=64)


class TrajectoryHints(StrictModel):
    model_config = ConfigDict(extra="ignore")
    evict_trajectory: bool = False


class AgentContext(StrictModel):
    """Dynamo's context of an agent."""

    model_config = ConfigDict(extra="ignore")
    kv_hints: TrajectoryHints | None = None


class HintFields(StrictModel):
    """Hints that any request may have."""

    agent_hints: AgentHints | None = None
    agent_context: AgentContext | None = Field(
        default=None, description="kv_hints.evict_trajectory: the conversation ends"
    )
    cache_control: CacheControl | None = Field(
        default=None, description="keep the prompt for a ttl of 5m or 1h"
    )
    kv_hints: KvHints | None = Field(
        default=None, description="actions of type retain, demote and evict"
    )
    prompt_cache_key: str | None = Field(
        default=None, max_length=1024, description="of a group of conversations"
    )
    prompt_cache_retention: _Name | None = Field(
        default=None, description="24h: keep the prompt, at most for an hour"
    )


class MarkedPart(Part):
    """A part of a prompt that may have a mark."""

    # Chat templates do not get it.
    cache_control: CacheControl | None = Field(default=None, exclude=True)


def longest_mark(body: StrictModel) -> CacheControl | None:
    """Return the mark with the longest time of a body and its parts."""
    return max(_marks_in(body), key=lambda mark: mark.keep_s, default=None)


def _marks_in(part: Any) -> Iterator[CacheControl]:
    if isinstance(part, list):
        for each in part:
            yield from _marks_in(each)
    elif isinstance(part, StrictModel):
        mark = getattr(part, "cache_control", None)
        if mark is not None:
            yield mark
        for name in _PARTS:
            yield from _marks_in(getattr(part, name, None))
