"""Streaming sessions: append-only conversations, each a list of tokens that turns extend.

Also the prompt and the name of a turn of any session.
"""

from collections import deque
from copy import copy
from typing import NamedTuple

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    OpenSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.shares import holder_of
from sgl_jax.core.step_plan import Int32Array

_ROLLBACKS_KEPT = 16
NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False


class TurnOutline(NamedTuple):
    """A finished turn for display. `parent` is the list index of the turn it continues."""

    name: str
    num_tokens: int  # history, prompt and output
    parent: int | None


def turn_of(message: GenerateRequest) -> SessionTurn:
    assert message.session is not None
    return message.session


def turn_name(message: GenerateRequest) -> str:
    return turn_of(message).name or message.rid


def append_turn(history: Int32Array, message: GenerateRequest) -> Int32Array:
    """Return `history` plus the turn's tokens, int32; after a history, without their BOS token.

    A BOS token that also stands within the texts begins each message, as SmolLM2's does, and stays.
    """
    bos, new = turn_of(message).bos_token_id, np.array(message.input_ids, np.int32)
    if len(history) and len(new) and bos is not None and new[0] == bos:
        begins_messages = (history[1:] == bos).any() or (new[1:] == bos).any()
        new = new if begins_messages else new[1:]
    return np.concatenate([history, new])


class EndedTurn(NamedTuple):
    """A turn that succeeded."""

    rid: str  # request id
    name: str  # the client's name for the turn
    prompt_len: int  # tokens of the prompt, including the history
    num_tokens: int  # length of the history after it


class _Replaced(NamedTuple):
    """The part of the history that the last turn replaced, restored if the turn is removed.

    A turn replaces part of the history if it sent a whole conversation that differs from it.
    """

    rid: str  # request id of the last turn
    kept_len: int  # tokens of the earlier history that it kept
    tokens: Int32Array  # the rest of that history
    turns: list[EndedTurn]  # turns that ended in the rest


