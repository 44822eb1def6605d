"""Every way the records can be wrong is found, and the message says where."""

from collections.abc import Callable

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import CacheGroup, EngineSizes
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.pages.pool_records import TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree_node import TreeNode

SIZES = EngineSizes(
    dp_size=8,
    page_size=4,
    pool_pages=(32,),
    num_rows=6,
    max_context_len=64,
    max_step_tokens=64,
    max_prompt_logprob_tokens=64,
    vocab_size=100,
)


def busy_memory() -> RankMemory:
    """Rank 7: row 1 has published 2 of its 4 pages, row 2 holds 2 of its own, 3 lie in the tree."""
    memory = RankMemory(7, SIZES)
    first, second, third = (
        memory.open_lease(np.full(20, token, np.int32)) for token in (11, 12, 13)
    )
    rows = np.array([first.row, second.row, third.row], np.int32)
    assert memory.grow_rows(rows, np.array([15, 8, 12], np.int32))  # type: ignore[arg-type]
    memory.commit_rows(rows, np.array([10, 8, 12], np.int32))  # type: ignore[arg-type]
    publish_prefix(memory, first, np.full(20, 11, np.int32))
    release_kv_cache(memory, third, np.full(20, 13, np.int32), insert=True)
    assert (first.row, second.row) == (1, 2)
    check_balance(memory)
    audit(memory)
    return memory


def tree_nodes(memory: RankMemory) -> list[TreeNode]:
    assert isinstance(memory.cache, RadixCache)
    return list(memory.cache.tree.nodes())


def locked_node(memory: RankMemory) -> TreeNode:
    node = memory.leases[1].node
    assert node is not None
    return node


def leak_a_page(memory: RankMemory) -> None:
    memory.allocator.alloc(1, owner=2)


def free_a_page_in_use(memory: RankMemory) -> None:
    memory.allocator.free(memory.rows.pages[2, 0, :1].copy(), owner=2)


def list_a_page_of_another_row(memory: RankMemory) -> None:
    memory.rows.pages[2, 0, 0] = memory.rows.pages[1, 0, 3]


def list_a_tree_page_as_own(memory: RankMemory) -> None:
    memory.rows.pages[2, 0, 0] = memory.rows.pages[1, 0, 0]


def read_a_prefix_page_of_its_own(memory: RankMemory) -> None:
    memory.rows.pages[1, 0, 0] = memory.rows.pages[1, 0, 3]


def leak_a_lock(memory: RankMemory) -> None:
    memory.cache.match_prefix(np.full(12, 13, np.int32))


def drop_a_lock(memory: RankMemory) -> None:
    memory.cache.unlock(locked_node(memory))


def forget_the_locked_node(memory: RankMemory) -> None:
    memory.cache.unlock(locked_node(memory))
    memory.leases[1].node = None


def lock_another_node_than_the_lease_says(memory: RankMemory) -> None:
    memory.leases[1].node = next(n for n in tree_nodes(memory) if n is not locked_node(memory))


def read_the_prefix_in_another_order(memory: RankMemory) -> None:
    memory.rows.pages[1, 0, :2] = memory.rows.pages[1, 0, 1::-1].copy()


def read_anothers_prefix(memory: RankMemory) -> None:
    other = next(node for node in tree_nodes(memory) if node is not locked_node(memory))
    memory.rows.pages[1, 0, 0] = other.values[0][0]


def list_a_page_beyond_the_allocated(memory: RankMemory) -> None:
    memory.rows.pages[2, 0, 5] = 20


def leave_a_free_row_unclean(memory: RankMemory) -> None:
    memory.rows.pages[5, 0, 0] = 20


def protect_half_a_page(memory: RankMemory) -> None:
    memory.rows.cache_protected_len[1] -= 1


def list_a_released_lease(memory: RankMemory) -> None:
    memory.leases[2].released = True


def lose_a_row(memory: RankMemory) -> None:
    memory.row_pool.alloc()


def lose_a_lease(memory: RankMemory) -> None:
    del memory.leases[2]


def free_a_row_twice(memory: RankMemory) -> None:
    memory.row_pool._free[-1] = memory.row_pool._free[0]


def commit_past_the_allocated(memory: RankMemory) -> None:
    memory.rows.kv_committed_len[2] = 9


def protect_past_the_committed(memory: RankMemory) -> None:
    memory.rows.cache_protected_len[1] = 12


def protect_less_than_is_locked(memory: RankMemory) -> None:
    memory.rows.cache_protected_len[1] = 4


def shrink_the_allocated(memory: RankMemory) -> None:
    memory.rows.kv_allocated_len[1] = 12


def count_a_page_too_many(memory: RankMemory) -> None:
    memory.cache._full.num_evictable += 1


