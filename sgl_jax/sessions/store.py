"""The open sessions by id, and the rules of opening, closing and time-outs for all kinds."""

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import ForkSession, GenerateRequest, OpenSession
from sgl_jax.core.shares import Shares, holder_of, tenant_text
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.sessions.images import KnownImage, KnownImages, kept_images, known_images
from sgl_jax.sessions.streaming import StreamingSession, turn_of
from sgl_jax.sessions.tree import RegularSession

Session = StreamingSession | RegularSession
# Checks of closed sessions are removed when the heap is larger than twice the number of sessions
# with a time-out, plus this number.
_MIN_SWEPT = 64


class _Check(NamedTuple):
    """A time at which to check a session for its time-out, at or before the time-out itself.

    Stores the session's id rather than the session, so that a closed session can be freed.
    """

    at_s: float
    serial: int  # identifies the opening: the id may be opened again
    session_id: str


# Of the images in all histories, uint8 [height, width, 3] each: 1,365 images of a megapixel.
MAX_PIXEL_BYTES = 4 * 2**30
# Of the images that are saved with the sessions.
MAX_SAVED_PIXEL_BYTES = 2**30


class SessionsFullError(RuntimeError):
    """Too many sessions are open, or they hold too many tokens in total.

    The request is valid and may succeed later. The HTTP layer sends a 503, or a 429 if only the
    tenant has too many.
    """

    param = None

    def __init__(self, message: str, *, is_of_tenant: bool) -> None:
        super().__init__(message)
        self.status_code = 429 if is_of_tenant else 503
        self.code = "tenant_sessions_full" if is_of_tenant else "too_many_sessions"


