"""The walk in slices under constant load: every defect is found by the next walk, and nothing
else."""

import random
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import FREE, TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree import cache_walk
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.long import long

GROUPS = (*FULL_ATTENTION, CacheGroup(9, 0), CacheGroup(LAST_VALUE, 1, is_recurrent=True))
NUM_LIVE = 7
STEMS = [[stem * 10 + i % (5 + stem) for i in range(24)] for stem in range(3)]


class Load:
    """An engine of two ranks that is never idle: a request ends and another comes."""

    def __init__(self, seed: int) -> None:
        sizes = make_sizes(
            dp_size=2,
            num_pages=800,
            num_rows=9,
            max_context_len=1024,
            groups=GROUPS,
            states=(600, 2, 1),
            host_ratio=1.0,
        )
        self.driver = Driver(sizes, SchedulerArgs(hicache_fetch_policy="always"))
        self.driver.oracle.host.end_rate = 0.5
        self.rng = random.Random(seed)
        self.num_sent = 0
        for rank in range(2):  # these run throughout
            self.driver.submit(generate(f"long{rank}", [rank], 1000, dp_rank=rank))

    def step(self) -> None:
        driver, rng = self.driver, self.rng
        while len(driver.scheduler._requests) < NUM_LIVE:
            stem = rng.choice(STEMS)[: rng.randint(1, 24)]
            prompt = stem + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
            driver.submit(generate(f"r{self.num_sent}", prompt, rng.randint(4, 20)))
            self.num_sent += 1
        driver.step()

    def walk(self) -> Iterator[None]:
        """One walk, a few nodes at a time, and a step after each slice."""
        slices = self.driver.scheduler.audit_slices()
        while True:
            with patch.object(cache_walk, "_NODES", 8):
                if next(slices, "end") == "end":
                    return
            self.step()
            yield


def exhaust(*walks: Iterator[None]) -> None:
    for walk in walks:
        for _ in walk:
            pass


def resting_leaf(memory: RankMemory) -> TreeNode:
    """A leaf that nothing has locked."""
    nodes = memory.cache.nodes()
    return next(node for node in nodes if not node.children and not node.locks[0])


def change_an_owner(allocator: PageAllocator, before: int, after: int) -> None:
    """Change the owner of the page that will be used last."""
    page = allocator._free_stack[0] if before == FREE else (allocator.owners() == TREE).argmax()
    assert allocator._owner[page] == before
    allocator._owner[page] = after


def own_a_page_of_the_tree(rank: RankScheduler) -> None:
    change_an_owner(rank.memory.allocator, TREE, 1)


def own_a_free_page(rank: RankScheduler) -> None:
    change_an_owner(rank.memory.allocator, FREE, TREE)


def own_a_state(rank: RankScheduler) -> None:
    change_an_owner(rank.memory.allocators[1], FREE, 2)


def own_a_state_of_the_tree(rank: RankScheduler) -> None:
    change_an_owner(rank.memory.allocators[1], TREE, FREE)


def own_a_block(rank: RankScheduler) -> None:
    assert rank.host.tier is not None
    change_an_owner(rank.host.tier.blocks.allocators[0], TREE, 7)


def lose_a_free_block(rank: RankScheduler) -> None:
    assert rank.host.tier is not None
    allocator = rank.host.tier.blocks.allocators[0]
    allocator._free_stack[0] = allocator._free_stack[1]


def lock_a_leaf(rank: RankScheduler) -> None:
    resting_leaf(rank.memory).locks[0] += 1


def lock_a_window(rank: RankScheduler) -> None:
    resting_leaf(rank.memory).locks[1][-1] += 1


def have_a_page_of_another_node(rank: RankScheduler) -> None:
    leaf = resting_leaf(rank.memory)
    leaf.values[0] = leaf.values[0].copy()
    leaf.values[0][0] = next(
        node.values[0][0] for node in rank.memory.cache.nodes() if node is not leaf
    )