class StreamingSession:
    """An append-only conversation. `tokens` is its history, up to its last successful turn."""

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self.namespace = opened.namespace
        self.holder = holder_of(opened.tenant)  # the tenant charged for this session
        self.tokens = NO_TOKENS
        self.turns: list[EndedTurn] = []
        self._replaced: _Replaced | None = None
        self.running: str | None = None  # request id of the turn in flight
        self._name = ""  # name of the running turn
        # For display: the forked session with its number of turns, and the latest rollbacks as
        # (turns kept, turns undone).
        self.forked_from: tuple[str, int] | None = None
        self.rollbacks: deque[tuple[int, int]] = deque(maxlen=_ROLLBACKS_KEPT)
        self._is_whole = False  # the running turn sent the whole conversation
        self._pending: Int32Array = NO_TOKENS  # whole prompt of the running turn
        self._is_held = False  # the running turn has not entered

    def outline(self, most: int) -> list[TurnOutline]:
        """Return the last `most` turns, oldest first; each continues the previous one."""
        last = self.turns[-most:]
        return [
            TurnOutline(each.name, each.num_tokens, i - 1 if i else None)
            for i, each in enumerate(last)
        ]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_kept(self) -> int:
        """Return the tokens in host memory: the history or the longer prompt of the running turn,
        and the tokens that the last turn replaced."""
        replaced = 0 if self._replaced is None else len(self._replaced.tokens)
        num_pending = 0 if self._is_held else len(self._pending)
        return max(len(self.tokens), num_pending) + replaced

    @property
    def kept_tokens(self) -> list[Int32Array]:
        """Return lists of all tokens in host memory, of held turns, too."""
        replaced = [] if self._replaced is None else [self._replaced.tokens]
        return [self.tokens, self._pending, *replaced]

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_running(self) -> int:
        return int(self.running is not None)

    def compose(self, message: GenerateRequest) -> Int32Array:
        """Return the whole prompt of a turn. Changes nothing; raises `InvalidRequestError`."""
        if self.running is not None:
            raise InvalidRequestError(
                f"session {self.session_id!r} has request {self._name!r} in flight",
                "session_params",
            )
        turn = turn_of(message)
        _require_plain_append(self, turn)
        return append_turn(NO_TOKENS if turn.is_whole else self.tokens, message)

    def replaced_by(self, turn: SessionTurn) -> list[str]:
        """Return no turns: a streaming session takes no turn while one runs."""
        return []

    def hold(self, message: GenerateRequest, prompt: Int32Array) -> None:
        """Record the arrival of a turn with the prompt from `compose`. Until it enters, it does not
        count towards `num_kept`."""
        self.running, self._name, self._pending = message.rid, turn_name(message), prompt
        self._is_whole, self._is_held = turn_of(message).is_whole, True

    def replaced_by_held(self, rid: str) -> list[str]:
        return []

    def require_entry(self, rid: str) -> None:
        """Do nothing: a held turn can always enter, since no other may arrive before it ends."""

    def num_added(self, rid: str) -> int:
        """Return the tokens by which a held turn exceeds the history; may be negative."""
        return len(self._pending) - len(self.tokens)

    def enter(self, rid: str) -> None:
        self._is_held = False

    def kept_len(self) -> int:
        """Return the length of the common prefix of the running turn's prompt and the history."""
        size = min(len(self.tokens), len(self._pending))
        differing = np.flatnonzero(self.tokens[:size] != self._pending[:size])
        return int(differing[0]) if len(differing) else size

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """Record the end of the running turn with all its `tokens`, or None if it failed."""
        assert self.running == rid, f"{rid} is not the turn in flight of {self.session_id}"
        if tokens is not None:
            kept = self.kept_len()
            turns = [turn for turn in self.turns if turn.num_tokens <= kept]
            self._replaced = _Replaced(
                rid, kept, self.tokens[kept:].copy(), self.turns[len(turns) :]
            )
            self.turns = [*turns, EndedTurn(rid, self._name, len(self._pending), len(tokens))]
            self.tokens = tokens.copy()
        self.running, self._pending = None, NO_TOKENS
        self._is_held = False

    def built_on(self, message: StopRequest | AbortRequest) -> list[str]:
        """Return the running turn if its prompt has tokens that `message` removes from the turn
        before. A turn that sent its whole conversation has no tokens from the session."""
        if self.running is None or self._is_whole or self._len_after(message) == self.num_tokens:
            return []
        return [self.running]

    def amend(self, message: StopRequest | AbortRequest) -> int | None:
        """Cut the last turn to the tokens that its client received, or remove it.

        No running turn may be built on it. If a turn with its whole conversation runs, `kept_len`
        changes. Returns the number of tokens with KV still valid for the session, or None if
        nothing changes, e.g. because a later turn has succeeded.
        """
        fitting = self._len_after(message)
        if fitting == self.num_tokens:
            return None
        assert self.running is None or self._is_whole, "a turn runs on what is amended"
        self.tokens = self.tokens[:fitting].copy()
        if isinstance(message, StopRequest):
            self.turns[-1] = self.turns[-1]._replace(num_tokens=fitting)
        else:
            assert self._replaced is not None
            self.tokens = np.concatenate([self.tokens, self._replaced.tokens])
            self.turns = [*self.turns[:-1], *self._replaced.turns]
            self._replaced = None
        return fitting

    def roll_back(self, num_turns: int) -> None:
        if not 0 <= num_turns <= len(self.turns):
            raise InvalidRequestError(
                f"session {self.session_id!r} has {len(self.turns)} turns, it cannot go back to "
                f"{num_turns}",
                "num_turns",
            )
        if num_turns < len(self.turns):
            self.rollbacks.append((num_turns, len(self.turns) - num_turns))
        self.turns = self.turns[:num_turns]
        # A copy, since a view would keep the whole array in memory.
        self.tokens = self.tokens[: self.turns[-1].num_tokens if self.turns else 0].copy()

    def fork(self, new_session_id: str, holder: str) -> "StreamingSession":
        """Return a new session of tenant `holder` with the same history. This session must have no
        turn in flight."""
        other = copy(self)
        other.holder = holder
        other.session_id, other.turns, other._replaced = new_session_id, list(self.turns), None
        other.forked_from = self.session_id, len(self.turns)
        other.rollbacks = deque(maxlen=_ROLLBACKS_KEPT)
        return other

    def _len_after(self, message: StopRequest | AbortRequest) -> int:
        """Return the length of the history that `message` leaves unchanged."""
        if not self.turns or self.turns[-1].rid != message.rid:
            return self.num_tokens
        if isinstance(message, StopRequest):
            return min(self.num_tokens, self.turns[-1].prompt_len + message.num_output_tokens)
        if self._replaced is None or self._replaced.rid != message.rid:
            return self.num_tokens  # a later turn was rolled back
        return self._replaced.kept_len


def _require_plain_append(session: StreamingSession, turn: SessionTurn) -> None:
    """Raise `InvalidRequestError` if a turn of a streaming session does more than append."""
    for name, is_set in (
        ("replace", turn.replace),
        ("drop_previous_output", turn.drop_previous_output),
        ("offset", turn.offset != 0),
    ):
        if is_set:
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
