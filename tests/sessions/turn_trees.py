"""Regular sessions of a driver, with a model of the tree that each must be.

The model keeps the whole prompt of every turn, and looks at all of them for every question.
"""

import random
from dataclasses import dataclass

from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    OpenSession,
    SessionTurn,
    StopRequest,
)
from tests.scheduler.driver import Driver, generate

NAMES = "abcdefgh"  # few, so that they come again


@dataclass
class TreeTurn:
    """A turn: its request, the turn it continues, and by how many tokens of that."""

    rid: str
    parent: str | None
    num_kept: int
    prompt: list[int]
    output: list[int] | None = None  # None while it runs

    @property
    def tokens(self) -> list[int]:
        return self.prompt + (self.output or [])


Tree = dict[str, TreeTurn]  # by name


class TurnTrees:
    """Trees by session. What was dropped while it ran is in none, and was aborted."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.of: dict[str, Tree] = {}
        self.closing: dict[str, Tree] = {}
        self._num_turns = 0

    def open(self, session_id: str, **kwargs: object) -> None:
        message = OpenSession(rid="", session_id=session_id, **kwargs)  # type: ignore[arg-type]
        reply = self.driver.session(message)
        assert reply.ok, reply.message
        self.of[session_id] = {}

    def draw(self, rng: random.Random, session_id: str) -> SessionTurn:
        """A turn that may be refused for its name, and for nothing else."""
        tree = self.of[session_id]
        finished = [n for n, turn in tree.items() if turn.output is not None]
        running = [n for n, turn in tree.items() if turn.output is None]
        parent = rng.choice([None, *finished, *finished, *running])
        return SessionTurn(
            id=session_id,
            rid=parent,
            name=rng.choice(NAMES),
            offset=0 if parent is None else rng.choice([0, 0, 0, 2, 9, -1, -6]),
            replace=parent in running or rng.random() < 0.25,
            drop_previous_output=parent is not None and rng.random() < 0.2,
        )

    def history(self, turn: SessionTurn) -> list[int]:
        if turn.rid is None:
            return []
        parent = self.of[turn.id][turn.rid]
        tokens = parent.prompt
        if not turn.drop_previous_output:
            output = self._output_so_far(parent) if parent.output is None else parent.output
            tokens = tokens + output
        return tokens[: turn.offset] if turn.offset else tokens

    def dropped(self, turn: SessionTurn) -> set[str]:
        """Names of the turns that this one would replace."""
        tree = self.of[turn.id]
        if not turn.replace:
            return set()
        if turn.rid is None:
            return set(tree)
        below: set[str] = set()
        while True:
            more = {n for n, each in tree.items() if each.parent in (turn.rid, *below)} - below
            if not more:
                return below
            below |= more

    def is_refused(self, turn: SessionTurn) -> bool:
        name = turn.name or ""
        return name in self.of[turn.id] and name not in self.dropped(turn)

    def begin(
        self, turn: SessionTurn, new: list[int], max_new_tokens: int, **kwargs: object
    ) -> str:
        """A turn starts, unless it is refused. Answers its request id."""
        rid = f"{turn.id}.{self._num_turns}"
        self._num_turns += 1
        history, dropped = self.history(turn), self.dropped(turn)
        self.driver.submit(generate(rid, new, max_new_tokens, session=turn, **kwargs), history)
        if rid not in self.driver.finish:
            tree = self.of[turn.id]
            for name in dropped:
                ended = tree.pop(name)
                if ended.output is None:
                    assert self.driver.finish[ended.rid].type == "abort"
            parent = None if turn.rid is None else tree[turn.rid]
            if turn.replace and parent is not None and parent.output is None:
                assert self.driver.finish[parent.rid].type == "abort"
                parent.output = self._output_so_far(parent)
            tree[turn.name or rid] = TreeTurn(rid, turn.rid, len(history), history + new)
        return rid

    def _output_so_far(self, turn: TreeTurn) -> list[int]:
        return list(self.driver.tokens.get(turn.rid, []))

    def stop_late(self, session_id: str, name: str, num_tokens: int) -> list[str]:
        """The frontend finds a stop string in a turn that has ended. Answers the requests in flight
        that were built on what is cut."""
        tree = self.of[session_id]
        turn = tree[name]
        assert turn.output is not None
        about = SessionTurn(id=session_id, name=name)
        stop = StopRequest(rid=turn.rid, num_output_tokens=num_tokens, session=about)
        self.driver.scheduler.handle(stop)
        self.driver.collect()
        is_cut = num_tokens < len(turn.output)
        turn.output = turn.output[:num_tokens]
        return self._forget_refused(tree, name, len(turn.tokens) if is_cut else 10**9)

    def abort_late(self, session_id: str, name: str) -> list[str]:
        """The client of a turn that has ended did not see that. Answers as `stop_late`."""
        tree = self.of[session_id]
        about = SessionTurn(id=session_id, name=name)
        self.driver.scheduler.handle(AbortRequest(rid=tree[name].rid, session=about))
        self.driver.collect()
        if any(each.parent == name and each.output is not None for each in tree.values()):
            return []  # too late
        refused = self._forget_refused(tree, name, -1)
        del tree[name]
        return refused

    def _forget_refused(self, tree: Tree, parent: str, standing: int) -> list[str]:
        refused = []
        for name, turn in list(tree.items()):
            if turn.parent == parent and turn.output is None and turn.num_kept > standing:
                assert self.driver.finish[turn.rid].status_code == 400
                refused.append(turn.rid)
                del tree[name]
        return refused

    def close(self, session_id: str) -> None:
        reply = self.driver.session(CloseSession(rid="", session_id=session_id))
        assert reply.ok, reply.message
        self.closing[session_id] = self.of.pop(session_id)

    def settle(self, stopped: dict[str, int]) -> None:
        """Learn from the turns that ended; `stopped` by the frontend, after so many tokens."""
        driver = self.driver
        for tree in (*self.of.values(), *self.closing.values()):
            for name, turn in list(tree.items()):
                if turn.output is not None:
                    continue
                if turn.rid in stopped:
                    turn.output = driver.tokens[turn.rid][: stopped[turn.rid]]
                elif turn.rid in driver.finish:
                    assert driver.prompt_tokens[turn.rid] == len(turn.prompt), turn.rid
                    if driver.finish[turn.rid].type == "abort":
                        del tree[name]
                    else:
                        turn.output = driver.tokens[turn.rid]
        running = {k: t for k, t in self.closing.items() if self._num_running(t)}
        self.closing = running

    def check(self, listed: dict[str, dict[str, object]]) -> None:
        """The scheduler's trees are the model's."""
        assert set(listed) == set(self.of) | set(self.closing)
        for session_id, tree in (*self.of.items(), *self.closing.items()):
            entry, num_running = listed[session_id], self._num_running(tree)
            lens = [len(turn.tokens) for turn in tree.values() if turn.output is not None]
            assert entry["num_running"] == num_running, session_id
            assert entry["num_turns"] == len(tree) - num_running, session_id
            assert entry["num_tokens"] == max(lens, default=0), session_id
            assert entry["is_closing"] == (session_id in self.closing), session_id

    def _num_running(self, tree: Tree) -> int:
        return sum(turn.output is None for turn in tree.values())
