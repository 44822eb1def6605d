"""Regular sessions: trees of turns, each turn with a name that its client gave it.

A turn keeps only its own tokens; the history before them is a prefix of its parent's tokens. So a
chain of turns takes as much memory as its last turn has tokens.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    OpenSession,
    SessionTurn,
    StopRequest,
    holder_of,
)
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.sessions.turns import NO_TOKENS, TurnOutline, append_turn, turn_name, turn_of

# Limits of one session's memory on the host; a client that needs more replaces turns, or opens
# another session.
MAX_TURNS = 16_384
MAX_KEPT_TOKENS = 1 << 22  # 16 MiB


@dataclass(slots=True, eq=False)
class _Node:
    """A turn: the first `kept_len` tokens of its parent, then `added`, then its output.

    `output` is None while the turn runs, and `so_far` then has the output read so far.
    """

    rid: str
    name: str
    parent: "_Node | None"
    kept_len: int
    added: Int32Array
    output: Int32Array | None = None
    so_far: Int32Array = field(default_factory=lambda: NO_TOKENS)
    children: "dict[str, _Node]" = field(default_factory=dict)  # by name

    @property
    def prompt_len(self) -> int:
        return self.kept_len + len(self.added)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.output is None else len(self.output)

    @property
    def num_kept(self) -> int:
        """Tokens kept by this node itself."""
        return len(self.added) + self.num_output_tokens

    @property
    def known_output(self) -> Int32Array:
        """The output, or the part read so far."""
        return self.so_far if self.output is None else self.output

    def tokens(self, length: int) -> Int32Array:
        """The first `length` tokens of the turn, history and output included."""
        parts: list[Int32Array] = []
        node: _Node | None = self
        while length and node is not None:
            if length > node.prompt_len:
                parts.append(node.known_output[: length - node.prompt_len])
            if length > node.kept_len:
                parts.append(node.added[: length - node.kept_len])
            length, node = min(length, node.kept_len), node.parent
        return np.concatenate(parts[::-1]) if parts else NO_TOKENS


class SavedNode(NamedTuple):
    """A finished turn as plain values; `parent` is its parent's index in the list, or -1."""

    rid: str
    name: str
    parent: int
    kept_len: int
    added: Int32Array
    output: Int32Array


