"""Sessions as the conversations they are: tokens and turns, without a thought for memory.

A *streaming* session is a growing list of tokens: each turn appends, one at a time, and a turn
that fails leaves the session where it was. A *regular* session is a tree of turns, each the
continuation of another, computed like any other request. Where the KV of either lies is the
business of `SessionAwareCache` and the prefix cache.
"""

from typing import NamedTuple

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import OpenSession, SessionTurn, StopRequest
from sgl_jax.core.step_plan import Int32Array

_NO_TOKENS: Int32Array = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False


class Turn(NamedTuple):
    """A turn that succeeded: its request, how the client calls it, the tokens of its prompt
    (history and all), and where the history stood when it ended."""

    rid: str
    name: str
    prompt_len: int
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
        self._name = ""  # of the running turn
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

    def compose(self, rid: str, turn: SessionTurn, input_ids: list[int]) -> Int32Array:
        """The whole prompt of a turn. Changes nothing; raises `InvalidRequestError`."""
        if self._running is not None:
            raise InvalidRequestError(
                f"session {self.session_id!r} has request {self._name!r} in flight",
                "session_params",
            )
        _require_plain_append(self, turn)
        new = np.array(input_ids, np.int32)
        if turn.is_whole:
            return new
        return np.concatenate([self.tokens, _without_bos(new, turn, bool(self.num_tokens))])

    def begin(self, rid: str, turn: SessionTurn, prompt: Int32Array) -> None:
        """A turn starts, with the prompt that `compose` made."""
        self._running, self._name, self._pending = rid, turn.name or rid, prompt

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
            self.turns.append(Turn(rid, self._name, len(self._pending), len(tokens)))
            self.tokens = tokens.copy()
        self._running, self._pending = None, _NO_TOKENS

    def cut(self, stop: StopRequest) -> None:
        """The last turn has ended, but further on than the client saw it end."""
        if self._running is None and self.turns and self.turns[-1].rid == stop.rid:
            last = self.turns[-1]
            num_tokens = min(last.num_tokens, last.prompt_len + stop.num_output_tokens)
            self.turns[-1] = last._replace(num_tokens=num_tokens)
            self.tokens = self.tokens[:num_tokens]

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

    __slots__ = ("children", "output", "parent", "prompt", "rid")

    def __init__(self, rid: str, prompt: Int32Array, parent: str | None) -> None:
        self.rid = rid
        self.prompt = prompt
        self.output: Int32Array | None = None
        self.parent = parent
        self.children: list[str] = []


class RegularSession:
    """A tree of turns, keyed by the names that the client gave them."""

    kind = "regular"

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self._nodes: dict[str, _Node] = {}
        self._names: dict[str, str] = {}  # of the turns in flight, by request id

    @property
    def num_tokens(self) -> int:
        """Length of the longest finished branch."""
        lens = (len(n.prompt) + len(n.output) for n in self._nodes.values() if n.output is not None)
        return max(lens, default=0)

    @property
    def num_turns(self) -> int:
        """Turns of the tree that have finished."""
        return len(self._nodes) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return sum(node.output is None for node in self._nodes.values())

    def compose(self, rid: str, turn: SessionTurn, input_ids: list[int]) -> Int32Array:
        """The whole prompt of a turn. Changes nothing; raises `InvalidRequestError`."""
        if turn.is_whole:
            raise InvalidRequestError(
                f"session {self.session_id!r} is a regular one: only a streaming session finds "
                "by itself what is new in a conversation",
                "session_id",
            )
        name = turn.name or rid
        if name in self._nodes:
            raise InvalidRequestError(f"session {self.session_id!r} has a turn {name!r}", "rid")
        new = np.array(input_ids, np.int32)
        if turn.rid is None:
            return new
        node = self._finished(turn.rid)
        history = node.prompt if turn.drop_previous_output else _whole(node)
        if turn.offset:
            history = history[: turn.offset]
        return np.concatenate([history, _without_bos(new, turn, bool(len(history)))])

    def begin(self, rid: str, turn: SessionTurn, prompt: Int32Array) -> None:
        """A turn starts, with the prompt that `compose` made."""
        name = turn.name or rid
        if turn.replace:
            self._drop_below(turn.rid)
        self._nodes[name], self._names[rid] = _Node(rid, prompt, turn.rid), name
        if turn.rid is not None:
            self._nodes[turn.rid].children.append(name)

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """A turn ended; one that failed leaves the tree as if it had never been."""
        name = self._names.pop(rid)
        node = self._nodes.get(name)
        if node is None or node.rid != rid:
            return  # replaced while it ran
        if tokens is not None:
            node.output = tokens[len(node.prompt) :].copy()
            return
        del self._nodes[name]
        if node.parent is not None and node.parent in self._nodes:
            self._nodes[node.parent].children.remove(name)

    def cut(self, stop: StopRequest) -> None:
        """A turn has ended, but further on than the client saw it end."""
        node = self._nodes.get(stop.session.name or stop.rid) if stop.session else None
        if node is not None and node.rid == stop.rid and node.output is not None:
            node.output = node.output[: stop.num_output_tokens]

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
    last = session.turns[-1].name if session.turns else None
    if turn.rid is not None and turn.rid != last:
        raise InvalidRequestError(
            f"session {session.session_id!r} is a streaming one: it appends to its last turn "
            f"({last!r}), not to {turn.rid!r}",
            "session_params",
        )
