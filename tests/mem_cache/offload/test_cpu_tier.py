"""A rank's prefixes go to host memory and come back, and every block keeps one owner."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup, EngineSizes
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import TransferEnd, Transfers
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.offload.cpu_ledger import audit_cpu_tier
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.mem_cache.tree.window_component import lookback_pages
from tests.scheduler.driver import make_sizes
from tests.scheduler.setups import PLAIN
from tests.scheduler.test_state_machine import SchedulerMachine

PAGE_SIZE = 4


def sizes_with(num_pages: int = 17, host_ratio: float = 2.0) -> EngineSizes:
    return make_sizes(page_size=PAGE_SIZE, num_pages=num_pages, host_ratio=host_ratio)


class Rank:
    """The memory of a rank, and the tier behind it; `tokens` are of a prompt by number."""

    def __init__(self, sizes: EngineSizes | None = None, policy: str = "write_through") -> None:
        self.memory = RankMemory(0, sizes or sizes_with())
        self.tier = CpuTier(self.memory, policy, "lru", loads_all=True)

    def tokens(self, number: int, num_pages: int = 4) -> Int32Array:
        return np.arange(num_pages * PAGE_SIZE, dtype=np.int32) + 100 * number

    def publish(self, tokens: Int32Array, namespace: str = "") -> None:
        """A request computes `tokens` and ends."""
        lease = self.memory.open_lease(tokens[:-1], namespace)
        assert self.memory.grow_row(lease.row, len(tokens))
        self.memory.commit_rows([lease.row], [len(tokens)])  # type: ignore[arg-type]
        release_kv_cache(self.memory, lease, tokens, insert=True)

    def take(self) -> Transfers:
        self.check()
        taken = self.tier.take()
        self.check()
        return taken

    def end_all(self, transfers: Transfers, *, succeeded: bool = True) -> None:
        for move in (*transfers.copies, *transfers.fetches):
            self.tier.ended(TransferEnd(0, move.number, succeeded, 0.01))
            self.check()

    def evict_all(self) -> None:
        self.memory.cache.evict(self.memory.cache.num_evictable[0])
        self.check()

    def move_out(self, tokens: Int32Array) -> None:
        """Bring `tokens` to the host, and evict all from the device."""
        self.publish(tokens)
        self.end_all(self.take())
        self.evict_all()

    def check(self) -> None:
        audit(self.memory, len(self.tier.fetches))
        audit_cpu_tier(self.tier)

    def num_here(self, tokens: Int32Array, namespace: str = "") -> int:
        return self.tier.blocks.cache.peek(tokens, namespace)


def test_a_prefix_goes_out_and_comes_back() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.publish(tokens)
    out = rank.take()
    assert [len(move.pages[0]) for move in out.copies] == [4]
    assert rank.num_here(tokens) == 0, "it arrives only at the end"
    rank.end_all(out)
    rank.evict_all()
    assert rank.num_here(tokens) == len(tokens)
    fetch = rank.tier.begin_fetch(tokens, "")
    assert fetch is not None
    assert fetch.num_tokens == len(tokens)
    assert fetch.move.blocks[0].tolist() == out.copies[0].blocks[0].tolist()
    back = rank.take()
    assert back.fetches == (fetch.move,)
    assert rank.memory.cache.peek(tokens) == 0
    rank.end_all(back)
    assert rank.memory.cache.peek(tokens) == len(tokens)
    assert rank.take().placed == (fetch.move,)
    assert rank.tier.num_fetched_tokens == len(tokens)


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("length", [0, 6, 15])
def test_a_withdrawn_prefix_on_its_way_to_the_device_is_not_found_there(
    length: int, *, is_begun: bool
) -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.move_out(tokens)
    assert rank.tier.begin_fetch(tokens, "") is not None
    back = rank.take() if is_begun else None
    rank.tier.withdraw(tokens, "", length)
    rank.end_all(back or rank.take())
    assert rank.memory.cache.peek(tokens) == 0
    assert rank.num_here(tokens) == length // PAGE_SIZE * PAGE_SIZE
    assert not rank.take().placed


@pytest.mark.parametrize(("window", "pool"), [(9, 0), (9, 1), (6, 1)])
def test_of_a_window_the_pages_before_the_end_go_out_and_come_back(window: int, pool: int) -> None:
    """And one more: the same prompt again resumes a page before its end."""
    groups = (*FULL_ATTENTION, CacheGroup(window, pool))
    rank = Rank(make_sizes(page_size=PAGE_SIZE, num_pages=33, groups=groups, host_ratio=2.0))
    tokens = rank.tokens(1)
    rank.publish(tokens)
    out = rank.take()
    (copy,) = out.copies
    of_window = lookback_pages(window, PAGE_SIZE) + 1
    assert [len(pages) for pages in copy.pages] == (
        [4 + of_window] if pool == 0 else [4, of_window]
    )
    rank.end_all(out)
    assert rank.num_here(tokens) == len(tokens)
    rank.memory.cache.reset()
    fetch = rank.tier.begin_fetch(tokens, "")
    assert fetch is not None
    rank.end_all(rank.take())
    assert rank.memory.cache.peek(tokens) == len(tokens)
    assert rank.num_here(tokens[:-1]) == len(tokens) - PAGE_SIZE


def test_only_missing_pages_are_copied_and_fetched() -> None:
    rank = Rank()
    short, long = rank.tokens(1, 2), rank.tokens(1, 6)
    rank.publish(short)
    rank.end_all(rank.take())
    rank.publish(long)
    out = rank.take()
    assert [len(move.pages[0]) for move in out.copies] == [4]
    rank.end_all(out)
    rank.memory.cache.evict(3)
    fetch = rank.tier.begin_fetch(long, "")
    assert fetch is not None
    assert fetch.num_tokens == 3 * PAGE_SIZE


def test_a_copy_that_fails_leaves_nothing() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.publish(tokens)
    rank.end_all(rank.take(), succeeded=False)
    assert rank.num_here(tokens) == 0
    assert rank.tier.blocks.views()[0].free_blocks == rank.tier.blocks.views()[0].total_blocks - 1
    assert rank.tier.num_failed == 1


def test_a_fetch_that_fails_leaves_nothing_on_the_device() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.move_out(tokens)
    assert rank.tier.begin_fetch(tokens, "") is not None
    rank.end_all(rank.take(), succeeded=False)
    assert rank.memory.cache.peek(tokens) == 0
    assert rank.memory.num_available_pages == 16
    assert len(rank.take().dropped) == 1


def test_pages_of_a_fetch_are_given_back_before_it_ends() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.move_out(tokens)
    rank.tier.begin_fetch(tokens, "")
    begun = rank.take()
    assert rank.tier.drop_fetches()
    assert rank.memory.num_available_pages == 16
    rank.end_all(begun)
    after = rank.take()
    assert after.dropped == begun.fetches
    assert not after.placed
    # One that was not begun is never heard of.
    rank.tier.begin_fetch(tokens, "")
    assert rank.tier.drop_fetches()
    assert not any(rank.take())


def test_an_equal_prefix_that_was_computed_meanwhile_is_kept_once() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.move_out(tokens)
    rank.tier.begin_fetch(tokens, "")
    begun = rank.take()
    rank.publish(tokens)
    rank.end_all(begun)
    assert rank.memory.view().cached_pages == 4


def test_namespaces_do_not_meet() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.publish(tokens, "red")
    rank.end_all(rank.take())
    assert rank.num_here(tokens, "red") == len(tokens)
    assert rank.num_here(tokens, "blue") == rank.num_here(tokens) == 0
    rank.evict_all()
    assert rank.tier.begin_fetch(tokens, "blue") is None
    rank.tier.begin_fetch(tokens, "red")
    assert rank.tier.fetch_of(tokens, "blue", 0) is None
    assert rank.tier.fetch_of(tokens, "red", 0) is not None


def test_the_oldest_prefixes_give_way() -> None:
    rank = Rank(sizes_with(num_pages=17, host_ratio=0.5))  # 8 blocks
    for number in range(3):
        rank.publish(rank.tokens(number))
        rank.end_all(rank.take())
    assert [rank.num_here(rank.tokens(number)) for number in range(3)] == [0, 16, 16]


def test_a_prefix_larger_than_the_hosts_memory_stays_out() -> None:
    rank = Rank(sizes_with(num_pages=17, host_ratio=0.2))  # 3 blocks
    rank.publish(rank.tokens(1))
    assert not rank.take().copies


def test_what_is_used_again_goes_out_selectively() -> None:
    rank = Rank(policy="write_through_selective")
    rank.publish(rank.tokens(1))
    assert not rank.take().copies
    rank.publish(rank.tokens(1))
    assert len(rank.take().copies) == 1


def test_what_is_evicted_goes_out_before_the_step() -> None:
    rank = Rank(policy="write_back")
    tokens = rank.tokens(1)
    rank.publish(tokens)
    assert not rank.take().copies
    rank.memory.cache.evict(1)
    (saved,) = rank.tier.take_saved()
    assert len(saved.pages[0]) == 4, "all of the path"
    assert not rank.take().copies, "once"
    rank.end_all(Transfers(copies=(saved,)))
    assert rank.num_here(tokens) == len(tokens)
    rank.evict_all()
    assert not rank.tier.take_saved(), "it is there"


def test_a_flush_saves_nothing() -> None:
    """The weights may change with it, so no KV may come back."""
    machine = SchedulerMachine()
    machine.start(
        setup=replace(PLAIN, radix=True, host=(1.0, "write_back", None), chunk=8, page_size=4)
    )
    machine.submit(count=3, seed=1)
    machine.driver.run(500)
    machine.driver.oracle.host.end_rate = 0.0
    machine.flush()


def test_the_ledger_finds_a_lock_and_a_block_without_owner() -> None:
    rank = Rank()
    rank.publish(rank.tokens(1))
    rank.end_all(rank.take())
    blocks = rank.tier.blocks
    node = blocks.cache.match_prefix(rank.tokens(1)).node
    assert node is not None
    with pytest.raises(LedgerError, match="host memory of rank 0: copies and fetches have locked"):
        audit_cpu_tier(rank.tier)
    blocks.cache.unlock(node)
    blocks.allocators[0].alloc(1, 99)
    with pytest.raises(LedgerError, match="copies have 0 blocks, 1 are owned"):
        audit_cpu_tier(rank.tier)


def test_blocks_that_another_copy_has_brought_are_free_again() -> None:
    blocks = Rank().tier.blocks
    tokens = np.arange(4 * PAGE_SIZE, dtype=np.int32)
    is_offered = np.ones((1, 4), np.bool_)
    for number in (1, 2):
        assert blocks.begin_copy(number, tokens, "", is_offered) is not None
    for number in (1, 2):
        blocks.end_copy(number, succeeded=True)
    (allocator,) = blocks.allocators
    assert (allocator.num_tree, allocator.num_leased) == (4, 0)


def test_a_copy_of_a_flushed_prefix_is_not_kept() -> None:
    rank = Rank()
    tokens = rank.tokens(1)
    rank.publish(tokens)
    out = rank.take()
    rank.publish(rank.tokens(2))  # offered, not begun
    rank.tier.reset()
    rank.memory.cache.reset()
    rank.end_all(out)
    assert rank.num_here(tokens) == 0
    assert not any(rank.take()), "nor is the one that waited"


def test_transfers_from_before_a_reset_of_the_device_are_ignored() -> None:
    rank = Rank()
    rank.publish(rank.tokens(1))
    out = rank.take()
    rank.tier.reset()
    rank.tier.forget()
    for _ in range(2):
        assert (
            rank.tier.blocks.views()[0].free_blocks == rank.tier.blocks.views()[0].total_blocks - 1
        )
        rank.end_all(out)


def test_a_copy_waits_for_the_one_that_brings_its_beginning() -> None:
    rank = Rank()
    rank.publish(rank.tokens(1, 2))
    first = rank.take()
    rank.publish(rank.tokens(1, 4))
    assert not rank.take().copies
    rank.end_all(first)
    assert [len(move.pages[0]) for move in rank.take().copies] == [2]


def test_a_fetch_without_room_leaves_no_lock() -> None:
    rank = Rank()
    rank.move_out(rank.tokens(1, 8))
    busy = rank.memory.open_lease(rank.tokens(2, 10))
    assert rank.memory.grow_row(busy.row, 10 * PAGE_SIZE)
    assert rank.tier.begin_fetch(rank.tokens(1, 8), "") is None
    audit_cpu_tier(rank.tier)
    audit(rank.memory, 1)


def test_no_request_waits_for_a_fetch_of_what_is_here() -> None:
    rank = Rank()
    tokens = rank.tokens(1, num_pages=6)
    rank.move_out(tokens)
    rank.publish(tokens[: 2 * PAGE_SIZE])
    fetch = rank.tier.begin_fetch(tokens, "")
    assert fetch is not None
    other = rank.tokens(2, num_pages=6)
    for num_shared, expected in ((2, None), (4, (fetch.lease.row, 4 * PAGE_SIZE))):
        shared = num_shared * PAGE_SIZE
        prompt = np.concatenate([tokens[:shared], other[shared:]])
        # As for a model with windows, which may not resume where the device has pages.
        assert rank.tier.fetch_of(prompt, "", 0) == expected