class RegularSession:
    """A tree of turns; each has a name from the client, by which later turns can continue it."""

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self.namespace = opened.namespace
        self.holder = holder_of(opened.tenant)  # the tenant in whose share it counts
        self.num_running = 0  # turns of the tree in flight
        self._nodes: dict[str, _Node] = {}
        self._in_flight: dict[str, _Node] = {}  # by request id
        self.num_kept = 0  # tokens that it keeps on the host, over all nodes
        self._longest: int | None = 0  # `num_tokens`; None: to be counted again

    def outline(self, most: int) -> list[TurnOutline]:
        """The last finished turns, at most so many, oldest first."""
        from_last = (n for n in reversed(self._nodes.values()) if n.output is not None)
        finished = list(islice(from_last, most))[::-1]
        index_of = {id(node): index for index, node in enumerate(finished)}
        return [
            TurnOutline(node.name, node.num_tokens, index_of.get(id(node.parent), -1))
            for node in finished
        ]

    def save(self) -> list[SavedNode]:
        """The finished turns, parents before the turns that continue them."""
        finished = [node for node in self._nodes.values() if node.output is not None]
        index_of = {id(node): index for index, node in enumerate(finished)}
        return [
            SavedNode(
                node.rid,
                node.name,
                index_of.get(id(node.parent), -1),
                node.kept_len,
                node.added,
                node.known_output,
            )
            for node in finished
        ]

    def restore(self, saved: list[SavedNode]) -> None:
        """Take the turns of a saved session; this one has none yet."""
        nodes: list[_Node] = []
        for each in saved:
            parent = None if each.parent < 0 else nodes[each.parent]
            node = _Node(each.rid, each.name, parent, each.kept_len, each.added, each.output)
            nodes.append(node)
            self._nodes[node.name] = node
            self.num_kept += node.num_kept
            if parent is not None:
                parent.children[node.name] = node
        self._longest = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest finished branch."""
        if self._longest is None:
            finished = (node for node in self._nodes.values() if node.output is not None)
            self._longest = max((node.num_tokens for node in finished), default=0)
        return self._longest

    @property
    def num_turns(self) -> int:
        """Number of finished turns."""
        return len(self._nodes) - self.num_running

    def compose(self, message: GenerateRequest) -> Int32Array:
        """The whole prompt of a turn. Changes nothing; raises `InvalidRequestError`."""
        turn, name = turn_of(message), turn_name(message)
        if turn.is_whole:
            raise InvalidRequestError(
                f"session {self.session_id!r} is a regular one: only a streaming session takes "
                "whole conversations and finds their new part",
                "session_id",
            )
        parent = None if turn.rid is None else self._finished(turn.rid, may_run=turn.replace)
        dropped = self._below(parent) if turn.replace else {}
        if name in self._nodes and name not in dropped:
            raise InvalidRequestError(f"session {self.session_id!r} has a turn {name!r}", "rid")
        self._require_room(len(message.input_ids), dropped)
        history = NO_TOKENS if parent is None else parent.tokens(_kept_len(parent, turn))
        return append_turn(history, message)

    def replaced_by(self, turn: SessionTurn) -> list[str]:
        """Request ids of the turns in flight that must end before `turn` begins: all that it drops,
        and the one that it continues."""
        parent = None if turn.rid is None else self._nodes.get(turn.rid)
        if not turn.replace or (turn.rid is not None and parent is None):
            return []
        nodes = [*self._below(parent).values(), *([] if parent is None else [parent])]
        return [node.rid for node in nodes if node.output is None]

    def note_so_far(self, rid: str, tokens: Int32Array) -> None:
        """Record the output so far of a turn in flight, since another is about to replace it."""
        node = self._in_flight[rid]
        node.so_far = tokens[node.prompt_len :].copy()

    def begin(self, message: GenerateRequest, prompt: Int32Array) -> None:
        """A turn starts, with the prompt that `compose` made; the turns it replaces have ended."""
        rid, turn = message.rid, turn_of(message)
        parent = None if turn.rid is None else self._nodes[turn.rid]
        if turn.replace:
            self._drop(parent)
        kept_len = 0 if parent is None else _kept_len(parent, turn)
        node = _Node(rid, turn_name(message), parent, kept_len, prompt[kept_len:].copy())
        self._nodes[node.name] = self._in_flight[rid] = node
        self.num_running += 1
        self.num_kept += node.num_kept
        if parent is not None:
            parent.children[node.name] = node

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """Record the end of a turn: `tokens` are all its tokens; None if it failed, which removes
        it."""
        node = self._in_flight.pop(rid)
        if tokens is None:
            self._remove(node)
        else:
            node.output = tokens[node.prompt_len :].copy()
            self.num_running -= 1
            self.num_kept += node.num_output_tokens
            if self._longest is not None:
                self._longest = max(self._longest, node.num_tokens)

    def built_on(self, message: StopRequest | AbortRequest) -> list[str]:
        """Turns in flight whose prompt has tokens that `message` removes from an ended turn."""
        node = self._amendable(message)
        if node is None:
            return []
        standing = -1  # a turn cannot continue a removed one, even if it kept none of its tokens
        if isinstance(message, StopRequest):
            standing = node.prompt_len + message.num_output_tokens
        children = node.children.values()
        return [c.rid for c in children if c.output is None and c.kept_len > standing]

    def amend(self, message: StopRequest | AbortRequest) -> None:
        """Cut an ended turn to the tokens that its client received, or remove it.

        No turn in flight may be built on it. Finished turns that continue it stay as they are: they
        keep the tokens that are cut here, and a turn that has any is not removed.
        """
        node = self._amendable(message)
        if node is None:
            return
        if isinstance(message, AbortRequest):
            self._remove(node)
            return
        assert node.output is not None
        before = sum(each.num_kept for each in (node, *node.children.values()))
        standing = node.prompt_len + message.num_output_tokens
        for child in node.children.values():
            if child.kept_len > standing:
                child.added = np.concatenate([node.tokens(child.kept_len)[standing:], child.added])
                child.kept_len = standing
        node.output = node.output[: message.num_output_tokens].copy()
        self._longest = None
        self.num_kept -= before
        self.num_kept += sum(each.num_kept for each in (node, *node.children.values()))

    def _amendable(self, message: StopRequest | AbortRequest) -> _Node | None:
        """The turn that `message` amends; None unless it has succeeded and can be amended."""
        name = message.rid if message.session is None else message.session.name or message.rid
        node = self._nodes.get(name)
        if node is None or node.rid != message.rid or node.output is None:
            return None
        if isinstance(message, StopRequest):
            return node if message.num_output_tokens < len(node.output) else None
        is_continued = any(child.output is not None for child in node.children.values())
        return None if is_continued else node

    def _finished(self, name: str, *, may_run: bool) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            raise InvalidRequestError(
                f"session {self.session_id!r} has no turn {name!r}", "session_params"
            )
        if node.output is None and not may_run:
            raise InvalidRequestError(
                f"turn {name!r} of session {self.session_id!r} has not finished", "session_params"
            )
        return node

    def _require_room(self, num_new: int, dropped: dict[str, _Node]) -> None:
        """Raise `InvalidRequestError` if the session, without `dropped`, would keep too much."""
        num_kept = self.num_kept - sum(node.num_kept for node in dropped.values())
        if len(self._nodes) - len(dropped) < MAX_TURNS and num_kept + num_new <= MAX_KEPT_TOKENS:
            return
        raise InvalidRequestError(
            f"session {self.session_id!r} has {self.num_turns} turns that keep {self.num_kept} "
            f"tokens; {MAX_TURNS} turns and {MAX_KEPT_TOKENS} tokens are the most: replace some, "
            "or open another session",
            "session_params",
        )

    def _below(self, node: _Node | None) -> dict[str, _Node]:
        """All descendants of a turn, or all turns, by name."""
        if node is None:
            return self._nodes
        below: dict[str, _Node] = {}
        stack = [node]
        while stack:
            children = stack.pop().children
            below.update(children)
            stack.extend(children.values())
        return below

    def _drop(self, parent: _Node | None) -> None:
        """Remove the descendants of a turn, or all turns; none of them runs."""
        self._longest = None
        dropped = dict(self._below(parent))
        for name, node in dropped.items():
            del self._nodes[name]
            self.num_kept -= node.num_kept
        if parent is not None:
            parent.children.clear()

    def _remove(self, node: _Node) -> None:
        """Remove a turn that no other continues."""
        self._longest = None
        del self._nodes[node.name]
        self.num_running -= node.output is None
        self.num_kept -= node.num_kept
        if node.parent is not None:
            node.parent.children.pop(node.name, None)


def _kept_len(parent: _Node, turn: SessionTurn) -> int:
    """Number of tokens of `parent` that a turn continues; see `SessionTurn.offset`."""
    length = parent.prompt_len
    if not turn.drop_previous_output:
        length += len(parent.known_output)
    return len(range(length)[: turn.offset or None])
