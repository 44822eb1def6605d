"""What clients say of sessions, and what they are answered: SGLang's words, and a few more."""

import uuid
from abc import ABC, abstractmethod
from typing import Annotated

from msgspec import Struct
from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    CloseSession,
    ForkSession,
    ListSessions,
    OpenSession,
    RollbackSession,
    SessionMessage,
    SessionTurn,
)
from sgl_jax.engine.request_limits import MAX_SESSION_ID_CHARS, one_namespace
from sgl_jax.server.session_owner import SessionOwner
from sgl_jax.server.strict_model import Namespace, Rid, StrictModel

_INT32 = 2**31
_MAX_TIMEOUT_S = 1e9

SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID_CHARS)]


class SessionParams(StrictModel):
    """`session_params`: the session that a request is a turn of, and how it continues it."""

    id: SessionId
    rid: Rid | None = Field(default=None, description="the turn to append to; null starts anew")
    offset: int | None = Field(
        default=None, ge=-_INT32, lt=_INT32, description="tokens of the history to keep; 0: all"
    )
    replace: bool | None = Field(default=None, description="drop what followed `rid`")
    drop_previous_output: bool | None = Field(
        default=None, description="append to the prompt of `rid`, not to its output"
    )


class SessionBody(StrictModel, ABC):
    """Body of a call about sessions."""

    @abstractmethod
    def to_message(self, owner: SessionOwner) -> SessionMessage:
        """As the engine takes it; its `rid` is filled in when it is sent."""
        ...


class ListSessionsBody(SessionBody):
    """`/list_sessions` has none."""

    def to_message(self, owner: SessionOwner) -> SessionMessage:
        return ListSessions(rid="")


class OpenSessionBody(SessionBody):
    """Body of `/open_session`."""

    capacity_of_str_len: int = Field(
        default=0, ge=0, lt=_INT32, description="tokens that the history may hold; 0: no limit"
    )
    session_id: SessionId | None = Field(default=None, description="default: a new one")
    streaming: bool | None = Field(
        default=None, description="append-only, one request in flight, KV kept in place"
    )
    timeout: float | None = Field(
        default=None, gt=0, le=_MAX_TIMEOUT_S, description="idle seconds until it is closed"
    )
    extra_key: Namespace | None = Field(
        default=None, description="of all its turns: as in /generate, and the same as cache_salt"
    )
    cache_salt: Namespace | None = Field(default=None, description="the same as extra_key")

    def to_message(self, owner: SessionOwner) -> SessionMessage:
        return OpenSession(
            rid="",
            session_id=owner.engine_id(self.session_id or uuid.uuid4().hex),
            streaming=bool(self.streaming),
            capacity_of_str_len=self.capacity_of_str_len,
            timeout_s=self.timeout,
            namespace=one_namespace(self.extra_key, self.cache_salt),
        )


class CloseSessionBody(SessionBody):
    """Body of `/close_session`."""

    session_id: SessionId

    def to_message(self, owner: SessionOwner) -> SessionMessage:
        return CloseSession(rid="", session_id=owner.engine_id(self.session_id))


class RollbackSessionBody(SessionBody):
    """Body of `/rollback_session`: keep the first `num_turns` turns of a streaming session."""

    session_id: SessionId
    num_turns: int = Field(ge=0, lt=_INT32)

    def to_message(self, owner: SessionOwner) -> SessionMessage:
        session_id = owner.engine_id(self.session_id)
        return RollbackSession(rid="", session_id=session_id, num_turns=self.num_turns)


class ForkSessionBody(SessionBody):
    """Body of `/fork_session`: a new streaming session with the same history."""

    session_id: SessionId
    new_session_id: SessionId | None = Field(default=None, description="default: a new one")

    def to_message(self, owner: SessionOwner) -> SessionMessage:
        new_id = self.new_session_id or uuid.uuid4().hex
        return ForkSession(
            rid="",
            session_id=owner.engine_id(self.session_id),
            new_session_id=owner.engine_id(new_id),
        )


class RolledBack(Struct, frozen=True):
    """What the session holds now."""

    num_turns: int
    num_tokens: int


class Forked(Struct, frozen=True):
    """The new session, and the length of its history."""

    session_id: str
    num_tokens: int


class SessionEntry(Struct, frozen=True):
    """A session.

    `cached_tokens`: whose KV is in place on rank `dp_rank`, of its history and of the turn that
    runs; 0 without a rank if it was evicted, or its turn waits to be computed anew.
    """

    session_id: str
    streaming: bool
    num_turns: int
    num_tokens: int
    num_running: int
    is_closing: bool
    idle_s: float
    timeout_s: float | None
    dp_rank: int | None
    cached_tokens: int


class SessionList(Struct, frozen=True):
    """Answer of `/list_sessions`."""

    sessions: list[SessionEntry]


def session_turn(params: SessionParams | None) -> SessionTurn | None:
    """As the engine takes it."""
    if params is None:
        return None
    return SessionTurn(
        id=params.id,
        rid=params.rid,
        offset=params.offset or 0,
        replace=bool(params.replace),
        drop_previous_output=bool(params.drop_previous_output),
    )


def refuse_several(count: int, field: str) -> None:
    """A turn is one request: raise `InvalidRequestError` if `field` asks for several."""
    if count != 1:
        raise InvalidRequestError(
            f"a session takes one request at a time, {field} asks for {count}", field
        )