def have_a_page_twice(rank: RankScheduler) -> None:
    """A leaf has a page twice, and another no more."""
    leaf = next(
        node
        for node in rank.memory.cache.nodes()
        if not node.children and not node.locks[0] and len(node.values[0]) > 1
    )
    leaf.values[0] = leaf.values[0].copy()
    leaf.values[0][0] = leaf.values[0][1]


def lose_pages(rank: RankScheduler) -> None:
    """A leaf and its pages are not found in the tree any more, but are counted."""
    leaf = resting_leaf(rank.memory)
    assert leaf.parent is not None
    del leaf.parent.children[leaf.child_key]
    rank.memory.cache.tree.policy.discard(leaf)


def list_a_page_too_many(rank: RankScheduler) -> None:
    memory = rank.memory
    row = next(iter(memory.leases))
    memory.rows.pages[row, 0, -1] = 3


def list_a_page_in_a_free_row(rank: RankScheduler) -> None:
    memory = rank.memory
    memory.rows.pages[memory.row_pool._free[0], 0, 0] = 3


def hold_a_row_for_no_session(rank: RankScheduler) -> None:
    memory = rank.memory
    memory.sessions._idle["nobody"] = KVLease(memory.dp_rank, memory.row_pool._free[0], memory.rows)


def count_a_lock_of_a_lease(rank: RankScheduler) -> None:
    rank.memory.locked[0]._running[5] += 1


CORRUPTIONS: list[Callable[[RankScheduler], None]] = [
    own_a_page_of_the_tree,
    own_a_free_page,
    own_a_state,
    own_a_state_of_the_tree,
    own_a_block,
    lose_a_free_block,
    lock_a_leaf,
    lock_a_window,
    have_a_page_of_another_node,
    have_a_page_twice,
    lose_pages,
    list_a_page_too_many,
    list_a_page_in_a_free_row,
    hold_a_row_for_no_session,
    count_a_lock_of_a_lease,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@pytest.mark.parametrize("seed", [0, *long(1)])
def test_a_defect_under_load_is_found_by_the_next_walk(
    corrupt: Callable[[RankScheduler], None], seed: int
) -> None:
    load = Load(seed)
    for _ in range(25):
        load.step()
    walk = load.walk()
    for _ in range(load.rng.randrange(20)):
        next(walk)
    corrupt(load.driver.scheduler.ranks[seed % 2])
    with pytest.raises(LedgerError, match=f"rank {seed % 2}") as caught:
        exhaust(walk, load.walk())
    assert str(caught.value).count("host memory of rank") <= 1
    assert not load.driver.scheduler.is_idle


def test_records_of_blocks_that_the_walk_cannot_read_are_a_defect() -> None:
    load = Load(0)
    for _ in range(25):
        load.step()
    tier = load.driver.scheduler.ranks[1].host.tier
    assert tier is not None
    tier.blocks.copies[10**6] = None
    slices = load.driver.scheduler.audit_slices()
    with pytest.raises(LedgerError, match="host memory of rank 1: the walk itself failed: Attri"):
        exhaust(slices)


@pytest.mark.parametrize("seed", [1, *long(0, 2)])
def test_a_walk_under_load_finds_nothing_in_sound_records(seed: int) -> None:
    load = Load(seed)
    num_slices = 0
    for _ in range(4):
        for _ in load.walk():
            assert not load.driver.scheduler.is_idle
            num_slices += 1
    assert num_slices > 60
    load.driver.scheduler.audit()


def test_a_walk_visits_every_node_of_a_tree_at_rest() -> None:
    load = Load(0)
    for _ in range(60):
        load.step()
    for rank in load.driver.scheduler.ranks:
        cache = rank.memory.cache
        walk = cache_walk.CacheWalk(cache)
        locks = [(lease.node, lease.first_pages) for lease in rank.memory.leases.values()]
        while walk.has_nodes:
            walk.check_some([(node, pages) for node, pages in locks if node is not None])
        assert {node.node_id for node in walk._visited} == {n.node_id for n in cache.nodes()}
