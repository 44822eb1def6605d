"""The host's work for a turn: what it costs depends on the turn, not on the turns before it."""

from itertools import pairwise

import numpy as np
import pytest

from sgl_jax.core.messages import SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.tree import radix_tree
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.events import PlanStep, ResultRead
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.sessions.conversations import Conversations
from tests.sessions.test_sessions import talk


class Work:
    """Counts steps from a node to its parent, or to its children, and tokens compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_visits = 0
        self.num_compared = 0
        for name in ("parent", "children"):
            monkeypatch.setattr(TreeNode, name, self._counting(name))
        compare = radix_tree.common_prefix_len  # type: ignore[attr-defined]

        def counting_compare(a: object, b: object) -> int:
            length: int = compare(a, b)  # type: ignore[arg-type]
            self.num_compared += length
            return length

        monkeypatch.setattr(radix_tree, "common_prefix_len", counting_compare)

    def _counting(self, name: str) -> property:
        member = TreeNode.__dict__[name]

        def read(node: TreeNode) -> object:
            self.num_visits += 1
            return member.__get__(node)

        return property(read, member.__set__)

    def take(self) -> tuple[int, int]:
        """What was counted since the last call."""
        taken = self.num_visits, self.num_compared
        self.num_visits = self.num_compared = 0
        return taken


def long_talk() -> Conversations:
    """One session, "s"; the proofs after each step, which walk the tree, are off."""
    sizes = make_sizes(num_pages=400, max_context_len=1024)
    s = Conversations(Driver(sizes))
    s.open("s")
    return s


def take_turn(s: Conversations, rid: str) -> None:
    """A turn, without the driver's checks: they walk the whole tree."""
    driver, scheduler = s.driver, s.driver.scheduler
    scheduler.handle(generate(rid, [3, 1, 4, 1, 5], 3, session=SessionTurn(id="s")))
    while not scheduler.is_idle:
        plan = scheduler.handle(PlanStep())
        assert plan is not None
        scheduler.handle(
            ResultRead(plan.step_id, driver.executor.result(driver.executor.launch(plan)))
        )


def test_turns_visit_twelve_more_nodes_at_most_when_twice_as_many_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Edges of a session's path double in length as they merge, as the bits of a number carry:
    twice as many turns are one more edge to pass, and one more merge, of twelve visits."""
    s = long_talk()
    work = Work(monkeypatch)
    costs = []
    for number in range(128):
        take_turn(s, f"s.{number}")
        costs.append(work.take())
    visits, compared = zip(*costs, strict=True)
    most = [max(visits[2**i : 2 ** (i + 1)]) for i in range(2, 7)]
    assert max(late - early for early, late in pairwise(most)) <= 12
    # Most turns merge little: on average, they visit no more than an early one and an edge or two.
    assert sum(visits[64:]) / 64 < sum(visits[8:16]) / 8 + 12
    assert compared[-1] == compared[2]
    assert s.driver.scheduler.num_running == 0
    s.driver.scheduler.audit()


def test_a_prompt_in_chunks_visits_as_many_nodes_for_the_last_chunk_as_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = long_talk()
    work = Work(monkeypatch)
    scheduler, executor = s.driver.scheduler, s.driver.executor
    scheduler.handle(generate("long", [7] * 400, 1))
    costs = []
    while not scheduler.is_idle:
        plan = scheduler.handle(PlanStep())
        assert plan is not None
        scheduler.handle(ResultRead(plan.step_id, executor.result(executor.launch(plan))))
        costs.append(work.take())
    assert len(costs) == 50
    assert costs[40] == costs[2]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_planning_looks_up_no_request_that_only_waits(
    monkeypatch: pytest.MonkeyPatch, policy: str, dp_size: int
) -> None:
    sizes = make_sizes(dp_size=dp_size, num_rows=3, num_pages=200)
    s = Conversations(Driver(sizes, SchedulerArgs(schedule_policy=policy)))
    scheduler, executor = s.driver.scheduler, s.driver.executor
    for i in range(500):
        scheduler.handle(generate(f"r{i}", [3, 1, 4, 1, 5] * 5 + [i % 50], 60))
    walk, tokens_walked = RadixTree.walk, []
    monkeypatch.setattr(
        RadixTree,
        "walk",
        lambda *args: tokens_walked.append(args[1]) or walk(*args),  # type: ignore[func-returns-value]
    )
    for _ in range(50):
        plan = scheduler.handle(PlanStep())
        assert plan is not None
        scheduler.handle(ResultRead(plan.step_id, executor.result(executor.launch(plan))))
    assert scheduler.num_waiting > 400
    num_started = sum(len(rank.admissions) for rank in plan.ranks)
    # Those that share the prefix move when its first request has published it, once on each rank.
    assert len(tokens_walked) < 500 * dp_size + 20 * dp_size + num_started


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_turn_that_finds_its_lease_is_looked_up_in_the_tree_only_below_what_that_has_locked(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    s = talk(schedule_policy=policy)
    s.open("t")
    for session_id in ("s", "t"):
        s.say(session_id, [ord(session_id) - 80] * 9)

    walk, num_walks = RadixTree.walk, 0

    def walk_below(
        tree: RadixTree, tokens: np.ndarray, namespace: str, below: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        nonlocal num_walks
        num_walks += 1
        assert below not in (None, tree.root), "the tree was walked from its root"
        return walk(tree, tokens, namespace, below)

    monkeypatch.setattr(RadixTree, "walk", walk_below)
    turns = [s.begin(session_id, [2]) for session_id in ("s", "t")]
    s.run()
    assert all(s.driver.finish[rid].type == "length" for rid in turns)
    assert num_walks > 0
