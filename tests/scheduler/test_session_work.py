"""The host's work for a turn: what it costs depends on the turn, not on the turns before it."""

import numpy as np
import pytest

from sgl_jax.core.messages import SessionTurn
from sgl_jax.mem_cache import radix_tree
from sgl_jax.mem_cache.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_component import PathStep
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from tests.scheduler.conversations import Conversations
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.test_sessions import talk


class Work:
    """Counts steps from a node to its parent, or to its children, and tokens compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_visits = 0
        self.num_compared = 0
        for name in ("parent", "children"):
            monkeypatch.setattr(TreeNode, name, self._counting(name))
        compare = radix_tree._common_prefix_len

        def counting_compare(a: object, b: object) -> int:
            length: int = compare(a, b)  # type: ignore[arg-type]
            self.num_compared += length
            return length

        monkeypatch.setattr(radix_tree, "_common_prefix_len", counting_compare)

    def _counting(self, name: str) -> property:
        slot = TreeNode.__dict__[name]

        def read(node: TreeNode) -> object:
            self.num_visits += 1
            return slot.__get__(node)

        return property(read, slot.__set__)

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
    scheduler.submit(generate(rid, [3, 1, 4, 1, 5], 3, session=SessionTurn(id="s")))
    while not scheduler.is_idle:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, driver.executor.result(driver.executor.launch(plan)))


def test_a_late_turn_visits_no_more_nodes_and_compares_no_more_tokens_than_an_early_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = long_talk()
    work = Work(monkeypatch)
    costs = []
    for number in range(100):
        take_turn(s, f"s.{number}")
        costs.append(work.take())
    assert costs[-1] == costs[2]
    assert s.driver.scheduler.num_running == 0
    s.driver.scheduler.audit()


def test_a_prompt_in_chunks_visits_as_many_nodes_for_the_last_chunk_as_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = long_talk()
    work = Work(monkeypatch)
    scheduler, executor = s.driver.scheduler, s.driver.executor
    scheduler.submit(generate("long", [7] * 400, 1))
    costs = []
    while not scheduler.is_idle:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, executor.result(executor.launch(plan)))
        costs.append(work.take())
    assert len(costs) == 50
    assert costs[40] == costs[2]


@pytest.mark.parametrize(
    ("dp_size", "method", "is_looked_up"),
    [
        (1, "prefix_aware", False),
        (2, "round_robin", False),
        (2, "prefix_aware", True),
    ],
)
def test_a_prompt_is_looked_up_to_choose_a_rank_only_if_that_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, dp_size: int, method: str, is_looked_up: bool
) -> None:
    s = talk(dp_size=dp_size, load_balance_method=method, schedule_policy="fcfs")
    looked_up = []
    cached_len = RankScheduler.cached_len
    monkeypatch.setattr(
        RankScheduler,
        "cached_len",
        lambda rank, request: looked_up.append(request.rid) or cached_len(rank, request),
    )
    s.driver.submit(generate("plain", [1, 2, 3], 2))
    s.run()
    assert ("plain" in looked_up) == is_looked_up
    s.say("s", [1] * 9)
    looked_up.clear()
    s.say("s", [2])
    assert not looked_up


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_turn_that_finds_its_slot_is_looked_up_in_the_tree_only_below_what_that_has_locked(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    s = talk(schedule_policy=policy)
    s.open("t")
    for session_id in ("s", "t"):
        s.say(session_id, [ord(session_id) - 80] * 9)

    walk, num_walks = RadixTree._walk, 0

    def walk_below(
        tree: RadixTree, tokens: np.ndarray, below: TreeNode | None = None
    ) -> list[PathStep]:
        nonlocal num_walks
        num_walks += 1
        assert below is not None, "the tree was walked from its root"
        return walk(tree, tokens, below)

    monkeypatch.setattr(RadixTree, "_walk", walk_below)
    turns = [s.begin(session_id, [2]) for session_id in ("s", "t")]
    s.run()
    assert all(s.driver.finish[rid].type == "length" for rid in turns)
    assert num_walks > 0
