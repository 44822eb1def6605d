"""What requests tell of the next request of their conversation: ids of agents, and hints.

It orders the evictions among prefixes, and never changes an answer. Ids are claims of the client,
so they are scoped by its API key and tenant.
"""

from collections.abc import Iterator
from math import inf
from typing import Any, Literal
from urllib.parse import quote

from fastapi import Request

from sgl_jax.core.messages import Reuse
from sgl_jax.core.shares import Tenant
from sgl_jax.server.guards.keys import caller_of
from sgl_jax.server.hint_fields import AgentHints, HintFields, KvAction, longest_mark
from sgl_jax.server.references import References

# Headers with the id of one chain of requests, of Claude Code, Codex, opencode and Dynamo, the id
# of a sub-agent before that of its family.
_ID_HEADERS = (
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "thread-id",
    "x-session-id",
    "x-dynamo-session-id",
    "session-id",
)
_MAX_ID_CHARS = 256
_MAX_PAUSE_S = 86_400.0  # longer pauses count as a day
_MAX_DURATION_MS = 1e15
_KEEP_S = 300.0  # if a client wants a path kept without a time
# A hint, and for how many seconds.
_Hint = tuple[Literal["retain", "demote", "evict", "unknown"], float]
_DEMOTE: _Hint = ("demote", 0.0)
_EVICT: _Hint = ("evict", 0.0)
_UNKNOWN: _Hint = ("unknown", 0.0)


def reuse_of(
    request: Request,
    tenant: Tenant | None,
    body: HintFields,
    call_token_ids: tuple[int, ...] = (),
) -> tuple[Reuse, int]:
    """Return what a request tells of its conversation's next request, and its number of hints that
    are not understood."""
    agent = next(filter(None, map(request.headers.get, _ID_HEADERS)), "")
    hints = body.agent_hints or AgentHints()
    agent = agent or hints.agent_id or ""
    is_family = not agent and bool(body.prompt_cache_key)
    agent = agent or body.prompt_cache_key or ""
    if agent:
        owner = "" if tenant is None else tenant.name
        # A quoted name has no colon, so no two triples are equal.
        names = (quote(name, safe="") for name in (caller_of(request).name, owner))
        agent = ":".join((*names, agent[:_MAX_ID_CHARS]))
    sent = list(_hints_in(request, body, hints))
    kinds = {kind for kind, _ in sent}
    is_last = "evict" in kinds
    pause_ms = inf if "demote" in kinds else hints.expected_tool_duration_ms
    reuse = Reuse(
        agent=agent,
        call_token_ids=call_token_ids,
        pause_s=None if pause_ms is None else min(pause_ms * 1e-3, _MAX_PAUSE_S),
        is_family=is_family,
        keep_s=0.0 if is_last else max(seconds for _, seconds in (*sent, _EVICT)),
        is_last=is_last,
    )
    return reuse, sent.count(_UNKNOWN)


def _hints_in(request: Request, body: HintFields, hints: AgentHints) -> Iterator[_Hint]:
    mark = longest_mark(body)
    if mark is not None:
        yield "retain", mark.keep_s
    if hints.cache_ttl_ms is not None:
        yield "retain", hints.cache_ttl_ms * 1e-3
    if hints.reuse_hint is not None:
        yield {"keep": ("retain", _KEEP_S), "discard": _EVICT}.get(hints.reuse_hint, _UNKNOWN)
    if body.prompt_cache_retention == "24h":
        yield "retain", 86_400.0
    elif body.prompt_cache_retention not in {None, "in_memory", "in-memory"}:
        yield _UNKNOWN
    for action in body.kv_hints.actions if body.kv_hints else ():
        yield _hint_of(action)
    trajectory = body.agent_context and body.agent_context.kv_hints
    is_final = request.headers.get("x-dynamo-session-final", "").lower() in {"true", "1"}
    if is_final or (trajectory and trajectory.evict_trajectory):
        yield _EVICT


def _hint_of(action: KvAction) -> _Hint:
    """Return an action's hint. A payload may have `duration_ms`, how long to retain."""
    kind, payload = action.action_type.lower(), action.payload or {}
    if kind != "retain":
        return {"demote": _DEMOTE, "evict": _EVICT}.get(kind, _UNKNOWN)
    sent: Any = payload.get("duration_ms", _KEEP_S * 1e3) if isinstance(payload, dict) else None
    is_number = isinstance(sent, (int, float)) and not isinstance(sent, bool)
    if is_number and 0 <= sent < _MAX_DURATION_MS:
        return "retain", sent * 1e-3
    return _UNKNOWN


def call_token_ids(refs: References) -> tuple[int, ...]:
    """Return the tokens that begin or end the model's calls; () if these are written as text, or
    other answers have them, too."""
    parser = refs.answer_parser
    if parser.is_harmony:
        return ()
    marks = parser.marks(has_tools=True, has_reasoning=False)
    return tuple(refs.frontend.tokenizer.added_ids_of(marks).values())
