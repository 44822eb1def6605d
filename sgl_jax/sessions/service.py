"""Handle the calls about sessions, and keep histories and memory consistent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from sgl_jax.core.calls import Done, Forked, RolledBack, SessionEntry, SessionList
from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import (
    CALL_OF,
    AbortRequest,
    CloseSession,
    ForkSession,
    GenerateRequest,
    ListSessions,
    OpenSession,
    RollbackSession,
    SessionMessage,
    StopRequest,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_idle_lease, roll_back_lease
from sgl_jax.sessions.images import KnownImage, find_images, known_images
from sgl_jax.sessions.saving import SavedSession, restore_session, save_session
from sgl_jax.sessions.store import Session, SessionsFullError, SessionStore
from sgl_jax.sessions.streaming import StreamingSession, turn_of
from sgl_jax.sessions.tree import RegularSession


class TurnRequest(Protocol):
    """A request of a session, waiting or running."""

    rid: str
    tokens: Int32Array  # prompt and output when it last waited, or at its end
    session: Session | None
    kept_by: str | None  # id of the streaming session that keeps the lease
    kept_len: int  # tokens that the session keeps if the turn fails
    lease: KVLease | None
    dp_rank: int | None


T = TypeVar("T", bound=TurnRequest)


class ComposedTurn(NamedTuple, Generic[T]):
    """A turn before it begins. The caller first ends the turns in flight that it replaces."""

    session: Session
    prompt: Int32Array  # including the history
    displaced: list[str]  # idle sessions that close when it begins
    replaced: list[T]


class SessionService(Generic[T]):
    """The sessions of a scheduler.

    Args:
        memories: the memory of each rank.
        requests: all requests in flight by id, including requests without a session.
        known_tokens: returns the prompt and the output so far of a request in flight.
        args: the scheduler's settings, with the limits of sessions.
    """

    def __init__(
        self,
        memories: Sequence[RankMemory],
        requests: Mapping[str, T],
        known_tokens: Callable[[T], Int32Array],
        args: SchedulerArgs,
    ) -> None:
        self.store = SessionStore(args.max_sessions, args.max_session_tokens, args.share_part)
        self.num_displaced = 0
        self._memories = memories
        self._requests = requests
        self._known_tokens = known_tokens

    def answer(self, message: SessionMessage) -> Reply:
        """Handle a call. A refused call changes nothing, and its `Reply` has the reason."""
        try:
            data = getattr(self, CALL_OF[type(message)].handler)(message)
        except InvalidRequestError as error:
            reason: dict[str, Any] = {"param": error.param, "code": error.code}
            return Reply(rid=message.rid, ok=False, message=str(error), data=reason)
        except SessionsFullError as error:
            reason = {"status_code": error.status_code, "code": error.code}
            return Reply(rid=message.rid, ok=False, message=str(error), data=reason)
        # Within one process, an id may be an instance of a str subclass, such as numpy's.
        return Reply(rid=message.rid, ok=True, data=msgspec.to_builtins(data, enc_hook=str))

    def home_of(self, request: T) -> RankMemory | None:
        """Return the memory with the session's lease if the request can continue it, else None."""
        return None if request.kept_by is None else self._home(request.kept_by)

    def end_turn(self, request: T, *, succeeded: bool) -> None:
        """Record the end of a turn's request. Its lease, if any, has been released."""
        if request.session is not None:
            request.session.end(request.rid, request.tokens if succeeded else None)
            self.store.note_use(request.session)

    def built_on(self, message: StopRequest | AbortRequest) -> list[T]:
        session = None if message.session is None else self.store.find(message.session.id)
        return [] if session is None else [self._requests[r] for r in session.built_on(message)]

    def amend_turn(self, message: StopRequest | AbortRequest) -> None:
        """Cut an ended turn to the tokens that its client received, or remove it if there are none.
        The caller has ended the turns that were `built_on` it."""
        session = None if message.session is None else self.store.find(message.session.id)
        if session is None:
            return
        fitting = session.amend(message)
        self.store.recount(session)
        if fitting is None:
            return
        turn = self._turn_of(session)
        if turn is not None and isinstance(session, StreamingSession):
            # The running turn sent its whole conversation, so it does not need the cut tokens. If
            # it fails, the session keeps this part of its history.
            turn.kept_len = session.kept_len()
        home = self._home(session.session_id)
        if home is not None:
            roll_back_lease(home, session.session_id, fitting)

    def compose_turn(self, message: GenerateRequest) -> ComposedTurn[T]:
        """Return a turn that its session can take. Changes no session. Raises `InvalidRequestError`
        if the session cannot take the turn, `SessionsFullError`."""
        turn = turn_of(message)
        found = self.store.find(turn.id)
        replaced = [] if found is None else self._note_replaced(found, found.replaced_by(turn))
        return ComposedTurn(*self.store.compose_turn(message), replaced)

    def hold_turn(self, turn: ComposedTurn[T], message: GenerateRequest) -> None:
        """Record the arrival of a composed turn. It may still be refused, so it closes no session
        and replaces no turn until `enter_turn`."""
        turn.session.hold(message, turn.prompt)
        self.store.add_images(turn.session, message)
        self._note_turn(turn.session)

    def images_of(
        self, turn: ComposedTurn[T], message: GenerateRequest, vocab_size: int
    ) -> tuple[ImageInput, ...]:
        """Return the images of a composed turn's whole prompt. Raises `InvalidRequestError` if the
        session lacks one, and `SessionsFullError` if sessions would keep too many."""
        self.store.check_pixels(message)
        known = self.store.images_of(turn.session) | known_images(message)
        return find_images(turn.prompt, known, vocab_size)

    def compose_held(self, request: T) -> ComposedTurn[T]:
        """Return a held turn that can enter its session now. Changes no session. Raises
        `InvalidRequestError` if the session cannot take the turn, `SessionsFullError`."""
        session = request.session
        assert session is not None, "a held turn has a session"
        displaced = self.store.room_for_held(session, request.rid)
        replaced = self._note_replaced(session, session.replaced_by_held(request.rid))
        return ComposedTurn(session, request.tokens, displaced, replaced)

    def enter_turn(self, turn: ComposedTurn[T], rid: str) -> None:
        self._displace(turn.displaced)
        turn.session.enter(rid)
        self._note_turn(turn.session)

    def _note_replaced(self, session: Session, rids: Sequence[str]) -> list[T]:
        """Return the turns to replace, after recording their output so far in the session."""
        replaced = [self._requests[rid] for rid in rids]
        for request in replaced:
            assert isinstance(session, RegularSession)
            session.note_so_far(request.rid, self._known_tokens(request))
        return replaced

    def _note_turn(self, session: Session) -> None:
        self.store.note_use(session)
        home = self._home(session.session_id)
        if home is not None:
            home.sessions.touch(session.session_id)

    def tick(self, now_s: float) -> None:
        for session_id in self.store.tick(now_s):
            self._close(session_id)

    def _close(self, session_id: str) -> None:
        """Close a session and free its memory, now or when the turn in flight ends."""
        session = self.store.close(session_id)
        turn = self._turn_of(session)
        if turn is not None:
            turn.kept_by = None
            if turn.lease is not None and turn.dp_rank is not None:
                self._memories[turn.dp_rank].sessions.unbind(turn.lease)
        home = self._home(session_id)
        if home is not None:
            release_idle_lease(home, session_id)

    def _displace(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._close(session_id)
        self.num_displaced += len(session_ids)

    def save(self) -> list[SavedSession]:
        """Return all open sessions except closing ones, oldest first."""
        return [save_session(each) for each, _, is_closing in self.store.all() if not is_closing]

    def restore(self, saved: Sequence[SavedSession], images: Sequence[KnownImage]) -> int:
        """Open saved sessions, which have the saved `images`; return the number without room or
        with an id in use."""
        known = {int(each.tokens[0]): each for each in images}
        return sum(not self.store.restore(restore_session(each), known) for each in saved)

    def release_all(self) -> None:
        for memory in self._memories:
            while (session_id := memory.sessions.oldest_idle()) is not None:
                release_idle_lease(memory, session_id)

    def open(self, message: OpenSession) -> dict[str, str]:
        self._displace(self.store.open(message))
        return {"session_id": message.session_id}

    def close(self, message: CloseSession) -> Done:
        self._close(message.session_id)
        return Done()

    def fork(self, message: ForkSession) -> Forked:
        session = self.store.idle_streaming(message.session_id)
        self._displace(self.store.fork(session, message))
        return Forked(message.new_session_id, session.num_tokens)

    def list_all(self, message: ListSessions) -> SessionList:
        return SessionList([self._describe(*entry) for entry in self.store.all()])

    def roll_back(self, message: RollbackSession) -> RolledBack:
        session = self.store.idle_streaming(message.session_id)
        session.roll_back(message.num_turns)
        self.store.recount(session)
        home = self._home(message.session_id)
        if home is not None:
            roll_back_lease(home, message.session_id, session.num_tokens)
        return RolledBack(session.num_turns, session.num_tokens)

    def _describe(self, session: Session, idle_s: float, is_closing: bool) -> SessionEntry:
        home = self._home(session.session_id)
        lease = None if home is None else home.sessions.lease_of(session.session_id)
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
            cached_tokens=0 if lease is None else lease.kv_committed_len,
        )

    def _turn_of(self, session: Session) -> T | None:
        """Return a streaming session's turn in flight; a regular session keeps no lease."""
        rid = session.running if isinstance(session, StreamingSession) else None
        return None if rid is None else self._requests[rid]

    def _home(self, session_id: str) -> RankMemory | None:
        homes = (home for home in self._memories if home.sessions.lease_of(session_id) is not None)
        return next(homes, None)
