"""What requests tell of the next request of their conversation: ids of agents, and hints.

It orders the evictions among prefixes, and never changes an answer. Ids are claims of the client,
so they are scoped by its API key and tenant.
"""

from urllib.parse import quote

from fastapi import Request

from sgl_jax.core.messages import Reuse, Tenant
from sgl_jax.server.fields import AgentHints
from sgl_jax.server.guards.keys import caller_of
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


def reuse_of(
    request: Request,
    tenant: Tenant | None,
    hints: AgentHints | None,
    call_token_ids: tuple[int, ...] = (),
) -> Reuse:
    """Return what a request tells of its conversation's next request."""
    agent = next(filter(None, map(request.headers.get, _ID_HEADERS)), "")
    hints = hints or AgentHints()
    agent = agent or hints.agent_id or ""
    if agent:
        owner = "" if tenant is None else tenant.name
        # A quoted name has no colon, so no two triples are equal.
        names = (quote(name, safe="") for name in (caller_of(request).name, owner))
        agent = ":".join((*names, agent[:_MAX_ID_CHARS]))
    pause_ms = hints.expected_tool_duration_ms
    return Reuse(
        agent=agent,
        call_token_ids=call_token_ids,
        pause_s=None if pause_ms is None else min(pause_ms * 1e-3, _MAX_PAUSE_S),
    )


def call_token_ids(refs: References) -> tuple[int, ...]:
    """Return the tokens that begin or end the model's calls; () if these are written as text, or
    other answers have them, too."""
    parser = refs.answer_parser
    if parser.is_harmony:
        return ()
    marks = parser.marks(has_tools=True, has_reasoning=False)
    return tuple(refs.frontend.tokenizer.added_ids_of(marks).values())
