"""Sessions as plain values, saved by one engine and opened by another."""

import msgspec

from sgl_jax.core.messages import OpenSession
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.sessions.store import Session
from sgl_jax.sessions.streaming import NO_TOKENS, EndedTurn, StreamingSession
from sgl_jax.sessions.tree import RegularSession, SavedNode


class SavedSession(msgspec.Struct, frozen=True):
    """A session without turns in flight: `tokens` and `turns` of a streaming session, or the
    `nodes` of a regular session, parents first."""

    session_id: str
    streaming: bool
    capacity: int
    timeout_s: float | None
    namespace: str
    tokens: Int32Array
    turns: list[EndedTurn]
    nodes: list[SavedNode]
    holder: str = ""


def save_session(session: Session) -> SavedSession:
    """Return the session as if its turns in flight had failed."""
    is_streaming = isinstance(session, StreamingSession)
    return SavedSession(
        session_id=session.session_id,
        streaming=is_streaming,
        capacity=session.capacity,
        timeout_s=session.timeout_s,
        namespace=session.namespace,
        tokens=session.tokens if isinstance(session, StreamingSession) else NO_TOKENS,
        turns=list(session.turns) if isinstance(session, StreamingSession) else [],
        nodes=session.save() if isinstance(session, RegularSession) else [],
        holder=session.holder,
    )


def restore_session(saved: SavedSession) -> Session:
    """Return the saved session. A client can no longer amend its last turn."""
    opened = OpenSession(
        rid="",
        session_id=saved.session_id,
        streaming=saved.streaming,
        capacity_of_str_len=saved.capacity,
        timeout_s=saved.timeout_s,
        namespace=saved.namespace,
        tenant=Tenant(name=saved.holder) if saved.holder else None,
    )
    if saved.streaming:
        session = StreamingSession(opened)
        session.tokens, session.turns = saved.tokens, list(saved.turns)
        return session
    tree = RegularSession(opened)
    tree.restore(saved.nodes)
    return tree
