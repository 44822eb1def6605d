"""Sessions as the conversations they are: tokens and turns, without a thought for memory.

A *streaming* session is a growing list of tokens: each turn appends, one at a time, and a turn
that fails leaves the session where it was. A *regular* session is a tree of turns, each the
continuation of another, computed like any other request. Where the KV of either lies is the
business of `SessionAwareCache` and the prefix cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GenerateRequest, OpenSession, SessionTurn
from sgl_jax.core.step_plan import Int32Array

_NO_TOKENS: Int32Array = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False


class Turn(NamedTuple):
    """A turn that succeeded: its request, and where the history stood when it ended."""

    rid: str
    num_tokens: int


class StreamingSession:
    """An append-only conversation. `tokens` is its history up to its last successful turn."""

    kind = "streaming"

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self.tokens = _NO_TOKENS
        self.turns: list[Turn] = []
        self._running: str | None = None
        self._pending: Int32Array = _NO_TOKENS  # the prompt of the running turn, whole

    @property
    def num_tokens(self) -> int:
        """Length of the history."""
        return len(self.tokens)

    @property
    def num_turns(self) -> int:
        """Turns that succeeded."""
        return len(self.turns)

    @property
    def num_running(self) -> int:
        """Requests in flight: one, or none."""
        return int(self._running is not None)

    def begin(self, rid: str, turn: SessionTurn, input_ids: list[int]) -> Int32Array:
        """A turn starts; the whole prompt. Raises `InvalidRequestError`, changing nothing."""
        if self._running is not None:
            raise InvalidRequestError(
                f"session {self.session_id!r} has request {self._running!r} in flight",
                "session_params",
            )
        _require_plain_append(self, turn)
        new = np.array(input_ids, np.int32)
        if not turn.is_whole:
            new = np.concatenate([self.tokens, _without_bos(new, turn, bool(self.num_tokens))])
        self._running, self._pending = rid, new
        return new

    def kept_len(self) -> int:
        """Tokens that the running turn's prompt and the history before it have in common."""
        size = min(len(self.tokens), len(self._pending))
        differing = np.flatnonzero(self.tokens[:size] != self._pending[:size])
        return int(differing[0]) if len(differing) else size

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """The running turn ended, with all its tokens if it succeeded, else with None."""
        assert self._running == rid, f"{rid} is not the turn in flight of {self.session_id}"
        if tokens is not None:
            kept = self.kept_len()
            self.turns = [turn for turn in self.turns if turn.num_tokens <= kept]
            self.turns.append(Turn(rid, len(tokens)))
            self.tokens = tokens.copy()
        self._running, self._pending = None, _NO_TOKENS

    def roll_back(self, num_turns: int) -> None:
        """Forget all but the first `num_turns` turns."""
        if not 0 <= num_turns <= len(self.turns):
            raise InvalidRequestError(
                f"session {self.session_id!r} has {len(self.turns)} turns, it cannot go back to "
                f"{num_turns}",
                "num_turns",
            )
        self.turns = self.turns[:num_turns]
        self.tokens = self.tokens[: self.turns[-1].num_tokens if self.turns else 0]

    def fork(self, new_session_id: str) -> "StreamingSession":
        """Another session with the same history."""
        opened = OpenSession(
            rid="",
            session_id=new_session_id,
            streaming=True,
            capacity_of_str_len=self.capacity,
            timeout_s=self.timeout_s,
        )
        other = StreamingSession(opened)
        other.tokens, other.turns = self.tokens, list(self.turns)
        return other


class _Node:
    """A turn of a regular session; `output` is None while it runs."""

    __slots__ = ("children", "output", "parent", "prompt")

    def __init__(self, prompt: Int32Array, parent: str | None) -> None:
        self.prompt = prompt
        self.output: Int32Array | None = None
        self.parent = parent
        self.children: list[str] = []