class SessionStore:
    """All sessions of an engine by id, and the time of each session's last use.

    Time comes only from ticks. They may be far apart while no session needs one, so the time of a
    use is the first tick after it.

    `num_kept` counts the tokens of all sessions in host memory. To keep it correct, call `note_use`
    or `recount` after every change of a session.

    A tenant at its limit may displace idle sessions without a time-out, least recently used first,
    of the largest tenant with enough of them. The store chooses them, and the caller closes them.
    """

    def __init__(self, max_sessions: int, max_tokens: int, share_part: float = 1.0) -> None:
        """Limit sessions and tokens; a tenant may hold `share_part` of each (see `Shares`)."""
        self._opened = Shares(max_sessions, share_part)
        self._kept = Shares(max_tokens, share_part)
        self._sessions: dict[str, Session] = {}
        self._num_kept_of: dict[str, int] = {}  # tokens of each session
        self._images: dict[str, KnownImages] = {}  # of sessions with images
        # Idle sessions without a time-out, by tenant, least recently used first.
        self._idle: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._used_at: dict[str, float] = {}
        self._used_since_tick: set[str] = set()
        self._timed: dict[str, int] = {}  # serial numbers of sessions with a time-out
        # A heap with one check per session with a time-out, and stale checks of closed sessions.
        self._checks: list[_Check] = []
        self._serials = itertools.count()
        self._closing: set[str] = set()
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_kept(self) -> int:
        return self._kept.num_held

    def needs_tick(self, now_s: float) -> bool:
        """Return True if a session was used since the last tick, or may have timed out."""
        return bool(self._used_since_tick) or (bool(self._checks) and self._checks[0].at_s < now_s)

    def open(self, opened: OpenSession) -> list[str]:
        """Open a session; return the ids of the sessions to close in its place. Raises
        `InvalidRequestError` if its id is in use, `SessionsFullError`."""
        self._require_free(opened.session_id)
        replaced = self._place_for(holder_of(opened.tenant))
        session = StreamingSession(opened) if opened.streaming else RegularSession(opened)
        self._add(session)
        return replaced

    def restore(self, session: Session, images: KnownImages) -> bool:
        """Open a saved session, with those of the saved `images` that it has. Without room, or with
        its id in use, change nothing and return False."""
        is_known = session.session_id in self._sessions
        has_room = len(self._sessions) < self._opened.total
        if is_known or not has_room or self._kept.num_held + session.num_kept > self._kept.total:
            return False
        if images:
            self._images[session.session_id] = images
        self._add(session)
        return True

    def find(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def get(self, session_id: str) -> Session:
        """Return the session; raise `InvalidRequestError` if it does not exist or is closing."""
        session = self._sessions.get(session_id)
        if session is None or session_id in self._closing:
            raise InvalidRequestError(
                f"there is no session {session_id!r}, or it was closed", "session_id"
            )
        return session

    def idle_streaming(self, session_id: str) -> StreamingSession:
        """Return the session; raise `InvalidRequestError` unless it is a streaming session without
        a turn in flight."""
        session = self.get(session_id)
        if not isinstance(session, StreamingSession):
            raise InvalidRequestError(
                f"session {session_id!r} is a regular one: any of its turns can be continued",
                "session_id",
            )
        if session.num_running:
            raise InvalidRequestError(
                f"session {session_id!r} has a request in flight", "session_id"
            )
        return session

    def fork(self, session: StreamingSession, message: ForkSession) -> list[str]:
        """Open a session with the history of `session`, which stays open. Return the ids of
        sessions to close. Raises `InvalidRequestError` if the new id is in use,
        `SessionsFullError`."""
        self._require_free(message.new_session_id)
        holder = holder_of(message.tenant)
        num_tokens, source = session.num_tokens, session.session_id
        replaced = self._place_for(holder, source)
        replaced += self._room_for(holder, num_tokens, num_tokens, source)
        self._add(session.fork(message.new_session_id, holder))
        if source in self._images:
            self._images[message.new_session_id] = self._images[source].copy()
        return list(dict.fromkeys(replaced))

    def compose_turn(self, message: GenerateRequest) -> tuple[Session, Int32Array, list[str]]:
        """Return a turn's session, its whole prompt, and the ids of sessions to close for it.
        Changes nothing.

        Raises `InvalidRequestError` if the session cannot take the turn, `SessionsFullError`.
        """
        turn = turn_of(message)
        session = self.get(turn.id)
        if message.namespace not in ("", session.namespace):
            raise InvalidRequestError(
                f"session {turn.id!r} was opened with another cache_salt or extra_key than this "
                "turn has: leave it out, or send the session's",
                "namespace",
            )
        whole = session.compose(message)
        num_added = len(message.input_ids) - (session.num_tokens if turn.is_whole else 0)
        num_needed = session.num_tokens + num_added
        return session, whole, self._room_for(session.holder, num_added, num_needed)

    def room_for_held(self, session: Session, rid: str) -> list[str]:
        """Return the ids of sessions to close for a held turn to enter. Changes nothing. Raises
        `InvalidRequestError` if the session cannot take the turn, `SessionsFullError`."""
        session.require_entry(rid)
        num_added = session.num_added(rid)
        return self._room_for(session.holder, num_added, session.num_tokens + num_added)

    def add_images(self, session: Session, message: GenerateRequest) -> None:
        """Keep the images of a turn for later turns."""
        if message.images:
            self._images.setdefault(session.session_id, {}).update(known_images(message))

    def images_of(self, session: Session) -> KnownImages:
        return self._images.get(session.session_id, {})

    def saved_images(self) -> list[KnownImage]:
        """Return the images of all sessions but closing ones, once each, up to
        `MAX_SAVED_PIXEL_BYTES`; those of the newest sessions come first."""
        known = KnownImages()
        for session in self.newest():
            if session.session_id in self._closing:
                continue
            known |= {k: own for k, own in self.images_of(session).items() if k not in known}
        sizes = itertools.accumulate(len(each.image.pixels) for each in known.values())
        pairs = zip(known.values(), sizes, strict=True)
        return [each for each, size in pairs if size <= MAX_SAVED_PIXEL_BYTES]

    def check_pixels(self, message: GenerateRequest) -> None:
        """Raise `SessionsFullError` if all sessions would keep too many bytes of images."""
        num_new = message.pixel_bytes
        if num_new == 0:
            return
        all_images = (each for known in self._images.values() for each in known.values())
        num_kept = sum(len(each.image.pixels) for each in all_images)
        if num_kept + num_new > MAX_PIXEL_BYTES:
            raise SessionsFullError(
                f"the histories of sessions have {num_kept} bytes of images, and at most "
                f"{MAX_PIXEL_BYTES} are kept: close sessions, or send images without a session",
                is_of_tenant=False,
            )

    def note_use(self, session: Session) -> None:
        """Record the begin or end of a turn. Then closes the session if it is closing and idle."""
        self.recount(session)
        self._used_since_tick.add(session.session_id)
        self._idle[session.holder].pop(session.session_id, None)
        if session.timeout_s is None and not session.num_running:
            self._idle[session.holder][session.session_id] = None
        if session.session_id in self._closing and not session.num_running:
            self._forget(session.session_id)

    def recount(self, session: Session) -> None:
        change = session.num_kept - self._num_kept_of.get(session.session_id, 0)
        self._kept.add(session.holder, change)
        self._num_kept_of[session.session_id] = session.num_kept
        if known := self._images.get(session.session_id):
            self._images[session.session_id] = kept_images(known, session.kept_tokens)

    def close(self, session_id: str) -> Session:
        """Close a session; if turns are in flight, it takes no more and closes after them."""
        session = self.get(session_id)
        if session.num_running:
            self._closing.add(session_id)
        else:
            self._forget(session_id)
        return session

    def tick(self, now_s: float) -> list[str]:
        """Set the time; return the ids of timed-out sessions, for the caller to close.

        A use only postpones a session's time-out. So a session is checked again no earlier than the
        time-out computed by its last check, and a tick costs nothing for all other sessions.
        """
        self._now_s = max(self._now_s, now_s)
        self._used_at.update(dict.fromkeys(self._used_since_tick, self._now_s))
        self._used_since_tick.clear()
        expired = []
        while self._checks and self._checks[0].at_s < self._now_s:
            check = heapq.heappop(self._checks)
            if not self._is_open(check):
                continue
            session = self._sessions[check.session_id]
            assert session.timeout_s is not None
            used_at = self._now_s if session.num_running else self._used_at[check.session_id]
            ends_at = used_at + session.timeout_s
            if ends_at < self._now_s:
                expired.append(check.session_id)
            else:
                heapq.heappush(self._checks, check._replace(at_s=ends_at))
        return expired

    def all(self) -> Iterator[tuple[Session, float, bool]]:
        """Yield each session with its idle time in seconds, and True if it is closing."""
        for session_id, session in self._sessions.items():
            yield session, self.idle_s(session), session_id in self._closing

    def newest(self) -> Iterator[Session]:
        return reversed(self._sessions.values())

    def idle_s(self, session: Session) -> float:
        session_id = session.session_id
        if session.num_running > 0 or session_id in self._used_since_tick:
            return 0.0
        return self._now_s - self._used_at[session_id]

    def _add(self, session: Session) -> None:
        self._sessions[session.session_id] = session
        self._opened.add(session.holder, 1)
        self.note_use(session)
        if session.timeout_s is not None:
            serial = self._timed[session.session_id] = next(self._serials)
            # Due at the next tick, which sets the time of the opening.
            heapq.heappush(self._checks, _Check(-math.inf, serial, session.session_id))

    def _forget(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._opened.add(session.holder, -1)
        self._kept.add(session.holder, -self._num_kept_of.pop(session_id))
        self._idle[session.holder].pop(session_id, None)
        if not self._opened.held_by(session.holder):
            del self._idle[session.holder]
        self._used_at.pop(session_id, None)
        self._images.pop(session_id, None)
        self._used_since_tick.discard(session_id)
        self._closing.discard(session_id)
        if session.timeout_s is None:
            return
        del self._timed[session_id]
        if len(self._checks) > _MIN_SWEPT + 2 * len(self._timed):
            self._checks = [check for check in self._checks if self._is_open(check)]
            heapq.heapify(self._checks)

    def _is_open(self, check: _Check) -> bool:
        return self._timed.get(check.session_id) == check.serial

    def _require_free(self, session_id: str) -> None:
        if not session_id:
            raise InvalidRequestError("a session needs an id that is not empty", "session_id")
        if session_id in self._sessions:
            raise InvalidRequestError(f"session {session_id!r} exists already", "session_id")

    def _place_for(self, holder: str, source: str | None = None) -> list[str]:
        """Return the sessions to close so that the tenant may open one, perhaps a fork of `source`.
        Raises `SessionsFullError`."""
        replaced = self._replaced_for(self._opened, holder, 1, lambda session_id: 1, source)
        if replaced is not None:
            return replaced
        if len(self._sessions) >= self._opened.total:
            raise SessionsFullError(
                f"{self._opened.total} sessions are open, which is the limit (--max-sessions)",
                is_of_tenant=False,
            )
        raise SessionsFullError(
            f"{self._opened.held_by(holder)} sessions of {tenant_text(holder)} are open, as many "
            "as the tenant may have now (--max-sessions, --tenant-share)",
            is_of_tenant=True,
        )

    def _room_for(
        self, holder: str, num_added: int, num_needed: int, source: str | None = None
    ) -> list[str]:
        """Return the sessions to close so that a session of the tenant, perhaps a fork of `source`,
        may grow by `num_added` tokens to `num_needed`.

        Raises `SessionsFullError` if all sessions, or the tenant's, would hold too many tokens, and
        `InvalidRequestError` if this session would by itself.
        """
        kept = self._kept
        if num_added <= 0:
            return []
        if num_needed > kept.most_alone:
            whose = "all sessions" if kept.most_alone == kept.total else "a tenant's sessions"
            raise InvalidRequestError(
                f"{num_needed} tokens of history exceed the {kept.most_alone} tokens that {whose} "
                "may hold together (--max-session-tokens)",
                "input_ids",
            )
        size_of = self._num_kept_of.__getitem__
        replaced = self._replaced_for(kept, holder, num_added, size_of, source)
        if replaced is not None:
            return replaced
        if kept.num_held + num_added > kept.total:
            raise SessionsFullError(
                f"the sessions hold {kept.num_held} tokens of history, and {num_added} more would "
                f"exceed the {kept.total} that they may hold together "
                "(--max-session-tokens); close some",
                is_of_tenant=False,
            )
        raise SessionsFullError(
            f"the sessions of {tenant_text(holder)} hold {kept.held_by(holder)} tokens of history, "
            f"and {num_added} more would exceed the {kept.most(holder)} that they may hold now "
            "(--max-session-tokens, --tenant-share); close some",
            is_of_tenant=True,
        )

    def _replaced_for(
        self,
        shares: Shares,
        holder: str,
        num_added: int,
        size_of: Callable[[str], int],
        spared: str | None,
    ) -> list[str] | None:
        """Return idle sessions to close so that a tenant may hold `num_added` more units of
        `shares`, or None if that is impossible.

        Args:
            size_of: a session's units by its id.
            spared: a session that stays open.
        """
        if shares.may_add(holder, num_added):
            return []
        for other in shares.larger_than(shares.held_by(holder) + num_added):
            replaced, num_freed = [], 0
            for session_id in self._idle.get(other, ()):
                size = 0 if session_id == spared else size_of(session_id)
                if size:
                    replaced.append(session_id)
                    num_freed += size
                if num_freed >= num_added:
                    return replaced
        return None
