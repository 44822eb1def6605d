"""Regular sessions: trees of turns, each with a name given by its client.

A turn stores only its new tokens; the history before them is a prefix of its parent's tokens. So a
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
)
from sgl_jax.core.shares import holder_of
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.sessions.streaming import NO_TOKENS, TurnOutline, append_turn, turn_name, turn_of

# Limits of one session in host memory; a client that needs more replaces turns, or opens another
# session.
MAX_TURNS = 16_384
MAX_KEPT_TOKENS = 1 << 22  # 16 MiB


@dataclass(slots=True, eq=False)
class _Node:
    """A turn: the first `kept_len` tokens of its parent, then `added`, then its output.

    While the turn runs, `output` is None and `so_far` has the output read so far.
    """

    rid: str
    name: str
    parent: "_Node | None"
    kept_len: int
    added: Int32Array
    serial: int = 0  # order of arrival
    replaces: bool = False  # drop earlier turns that continue its parent
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
        return len(self.added) + self.num_output_tokens

    @property
    def known_output(self) -> Int32Array:
        return self.so_far if self.output is None else self.output

    def tokens(self, length: int) -> Int32Array:
        """Return the first `length` tokens of the turn, with history and output."""
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
    """A tree of turns, each with a client's name by which later turns can continue it."""

    # It is never forked or rolled back.
    forked_from: tuple[str, int] | None = None
    rollbacks: tuple[tuple[int, int], ...] = ()

    def __init__(self, opened: OpenSession) -> None:
        self.session_id = opened.session_id
        self.capacity = opened.capacity_of_str_len
        self.timeout_s = opened.timeout_s
        self.namespace = opened.namespace
        self.holder = holder_of(opened.tenant)  # the tenant charged for this session
        self._nodes: dict[str, _Node] = {}
        self._held: dict[str, _Node] = {}  # turns not yet in the tree, by request id
        self._num_held = 0  # total since the opening
        self._in_flight: dict[str, _Node] = {}  # by request id
        self.num_kept = 0  # tokens of all nodes, in host memory
        self._longest: int | None = 0  # cached `num_tokens`; None: invalid

    def outline(self, most: int) -> list[TurnOutline]:
        from_last = (n for n in reversed(self._nodes.values()) if n.output is not None)
        finished = list(islice(from_last, most))[::-1]
        index_of = {id(node): index for index, node in enumerate(finished)}
        return [
            TurnOutline(node.name, node.num_tokens, index_of.get(id(node.parent)))
            for node in finished
        ]

    def save(self) -> list[SavedNode]:
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
        nodes: list[_Node] = []
        for each in saved:
            parent = None if each.parent < 0 else nodes[each.parent]
            node = _Node(each.rid, each.name, parent, each.kept_len, each.added, output=each.output)
            nodes.append(node)
            self._add(node)
        self._longest = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longest finished branch."""
        if self._longest is None:
            finished = (node for node in self._nodes.values() if node.output is not None)
            self._longest = max((node.num_tokens for node in finished), default=0)
        return self._longest

    @property
    def kept_tokens(self) -> list[Int32Array]:
        """Return lists of all prompt tokens in host memory, of held turns, too."""
        return [node.added for node in (*self._nodes.values(), *self._held.values())]

    @property
    def num_turns(self) -> int:
        return len(self._nodes) - len(self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._in_flight) + len(self._held)

    def compose(self, message: GenerateRequest) -> Int32Array:
        """Return the whole prompt of a turn. Changes nothing; raises `InvalidRequestError`."""
        turn, name = turn_of(message), turn_name(message)
        if turn.is_whole:
            raise InvalidRequestError(
                f"session {self.session_id!r} is a regular one: only a streaming session takes "
                "whole conversations and finds their new part",
                "session_id",
            )
        parent = None if turn.rid is None else self._finished(turn.rid, may_run=turn.replace)
        dropped = self._below(parent) if turn.replace else {}
        replaced = self._held_below(parent, dropped, self._num_held + 1) if turn.replace else []
        held = [each.name for each in self._held.values() if each not in replaced]
        self._require_place(name, len(message.input_ids), dropped, held)
        history = NO_TOKENS if parent is None else parent.tokens(_kept_len(parent, turn))
        return append_turn(history, message)

    def replaced_by(self, turn: SessionTurn) -> list[str]:
        """Return request ids of the turns in flight that must end before `turn` begins: all that it
        drops, and the turn that it continues."""
        parent = None if turn.rid is None else self._nodes.get(turn.rid)
        if not turn.replace or (turn.rid is not None and parent is None):
            return []
        return self._replaced(parent, self._num_held + 1)

    def replaced_by_held(self, rid: str) -> list[str]:
        """Return request ids of earlier turns in flight that must end before a held turn begins."""
        node = self._held[rid]
        return self._replaced(node.parent, node.serial) if node.replaces else []

    def note_so_far(self, rid: str, tokens: Int32Array) -> None:
        node = self._in_flight.get(rid)
        if node is not None:  # else it is held, without output
            node.so_far = tokens[node.prompt_len :].copy()

    def hold(self, message: GenerateRequest, prompt: Int32Array) -> None:
        """Record the arrival of a turn with the prompt from `compose`. Until it enters the tree, it
        changes no other turn, cannot be continued, and does not count towards `num_kept`."""
        turn = turn_of(message)
        parent = None if turn.rid is None else self._nodes[turn.rid]
        kept_len = 0 if parent is None else _kept_len(parent, turn)
        self._num_held += 1
        self._held[message.rid] = _Node(
            message.rid,
            turn_name(message),
            parent,
            kept_len,
            prompt[kept_len:].copy(),
            self._num_held,
            turn.replace,
        )

    def require_entry(self, rid: str) -> None:
        """Raise `InvalidRequestError` if a held turn can no longer enter the tree."""
        node, parent = self._held[rid], self._held[rid].parent
        if parent is not None:
            if self._nodes.get(parent.name) is not parent:
                raise InvalidRequestError(
                    f"session {self.session_id!r} has no turn {parent.name!r}", "session_params"
                )
            if node.kept_len > parent.prompt_len + len(parent.known_output):
                raise InvalidRequestError(
                    f"turn {parent.name!r} of session {self.session_id!r} was cut; send the turn "
                    "again",
                    "session_params",
                )
        self._require_place(node.name, len(node.added), self._dropped_by(node), [])

    def num_added(self, rid: str) -> int:
        return len(self._held[rid].added)

    def enter(self, rid: str) -> None:
        """Add a held turn to the tree. The turns in flight that it replaces have ended."""
        node = self._held.pop(rid)
        self._drop(self._dropped_by(node))
        self._in_flight[rid] = node
        self._add(node)

    def _add(self, node: _Node) -> None:
        self._nodes[node.name] = node
        self.num_kept += node.num_kept
        if node.parent is not None:
            node.parent.children[node.name] = node

    def end(self, rid: str, tokens: Int32Array | None) -> None:
        """Record the end of a turn with all its `tokens`. None means that it failed, which removes
        it. A held turn leaves nothing."""
        if self._held.pop(rid, None) is not None:
            return
        node = self._in_flight.pop(rid)
        if tokens is None:
            self._drop({node.name: node})
        else:
            node.output = tokens[node.prompt_len :].copy()
            self.num_kept += node.num_output_tokens
            if self._longest is not None:
                self._longest = max(self._longest, node.num_tokens)

    def built_on(self, message: StopRequest | AbortRequest) -> list[str]:
        """Return turns in flight with prompt tokens that `message` removes from an ended turn."""
        node = self._amendable(message)
        if node is None:
            return []
        standing = -1  # a removed turn cannot be continued, even without its tokens
        if isinstance(message, StopRequest):
            standing = node.prompt_len + message.num_output_tokens
        held = (each for each in self._held.values() if each.parent is node)
        children = [*node.children.values(), *held]
        return [c.rid for c in children if c.output is None and c.kept_len > standing]

    def amend(self, message: StopRequest | AbortRequest) -> None:
        """Cut an ended turn to the tokens that its client received, or remove it.

        No turn in flight may be built on it. Finished turns that continue it do not change: they
        keep the tokens cut here, and a turn with such children is not removed.
        """
        node = self._amendable(message)
        if node is None:
            return
        if isinstance(message, AbortRequest):
            self._drop({node.name: node})
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
        """Return the turn that `message` amends; None unless it succeeded and can be amended."""
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
        is_held = node is None and any(each.name == name for each in self._held.values())
        if node is None and not is_held:
            raise InvalidRequestError(
                f"session {self.session_id!r} has no turn {name!r}", "session_params"
            )
        if node is None or (node.output is None and not may_run):
            raise InvalidRequestError(
                f"turn {name!r} of session {self.session_id!r} has not finished", "session_params"
            )
        return node

    def _require_place(
        self, name: str, num_new: int, dropped: dict[str, _Node], held: list[str]
    ) -> None:
        """Raise `InvalidRequestError` if the session, without `dropped`, has a turn `name`, `held`
        contains `name`, or the session would keep too much."""
        if name in held or (name in self._nodes and name not in dropped):
            raise InvalidRequestError(f"session {self.session_id!r} has a turn {name!r}", "rid")
        num_kept = self.num_kept - sum(node.num_kept for node in dropped.values())
        if len(self._nodes) - len(dropped) < MAX_TURNS and num_kept + num_new <= MAX_KEPT_TOKENS:
            return
        raise InvalidRequestError(
            f"session {self.session_id!r} has {self.num_turns} turns that keep {self.num_kept} "
            f"tokens; {MAX_TURNS} turns and {MAX_KEPT_TOKENS} tokens are the most: replace some, "
            "or open another session",
            "session_params",
        )

    def _below(self, node: _Node | None, before: int | None = None) -> dict[str, _Node]:
        """Return all descendants of a turn, or all turns, by name. With `before`, only children
        with a lower serial number and their descendants."""
        if node is None:
            if before is None:
                return self._nodes
            stack = [each for each in self._nodes.values() if each.parent is None]
        else:
            stack = list(node.children.values())
        stack = [each for each in stack if before is None or each.serial < before]
        below = {each.name: each for each in stack}
        while stack:
            children = stack.pop().children
            below.update(children)
            stack.extend(children.values())
        return below

    def _dropped_by(self, node: _Node) -> dict[str, _Node]:
        return self._below(node.parent, node.serial) if node.replaces else {}

    def _replaced(self, parent: _Node | None, before: int) -> list[str]:
        """Return request ids of the turns in flight, including held turns, that end when a turn
        with serial number `before` replaces all earlier continuations of `parent`."""
        dropped = self._below(parent, before)
        held = self._held_below(parent, dropped, before)
        nodes = [*dropped.values(), *([] if parent is None else [parent]), *held]
        return [node.rid for node in nodes if node.output is None]

    def _held_below(
        self, parent: _Node | None, dropped: dict[str, _Node], before: int
    ) -> list[_Node]:
        """Return the held turns with a lower serial number that continue `parent` or `dropped`."""
        return [
            each
            for each in self._held.values()
            if each.serial < before
            and (parent in (None, each.parent) or (each.parent and each.parent.name in dropped))
        ]

    def _drop(self, dropped: dict[str, _Node]) -> None:
        if dropped:
            self._longest = None
        for name, node in dropped.items():
            del self._nodes[name]
            self.num_kept -= node.num_kept
            if node.parent is not None:
                node.parent.children.pop(name, None)


def _kept_len(parent: _Node, turn: SessionTurn) -> int:
    """Return the number of tokens of `parent` that a turn continues; see `SessionTurn.offset`."""
    length = parent.prompt_len
    if not turn.drop_previous_output:
        length += len(parent.known_output)
    return len(range(length)[: turn.offset or None])
