"""What clients ask about sessions, answered: the book of conversations and the slots that hold
their memory, kept in step.

Owns the order of things when a session is opened, closed, forked or rolled back. The turns
themselves are requests like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgl_jax.core.calls import CALL_OF, Done, Forked, RolledBack, SessionEntry, SessionList
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    ForkSession,
    GenerateRequest,
    ListSessions,
    OpenSession,
    Reply,
    RollbackSession,
    SessionMessage,
    StopRequest,
)
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.regular_session import RegularSession
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.session_book import SessionBook, SessionsFullError
from sgl_jax.scheduler.sessions import Session
from sgl_jax.scheduler.streaming_session import StreamingSession
from sgl_jax.scheduler.turn_prompt import named_turn


class SessionDesk:
    """Sessions of a scheduler with these `ranks` and `requests` (in flight, by id)."""

    def __init__(
        self,
        ranks: Sequence[RankScheduler],
        requests: Mapping[str, Request],
        max_sessions: int,
        max_session_tokens: int,
    ) -> None:
        self.book = SessionBook(max_sessions, max_session_tokens)
        self._ranks = ranks
        self._requests = requests

    def answer(self, message: SessionMessage) -> Reply:
        """Do what is asked, or say why it cannot be done; nothing has changed then."""
        try:
            told = getattr(self, CALL_OF[type(message)].handler)(message)
        except InvalidRequestError as error:
            data: dict[str, Any] = {"param": error.param, "code": error.code}
            return Reply(rid=message.rid, ok=False, message=str(error), data=data)
        except SessionsFullError as error:
            data = {"status_code": 503, "code": "too_many_sessions"}
            return Reply(rid=message.rid, ok=False, message=str(error), data=data)
        return Reply(rid=message.rid, ok=True, data=msgspec.to_builtins(told))

    def home_of(self, request: Request) -> RankScheduler | None:
        """The rank that holds the memory of the request's session, if it can go on with that."""
        return None if request.slot_id is None else self._home(request.slot_id)

    def end_turn(self, request: Request, *, succeeded: bool) -> None:
        """A turn's request has ended, and its lease, if it had one, with it."""
        if request.session is not None:
            tokens = request.tokens if succeeded else None
            self.book.end_turn(request.session, request.rid, tokens)

    def built_on(self, message: StopRequest | AbortRequest) -> list[Request]:
        """Turns in flight that continue what `message` takes from a turn that has ended."""
        session = None if message.session is None else self.book.find(message.session.id)
        return [] if session is None else [self._requests[r] for r in session.built_on(message)]

    def amend_turn(self, message: StopRequest | AbortRequest) -> None:
        """A turn had ended before it was known where its client saw it end, or that nobody did.

        Whatever was `built_on` it has been ended before.
        """
        session = None if message.session is None else self.book.find(message.session.id)
        fitting = None if session is None else self.book.amend_turn(session, message)
        if session is None or fitting is None:
            return
        turn = self._turn_of(session)
        if turn is not None and isinstance(session, StreamingSession):
            # A whole conversation: if it fails, it leaves what is the session's history now.
            turn.kept_len = session.kept_len()
        home = self._home(session.session_id)
        if home is not None:
            home.roll_back_session(session.session_id, fitting)

    def compose_turn(self, message: GenerateRequest) -> tuple[Session, Int32Array, list[Request]]:
        """The session that a request is a turn of, its whole prompt, and the turns in flight that
        it replaces: they must end, with what they have, before it begins. Changes nothing.

        Raises `InvalidRequestError` if the session cannot take it, `SessionsFullError`.
        """
        turn = named_turn(message)
        found = self.book.find(turn.id)
        replaced = [] if found is None else [self._requests[r] for r in found.replaced_by(turn)]
        for request in replaced:
            assert isinstance(found, RegularSession)
            found.note_so_far(request.rid, self._tokens_of(request))
        session, prompt = self.book.compose_turn(message)
        return session, prompt, replaced

    def begin_turn(self, session: Session, message: GenerateRequest, prompt: Int32Array) -> None:
        """The request that was composed is accepted."""
        self.book.begin_turn(session, message, prompt)
        home = self._home(session.session_id)
        if home is not None:
            home.memory.cache.touch(session.session_id)

    def tick(self, now_s: float) -> None:
        """The time: close what was idle for too long."""
        for session_id in self.book.tick(now_s):
            self._close(session_id)

    def _close(self, session_id: str) -> None:
        """Close a session; its memory goes at once, or with the turn in flight."""
        session = self.book.close(session_id)
        turn = self._turn_of(session)
        if turn is not None:
            turn.slot_id = None
            if turn.lease is not None and turn.dp_rank is not None:
                self._ranks[turn.dp_rank].memory.cache.unbind(turn.lease)
        home = self._home(session_id)
        if home is not None:
            home.release_session(session_id)

    def release_all(self) -> None:
        """Take the memory of every idle session; they keep their tokens."""
        for rank in self._ranks:
            while (session_id := rank.memory.cache.oldest_idle()) is not None:
                rank.release_session(session_id)

    def open(self, message: OpenSession) -> dict[str, str]:
        """A new session; its id."""
        self.book.open(message)
        return {"session_id": message.session_id}

    def close(self, message: CloseSession) -> Done:
        """As `CloseSession` says."""
        self._close(message.session_id)
        return Done()

    def fork(self, message: ForkSession) -> Forked:
        """As `ForkSession` says."""
        session = self.book.idle_streaming(message.session_id)
        self.book.fork(session, message.new_session_id)
        return Forked(message.new_session_id, session.num_tokens)

    def list_all(self, message: ListSessions) -> SessionList:
        """All sessions, of all callers."""
        return SessionList([self._describe(*entry) for entry in self.book.all()])

    def roll_back(self, message: RollbackSession) -> RolledBack:
        """As `RollbackSession` says."""
        session = self.book.idle_streaming(message.session_id)
        self.book.roll_back(session, message.num_turns)
        home = self._home(message.session_id)
        if home is not None:
            home.roll_back_session(message.session_id, session.num_tokens)
        return RolledBack(session.num_turns, session.num_tokens)

    def _describe(self, session: Session, idle_s: float, is_closing: bool) -> SessionEntry:
        home = self._home(session.session_id)
        return SessionEntry(
            session_id=session.session_id,
            streaming=isinstance(session, StreamingSession),
            num_turns=session.num_turns,
            num_tokens=session.num_tokens,
            num_running=session.num_running,
            is_closing=is_closing,
            idle_s=idle_s,
            timeout_s=session.timeout_s,
            dp_rank=None if home is None else home.dp_rank,
            cached_tokens=0 if home is None else _num_cached(home, session.session_id),
        )

    def _tokens_of(self, request: Request) -> Int32Array:
        """All that are known of a request in flight."""
        if request.lease is None or request.dp_rank is None:
            return request.tokens
        return self._ranks[request.dp_rank].running.known_tokens(request.lease.row)

    def _turn_of(self, session: Session) -> Request | None:
        """The turn in flight of a streaming session; those of a regular one have no slot."""
        rid = session.running if isinstance(session, StreamingSession) else None
        return None if rid is None else self._requests[rid]

    def _home(self, session_id: str) -> RankScheduler | None:
        """The rank that holds the session's lease."""
        return next((rank for rank in self._ranks if rank.memory.cache.holds(session_id)), None)


def _num_cached(home: RankScheduler, session_id: str) -> int:
    """Committed tokens of the session's lease, whether its slot holds it or a running turn."""
    memory = home.memory
    lease = memory.cache.idle_lease(session_id)
    if lease is not None:
        return lease.kv_committed_len
    row = memory.cache.lent_row(session_id)
    assert row is not None, f"rank {home.dp_rank} holds no lease of {session_id!r}"
    return int(memory.rows.kv_committed_len[row])