class RegularSession:
    """A tree of turns, keyed by request id."""

    kind = "regular"

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self._nodes: dict[str, _Node] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the longest finished branch."""
        finished = [node for node in self._nodes.values() if node.output is not None]
        return max((len(_whole(node)) for node in finished), default=0)

    @property
    def num_turns(self) -> int:
        """Turns of the tree that have finished."""
        return len(self._nodes) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return sum(node.output is None for node in self._nodes.values())

    def begin(self, rid: str, turn: SessionTurn, input_ids: list[int]) -> Int32Array:
        """A turn starts; the whole prompt. Raises `InvalidRequestError`, changing nothing."""
        if turn.is_whole:
            raise InvalidRequestError(
                f"session {self.session_id!r} is a regular one: only a streaming session finds "
                "by itself what is new in a conversation",
                "session_id",
            )
        if rid in self._nodes:
            raise InvalidRequestError(f"request id {rid!r} is a turn of the session already", "rid")
        new = np.array(input_ids, np.int32)
        parent = turn.rid
        if parent is not None:
            node = self._finished(parent)
            history = node.prompt if turn.drop_previous_output else _whole(node)
            if turn.offset:
                history = history[: turn.offset]
            new = np.concatenate([history, _without_bos(new, turn, bool(len(history)))])
        if turn.replace:
            self._drop_below(parent)
        self._nodes[rid] = _Node(new, parent)
        if parent is not None:
            self._nodes[parent].children.append(rid)
        return new

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """A turn ended; one that failed leaves the tree as if it had never been."""
        node = self._nodes.get(rid)
        if node is None:
            return  # replaced while it ran
        if tokens is not None:
            node.output = tokens[len(node.prompt) :].copy()
            return
        del self._nodes[rid]
        if node.parent is not None and node.parent in self._nodes:
            self._nodes[node.parent].children.remove(rid)

    def _finished(self, rid: str) -> _Node:
        node = self._nodes.get(rid)
        if node is None:
            raise InvalidRequestError(
                f"session {self.session_id!r} has no turn {rid!r}", "session_params"
            )
        if node.output is None:
            raise InvalidRequestError(
                f"turn {rid!r} of session {self.session_id!r} has not finished", "session_params"
            )
        return node

    def _drop_below(self, rid: str | None) -> None:
        """Forget the descendants of a turn, or all turns; what still runs goes on unlisted."""
        if rid is None:
            self._nodes.clear()
            return
        stack = self._nodes[rid].children
        self._nodes[rid].children = []
        while stack:
            node = self._nodes.pop(stack.pop())
            stack.extend(node.children)


Session = StreamingSession | RegularSession


class SessionBook:
    """All sessions of an engine by id, and when each was used last, by the ticks of the engine."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._used_at: dict[str, float] = {}
        self._closing: set[str] = set()
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def needs_ticks(self) -> bool:
        """Whether any session may time out."""
        return any(session.timeout_s is not None for session in self._sessions.values())

    def open(self, opened: OpenSession) -> None:
        """Raises `InvalidRequestError` if the id is taken or there are too many."""
        self._require_free(opened.session_id)
        session = StreamingSession(opened) if opened.streaming else RegularSession(opened)
        self._add(session)

    def get(self, session_id: str) -> Session:
        """Raises `InvalidRequestError` if there is none, or it is about to be closed."""
        session = self._sessions.get(session_id)
        if session is None or session_id in self._closing:
            raise InvalidRequestError(
                f"there is no session {session_id!r}, or it was closed", "session_id"
            )
        return session

    def idle_streaming(self, session_id: str) -> StreamingSession:
        """A streaming session with nothing in flight; raises `InvalidRequestError` else."""
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

    def fork(self, session: StreamingSession, new_session_id: str) -> None:
        """Raises `InvalidRequestError` if the new id is taken or there are too many."""
        self._require_free(new_session_id)
        self._add(session.fork(new_session_id))

    def begin_turn(self, message: GenerateRequest) -> tuple[Session, Int32Array]:
        """A request of a session arrives: its session and its whole prompt.

        Raises `InvalidRequestError`, changing nothing, if the session cannot take it.
        """
        turn = message.session
        assert turn is not None
        session = self.get(turn.id)
        whole = session.begin(message.rid, turn, message.input_ids)
        if session.capacity and len(whole) > session.capacity:
            session.end(message.rid, None)
            raise InvalidRequestError(
                f"the turn makes {len(whole)} tokens, session {turn.id!r} holds "
                f"{session.capacity} at most",
                "session_params",
            )
        self._used_at[turn.id] = self._now_s
        return session, whole

    def end_turn(self, session: Session, rid: str, tokens: Int32Array | None) -> bool:
        """A turn ended, with its tokens if it succeeded; whether its session is closed by that."""
        session.end(rid, tokens)
        if self._sessions.get(session.session_id) is not session:
            return True
        self._used_at[session.session_id] = self._now_s
        if session.session_id in self._closing and not session.num_running:
            self._forget(session.session_id)
            return True
        return session.session_id in self._closing

    def close(self, session_id: str) -> Session:
        """Close a session, or if it has requests in flight, let it take no more."""
        session = self.get(session_id)
        if session.num_running:
            self._closing.add(session_id)
        else:
            self._forget(session_id)
        return session

    def tick(self, now_s: float) -> list[str]:
        """The time: sessions that were idle for too long, to be closed."""
        self._now_s = now_s
        return [
            session_id
            for session_id, session in self._sessions.items()
            if session.timeout_s is not None
            and not session.num_running
            and now_s - self._used_at[session_id] > session.timeout_s
        ]

    def all(self) -> Iterator[tuple[Session, float, bool]]:
        """Each session, the seconds since it was used, and whether it is about to be closed."""
        for session_id, session in self._sessions.items():
            idle_s = 0.0 if session.num_running else self._now_s - self._used_at[session_id]
            yield session, idle_s, session_id in self._closing

    def _add(self, session: Session) -> None:
        self._sessions[session.session_id] = session
        self._used_at[session.session_id] = self._now_s

    def _forget(self, session_id: str) -> None:
        del self._sessions[session_id], self._used_at[session_id]
        self._closing.discard(session_id)

    def _require_free(self, session_id: str) -> None:
        if not session_id:
            raise InvalidRequestError("a session needs an id that is not empty", "session_id")
        if session_id in self._sessions:
            raise InvalidRequestError(f"session {session_id!r} exists already", "session_id")
        if len(self._sessions) >= self._max_sessions:
            raise InvalidRequestError(
                f"{self._max_sessions} sessions are open, which is the most there may be",
                "session_id",
            )


def _whole(node: _Node) -> Int32Array:
    assert node.output is not None
    return np.concatenate([node.prompt, node.output])


def _without_bos(new: Int32Array, turn: SessionTurn, is_appended: bool) -> Int32Array:
    if is_appended and len(new) and turn.bos_token_id is not None and new[0] == turn.bos_token_id:
        return new[1:]
    return new


def _require_plain_append(session: StreamingSession, turn: SessionTurn) -> None:
    """Raise `InvalidRequestError` if a turn asks a streaming session for more than to append."""
    for name, asked in (
        ("replace", turn.replace),
        ("drop_previous_output", turn.drop_previous_output),
        ("offset", turn.offset != 0),
    ):
        if asked:
            raise InvalidRequestError(
                f"session {session.session_id!r} is a streaming one: it only appends, without "
                f"{name}; use /rollback_session or /fork_session",
                "session_params",
            )
    last = session.turns[-1].rid if session.turns else None
    if turn.rid is not None and turn.rid != last:
        raise InvalidRequestError(
            f"session {session.session_id!r} is a streaming one: it appends to its last turn "
            f"({last!r}), not to {turn.rid!r}",
            "session_params",
        )