def call_locked_pages_evictable(memory: RankMemory) -> None:
    memory.cache._full.num_evictable += 2
    memory.cache._full.num_protected -= 2


def forget_a_leaf_that_may_go(memory: RankMemory) -> None:
    leaf = next(node for node in tree_nodes(memory) if node is not locked_node(memory))
    memory.cache.tree.policy.discard(leaf)


def offer_a_locked_leaf(memory: RankMemory) -> None:
    memory.cache.tree.policy.add(locked_node(memory))


def offer_the_root(memory: RankMemory) -> None:
    assert isinstance(memory.cache, RadixCache)
    memory.cache.tree.policy.add(memory.cache.tree.root)


def keep_a_page_of_the_tree_in_the_row(memory: RankMemory) -> None:
    memory.allocator._owner[locked_node(memory).values[0][0]] = 1


def forget_that_a_page_is_free(memory: RankMemory) -> None:
    memory.allocator._free_stack[0] = memory.allocator._free_stack[1]


def lose_a_tree_page(memory: RankMemory) -> None:
    node = next(node for node in tree_nodes(memory) if node is not locked_node(memory))
    node.values[0] = node.values[0][:-1]


def lose_a_page_of_a_locked_path(memory: RankMemory) -> None:
    node = locked_node(memory)
    node.values[0] = node.values[0][:-1]


def misplace_a_node(memory: RankMemory) -> None:
    node = next(node for node in tree_nodes(memory) if node is not locked_node(memory))
    node.end += 4


CORRUPTIONS: list[tuple[Callable[[RankMemory], None], str]] = [
    (leak_a_page, "rows hold 4 pages, 5 are leased"),
    (free_a_page_in_use, "rows hold 4 pages, 3 are leased"),
    (list_a_page_of_another_row, r"two owners: page \d+: row 1"),
    (list_a_tree_page_as_own, r"two owners: page \d+: tree \(before: row 1\)"),
    (
        read_a_prefix_page_of_its_own,
        r"row 1, .* reads prefix pages that its locked path does not have: page \d+: row 1",
    ),
    (leak_a_lock, r"1 rows have locked 8 tokens, the tree gave 2 locks on 20 tokens"),
    (leak_a_lock, r"TreeNode.* has 1 locks, live leases account for 0"),
    (drop_a_lock, r"the tree gave 0 locks on 0 tokens"),
    (drop_a_lock, r"TreeNode.* has 0 locks, live leases account for 1"),
    (forget_the_locked_node, r"row 1, protected 8, .* has locked 0 tokens"),
    (lock_another_node_than_the_lease_says, r"TreeNode.* locks, live leases account"),
    (lock_another_node_than_the_lease_says, r"row 1, protected 8, .* has locked 12 tokens"),
    (read_the_prefix_in_another_order, r"row 1, .* reads prefix pages that its locked path"),
    (read_anothers_prefix, r"row 1, .* reads prefix pages .*: page \d+: tree \(before: row 3\)"),
    (list_a_page_beyond_the_allocated, "row 2 lists pages beyond its allocated length: page 20"),
    (leave_a_free_row_unclean, "row 5 is free, but not clean: page 20: free"),
    (protect_half_a_page, "row 1 protects 7 tokens: no whole pages"),
    (list_a_released_lease, "released.* is still listed for row 2"),
    (lose_a_row, "3 rows are held by 2 leases, 2 are free, of 5"),
    (lose_a_lease, "2 rows are held by 1 leases"),
    (free_a_row_twice, "not free or held once each"),
    (commit_past_the_allocated, r"out of order: .*row 2, .*committed 9, allocated 8"),
    (protect_past_the_committed, r"out of order: .*row 1, protected 12, committed 10"),
    (protect_less_than_is_locked, "rows hold 5 pages, 4 are leased"),
    (shrink_the_allocated, "rows hold 3 pages, 4 are leased"),
    (count_a_page_too_many, "the tree counts 6 pages, it owns 5"),
    (call_locked_pages_evictable, r"tree counts .*\(5, 0\), a walk finds \(3, 2\)"),
    (forget_a_leaf_that_may_go, "membership of the eviction set is wrong"),
    (offer_a_locked_leaf, "membership of the eviction set is wrong"),
    (offer_the_root, "eviction set holds nodes that are not in the tree"),
    (keep_a_page_of_the_tree_in_the_row, r"no holder claims: page \d+: row 1"),
    (forget_that_a_page_is_free, r"free list is wrong: page \d+: free"),
    (lose_a_tree_page, r"TreeNode.* has 2 pages for 12 tokens"),
    (lose_a_page_of_a_locked_path, r"row 1, .*: the path it has locked holds 1 pages"),
    (misplace_a_node, r"TreeNode.* does not continue its parent"),
]


@pytest.mark.parametrize(
    ("corrupt", "words"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS]
)
def test_a_corruption_is_found_and_named(corrupt: Callable[[RankMemory], None], words: str) -> None:
    memory = busy_memory()
    corrupt(memory)
    with pytest.raises(LedgerError, match=f"(?s)^rank 7: .*{words}"):
        audit(memory)


@pytest.mark.parametrize(
    "corrupt", [leak_a_page, leak_a_lock, drop_a_lock, lose_a_row, commit_past_the_allocated]
)
def test_counts_that_are_off_are_found_without_a_walk(
    corrupt: Callable[[RankMemory], None],
) -> None:
    memory = busy_memory()
    corrupt(memory)
    with pytest.raises(LedgerError, match=r"^rank 7: "):
        check_balance(memory)


def test_when_counts_disagree_the_error_names_pages_owners_and_their_last_transitions() -> None:
    memory = busy_memory()
    published = int(memory.rows.pages[1, 0, 0])
    memory.allocator.free(memory.rows.pages[1, 0, 2:3].copy(), owner=1)
    leaked = int(memory.allocator.alloc(1, owner=2)[0])
    memory.allocator.alloc(1, owner=2)
    with pytest.raises(LedgerError) as caught:
        check_balance(memory)
    text = str(caught.value)
    assert text.startswith("rank 7: rows hold 4 pages, 5 are leased; ")
    assert f"page {leaked}: row 2 (before: row 1)" in text
    history = [
        f"row 1 took page {leaked}",
        f"row 1 freed page {leaked}",
        f"row 2 took page {leaked}",
    ]
    places = [text.index(words) for words in history]
    assert places == sorted(places)
    assert leaked in caught.value.pages
    assert published not in caught.value.pages


def test_a_walk_that_breaks_on_broken_records_is_part_of_the_message() -> None:
    memory = busy_memory()
    leak_a_page(memory)
    memory.cache.nodes()[0].values[0] = None
    with pytest.raises(LedgerError, match=r"rows hold 4 pages.*the walk itself failed: TypeError"):
        check_balance(memory)


def test_an_audit_whose_walk_breaks_is_a_ledger_error() -> None:
    memory = busy_memory()
    memory.cache.nodes()[0].values[0] = None
    check_balance(memory)
    with pytest.raises(LedgerError, match="the walk itself failed: TypeError"):
        audit(memory)


def test_a_lease_that_is_none_is_a_ledger_error() -> None:
    memory = busy_memory()
    memory.leases[3] = None
    with pytest.raises(LedgerError, match=r"3 leases.*the walk itself failed: AttributeError"):
        check_balance(memory)


def test_only_the_pages_with_a_defect_are_named_and_those_of_all_pools() -> None:
    groups = (CacheGroup(None, 0), CacheGroup(9, 1))
    memory = RankMemory(0, SIZES._replace(groups=groups, pool_pages=(32, 32)))
    tokens = np.arange(20, dtype=np.int32)
    lease = memory.open_lease(tokens)
    assert memory.grow_row(lease.row, 20)
    memory.commit_rows(np.array([lease.row]), np.array([20], np.int32))
    release_kv_cache(memory, lease, tokens, insert=True)
    audit(memory)
    wrong = [
        int(np.flatnonzero(each.owners() == TREE)[k]) for k, each in enumerate(memory.allocators)
    ]
    for allocator, page in zip(memory.allocators, wrong, strict=True):
        allocator._owner[page] = 4
    with pytest.raises(LedgerError) as raised:
        audit(memory)
    assert sorted(raised.value.pages) == sorted(wrong)
    assert wrong[0] != wrong[1]


@pytest.mark.parametrize("page", [10_000, 32, -1, -5])
def test_an_audit_finds_a_row_that_lists_a_page_that_does_not_exist(page: int) -> None:
    memory = busy_memory()
    memory.rows.pages[2, 0, 0] = page
    with pytest.raises(LedgerError, match=rf"row 2 claims no such pages: \[{page}\]"):
        audit(memory)


def test_a_rebuilt_rank_is_empty_and_sound_after_any_defect() -> None:
    for corrupt, _ in CORRUPTIONS:
        memory = busy_memory()
        memory.cache.evict(1)
        epochs = memory.rows.epoch.copy()
        corrupt(memory)
        leases = list(memory.leases.values())
        memory.rebuild()
        audit(memory)
        view = memory.view()
        assert view.free_pages == view.total_pages - 1
        assert view.free_rows == view.total_rows
        assert all(lease.released for lease in leases)
        assert (memory.rows.epoch > epochs).all()
        assert memory.cache.num_evicted == 1
        lease = memory.open_lease(np.full(12, 13, np.int32))
        assert lease.kv_committed_len == 0
