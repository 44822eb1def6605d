"""A store behind host memory: prefixes are put there, and found by their contents alone."""

import hashlib

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers
from sgl_jax.mem_cache.offload import store_writes
from sgl_jax.mem_cache.offload.content_keys import ContentKeys
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.offload.load_prices import LoadPrices
from sgl_jax.mem_cache.offload.remote_tier import RemoteTier, Waiter
from sgl_jax.mem_cache.offload.saved_prefixes import save_tree, saved_prefixes
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.window_component import lookback_pages
from tests.mem_cache.offload.test_cpu_tier import PAGE_SIZE, Rank, sizes_with
from tests.mem_cache.tree_model import held_pages
from tests.scheduler.driver import make_sizes

WAITER = Waiter("r", num_read=0, prompt_len=24, num_ahead=0)


class StoringRank(Rank):
    """A rank whose host has a store; `stored` are the keys in it."""

    def __init__(self, stored: set[bytes] | None = None, host_ratio: float = 2.0) -> None:
        self.memory = RankMemory(0, sizes_with(host_ratio=host_ratio))
        self.tier = CpuTier(self.memory, "write_through", "lru", loads_all=True, has_store=True)
        self.stored = set() if stored is None else stored
        self.has_other_sizes = False

    @property
    def store(self) -> RemoteTier:
        assert self.tier.store is not None
        return self.tier.store

    def end(self, move: StoreTransfer, *, succeeded: bool = True) -> None:
        """End a search or a load with the values that the store has; or a put."""
        found = tuple(
            np.array([name.tobytes() in self.stored for name in own], np.bool_) for own in move.keys
        )
        end = TransferEnd(0, move.number, succeeded, 0.01, found if succeeded else ())
        self.tier.ended(end._replace(has_other_sizes=self.has_other_sizes))
        self.check()

    def put_all(self, transfers: Transfers) -> None:
        for move in transfers.puts:
            self.stored.update(name.tobytes() for own in move.keys for name in own)
            self.end(move)

    def store_prefix(self, tokens: Int32Array) -> None:
        """Compute `tokens`, copy them to the host and put them into the store."""
        self.publish(tokens)
        self.end_all(self.take())
        self.put_all(self.take())

    def search(self, tokens: Int32Array, rid: str = "r", namespace: str = "") -> Transfers:
        """Search for a request; the transfers that follow."""
        self.store.search(
            Waiter(rid, 0, 24, 0), tokens, namespace, self.num_here(tokens, namespace)
        )
        for search in self.take().searches:
            self.end(search)
        return self.take()


def test_a_prefix_is_found_by_another_rank() -> None:
    first = StoringRank()
    tokens = first.tokens(1)
    first.store_prefix(tokens)
    assert first.store.writes.num_blocks == 4
    other = StoringRank(first.stored)
    (load,) = other.search(tokens).loads
    assert other.store.pending == {"r"}
    assert other.num_here(tokens) == 0
    other.end(load)
    assert other.store.pending == set()
    assert other.num_here(tokens) == len(tokens)
    assert other.store.num_loaded_tokens == len(tokens)
    # The host's prefix is fetched to the device like any other.
    assert other.tier.begin_fetch(tokens, "") is not None
    other.end_all(other.take())
    assert other.memory.cache.peek(tokens, "") == len(tokens)


def test_another_namespace_finds_nothing() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    assert not rank.search(rank.tokens(1), namespace="other").loads
    assert rank.store.pending == set()


def test_only_the_part_that_the_host_lacks_is_loaded() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1, num_pages=6)
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    other.store_prefix(tokens[: 2 * PAGE_SIZE])
    (load,) = other.search(tokens).loads
    assert len(load.blocks[0]) == 4
    other.end(load)
    assert other.num_here(tokens) == len(tokens)


@pytest.mark.parametrize("num_lost", [1, 2, 4])
def test_a_load_that_loses_values_keeps_the_pages_before(num_lost: int) -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.store_prefix(tokens)
    keys = ContentKeys(PAGE_SIZE, 1).of(tokens, "")[0]
    other = StoringRank(rank.stored)
    (load,) = other.search(tokens).loads
    other.stored.difference_update(name.tobytes() for name in keys[4 - num_lost :])
    other.end(load)
    assert other.num_here(tokens) == (4 - num_lost) * PAGE_SIZE


def priced_rank(stored: set[bytes], tokens_per_s: float) -> StoringRank:
    """A rank that computes a thousand tokens a second, before a store of another rate."""
    rank = StoringRank(stored, host_ratio=4.0)
    rank.tier.prices = rank.store._prices = LoadPrices()
    rank.tier.prices.prefill_rate = 1000.0
    rank.tier.prices.store.start(tokens_per_s)
    return rank


def test_nothing_is_searched_where_computing_is_sooner() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = priced_rank(rank.stored, 500.0)
    other.store.search(WAITER._replace(num_ahead=4), other.tokens(1), "", 0)
    assert other.store.pending == set()
    assert not other.take().searches
    # Behind as many prompt tokens again the prefix arrives in time.
    other.store.search(WAITER._replace(num_ahead=17), other.tokens(1), "", 0)
    (search,) = other.take().searches
    other.end(search)
    (load,) = other.take().loads
    other.end(load)
    # 16 tokens took 0.01 s: by now the store counts as faster.
    assert other.tier.prices.store.seconds == pytest.approx((0.75 * 1024 / 500 + 0.01) / 784)


def test_a_part_that_the_store_has_is_computed_if_others_loads_are_before_it() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    second = np.concatenate([rank.tokens(2), rank.tokens(3)[: 2 * PAGE_SIZE]])
    rank.store_prefix(second[:PAGE_SIZE])
    other = priced_rank(rank.stored, 2000.0)
    (load,) = other.search(other.tokens(1)).loads
    # 16 and 24 tokens would arrive in the time to compute 20: the store has but 4 of the 24.
    other.store.search(Waiter("second", 0, 24, 0), second, "", 0)
    (search,) = other.take().searches
    assert other.store.pending == {"r", "second"}
    other.end(search)
    assert other.store.pending == {"r"}
    assert not other.take().loads
    other.end(load)
    assert other.search(second).loads


def test_a_load_that_was_cut_short_is_measured_by_its_part() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    (load,) = other.search(tokens).loads
    other.stored.remove(load.keys[0][2].tobytes())
    other.end(load)
    assert other.tier.prices.store.seconds == pytest.approx(0.01 / 12)


def test_a_refused_load_now_and_then_measures_the_store_anew() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.store_prefix(tokens)
    other = priced_rank(rank.stored, 1.0)
    (load,) = (load for _ in range(16) for load in other.search(tokens).loads)
    assert not load.is_awaited
    assert other.store.pending == set()
    other.end(load)
    assert other.tier.prices.store.seconds < 1.0


def test_nothing_is_searched_that_the_device_has() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.store.search(WAITER._replace(num_read=len(tokens)), tokens, "", 0)
    assert not rank.take().searches
    assert rank.store.pending == set()


def test_a_failed_load_keeps_nothing() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = StoringRank(rank.stored)
    (load,) = other.search(other.tokens(1)).loads
    other.end(load, succeeded=False)
    assert other.num_here(other.tokens(1)) == 0
    assert other.store.pending == set()


def test_a_prefix_on_its_way_to_the_store_is_not_evicted() -> None:
    rank = StoringRank(host_ratio=0.3)  # 4 blocks
    rank.publish(rank.tokens(1))
    rank.end_all(rank.take())
    (put,) = rank.take().puts
    rank.publish(rank.tokens(2))
    assert not rank.take().copies, "there is no room"
    rank.end(put)
    rank.publish(rank.tokens(3))
    assert rank.take().copies


def test_a_put_that_failed_begins_again_at_each_use() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.publish(tokens)
    rank.end_all(rank.take())
    for _ in range(3):  # the store is down
        (put,) = rank.take().puts
        assert len(put.blocks[0]) == 4
        rank.end(put, succeeded=False)
        assert not rank.take().puts, "before its next use"
        rank.publish(tokens)
    rank.put_all(rank.take())
    assert rank.store.writes.num_blocks == 4
    rank.publish(tokens)
    assert not rank.take().puts, "it is there"
    assert StoringRank(rank.stored).search(tokens).loads


def test_a_put_without_room_begins_with_a_longer_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writes, "_MAX_BLOCKS", 4)
    rank = StoringRank()
    rank.publish(rank.tokens(1))
    rank.end_all(rank.take())
    (first,) = rank.take().puts
    tokens = rank.tokens(2, num_pages=6)
    rank.publish(tokens[: 2 * PAGE_SIZE])
    rank.end_all(rank.take())
    assert not rank.take().puts
    rank.publish(tokens)
    copies = rank.take()
    assert not copies.puts, "there is no room yet"
    rank.end(first)
    rank.end_all(copies)
    rank.put_all(rank.take())
    rank.publish(tokens)
    rank.put_all(rank.take())
    (load,) = StoringRank(rank.stored).search(tokens).loads
    assert len(load.blocks[0]) == 6


def test_a_prefix_larger_than_all_puts_is_put_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writes, "_MAX_BLOCKS", 2)
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    assert rank.store.writes.num_blocks == 4


def test_pages_that_are_left_out_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writes, "_MAX_LISTED_PAGES", 3)
    rank = StoringRank()
    for number in (1, 2):
        rank.publish(rank.tokens(number, num_pages=2))
        rank.end_all(rank.take())
        rank.end(rank.take().puts[0], succeeded=False)
    assert len(rank.store.writes._left_out) == 3


def test_a_load_takes_no_room_that_is_locked() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = StoringRank(rank.stored, host_ratio=0.3)
    other.publish(other.tokens(2))
    other.end_all(other.take())
    (put,) = other.take().puts
    assert not other.search(other.tokens(1)).loads
    assert other.store.pending == set()
    other.end(put)
    assert other.search(other.tokens(1)).loads


def test_nothing_is_loaded_behind_a_beginning_that_was_evicted_meanwhile() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1, num_pages=6)
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    other.store_prefix(tokens[: 2 * PAGE_SIZE])
    other.store.search(WAITER, tokens, "", 2 * PAGE_SIZE)
    (search,) = other.take().searches
    other.tier.blocks.cache.evict(2)
    other.end(search)
    assert not other.take().loads
    assert other.store.pending == set()


def test_a_load_skips_the_pages_that_the_host_has_got_meanwhile() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1, num_pages=6)
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    other.store.search(WAITER, tokens, "", 0)
    (search,) = other.take().searches
    other.store_prefix(tokens[: 2 * PAGE_SIZE])
    other.end(search)
    (load,) = other.take().loads
    expected = ContentKeys(PAGE_SIZE, 1).of(tokens, "")[0, 2:]
    assert np.array_equal(load.keys[0], expected)


def test_saved_prefixes_are_loaded_until_blocks_lack() -> None:
    rank = StoringRank(host_ratio=4.0)
    for number in range(1, 5):
        rank.store_prefix(rank.tokens(number))
    rank.tier.blocks.cache.unlock(  # the first one is used once more
        rank.tier.blocks.cache.match_prefix(rank.tokens(1)).node
    )
    prefixes = saved_prefixes([save_tree(rank.tier.blocks.cache)])
    assert [int(prefix.tokens[0]) // 100 for prefix in prefixes] == [1, 4, 3, 2]
    other = StoringRank(rank.stored, host_ratio=0.6)  # two prefixes of 4 pages
    other.store.restore(prefixes)
    while other.store.is_restoring:
        taken = other.take()
        for move in (*taken.searches, *taken.loads):
            other.end(move)
    assert [other.num_here(other.tokens(number)) for number in range(1, 5)] == [16, 0, 0, 16]


def test_a_prefix_that_waited_for_a_load_is_copied_after_it() -> None:
    rank = StoringRank()
    tokens = rank.tokens(1)
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    (load,) = other.search(tokens).loads
    longer = np.concatenate([tokens, other.tokens(2)])
    other.publish(longer)
    assert not other.take().copies
    assert not other.tier.has_work
    other.end(load)
    assert other.tier.has_work
    (copy,) = other.take().copies
    assert len(copy.pages[0]) == 4


def test_a_request_waits_no_more_for_what_is_overdue() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = StoringRank(rank.stored)
    other.store.search(WAITER, other.tokens(1), "", 0)
    (search,) = other.take().searches
    other.store.overdue(search.number)
    assert other.store.pending == set()
    # What it brings later is kept.
    other.end(search)
    (load,) = other.take().loads
    other.end(load)
    assert other.num_here(other.tokens(1)) == 16


def test_a_prefix_is_loaded_once_for_all_that_wait_for_it() -> None:
    rank = StoringRank()
    tokens, longer = rank.tokens(1), rank.tokens(1, num_pages=6)
    rank.store_prefix(longer)
    other = StoringRank(rank.stored, host_ratio=3.0)
    for rid, prompt in (("a", tokens), ("b", tokens), ("c", longer), ("d", rank.tokens(2))):
        other.store.search(Waiter(rid, 0, 24, 0), prompt, "", 0)
    search, elsewhere = other.take().searches
    assert other.store.pending == {"a", "b", "c", "d"}
    other.end(search)
    other.end(elsewhere)
    taken = other.take()
    (load,) = taken.loads
    assert len(load.blocks[0]) == 4
    assert not taken.searches
    assert other.store.pending == {"a", "b", "c"}
    other.end(load)
    # The rest of the longer one is searched now.
    assert other.store.pending == {"c"}
    (search,) = other.take().searches
    other.end(search)
    (load,) = other.take().loads
    assert len(load.blocks[0]) == 2
    other.end(load)
    assert other.store.pending == set()
    assert other.num_here(longer) == len(longer)


def test_after_a_miss_no_search_waits_for_another() -> None:
    rank = StoringRank()
    for rid in "abc":
        rank.store.search(Waiter(rid, 0, 24, 0), rank.tokens(1), "", 0)
    (search,) = rank.take().searches
    rank.end(search)
    searches = rank.take().searches
    assert len(searches) == 2
    for each in searches:
        rank.end(each)
    assert rank.store.pending == set()


def test_all_that_wait_for_an_overdue_search_wait_no_more() -> None:
    rank = StoringRank()
    for rid in "ab":
        rank.store.search(Waiter(rid, 0, 24, 0), rank.tokens(1), "", 0)
    (search,) = rank.take().searches
    rank.store.overdue(search.number)
    assert rank.store.pending == set()
    rank.end(search)
    assert not rank.take().searches


def test_ends_from_before_a_reset_are_ignored() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = StoringRank(rank.stored)
    (load,) = other.search(other.tokens(1)).loads
    other.publish(other.tokens(2))
    other.end_all(other.take())
    (put,) = other.take().puts
    other.tier.reset()  # the executor was reset
    other.memory.cache.reset()
    other.tier.forget()
    other.end(load)
    other.end(put)
    assert other.num_here(other.tokens(1)) == 0
    assert other.store.writes.num_blocks == 0


def test_counts_outlast_a_reset() -> None:
    rank = StoringRank()
    rank.store_prefix(rank.tokens(1))
    other = StoringRank(rank.stored)
    (load,) = other.search(other.tokens(1)).loads
    other.end(load)
    for tier in (rank.tier, other.tier):
        tier.reset()
        tier.forget()
    assert (rank.tier.store.writes.num_blocks, rank.tier.store.num_loaded_tokens) == (4, 0)
    assert (other.tier.store.writes.num_blocks, other.tier.store.num_loaded_tokens) == (0, 16)


def test_only_locked_values_go_to_the_store() -> None:
    groups = (*FULL_ATTENTION, CacheGroup(6, 1))
    sizes = make_sizes(page_size=PAGE_SIZE, num_pages=33, groups=groups, host_ratio=2.0)
    blocks = CpuPool(0, sizes, "lru")
    tokens = np.arange(24, dtype=np.int32)
    assert blocks.begin_copy(1, tokens, "", np.ones((2, 6), np.bool_)) is not None
    added = blocks.end_copy(1, succeeded=True, lock_for=2)
    # Pages before the window of the end may be evicted while the others are put.
    of_window = lookback_pages(6, PAGE_SIZE)
    assert (added > 0).tolist() == [[True] * 6, [False] * (6 - of_window) + [True] * of_window]
    for pool in range(2):
        blocks.cache.evict(99, pool)
    held = np.concatenate([held_pages(blocks.cache, pool) for pool in range(2)])
    assert sorted(held) == sorted(added[added > 0])
    blocks.end_fetch(2)


def test_keys_depend_on_all_tokens_before() -> None:
    tokens = np.arange(12, dtype=np.int32)
    keys = ContentKeys(PAGE_SIZE, 2).of(tokens, "")
    assert keys.shape[:2] == (2, 3)
    changed = tokens.copy()
    changed[5] = 99
    same = (keys == ContentKeys(PAGE_SIZE, 2).of(changed, "")).all(axis=2)
    assert same.tolist() == [[True, False, False]] * 2
    assert not (keys[0] == keys[1]).all(axis=1).any()
    salted = ContentKeys(PAGE_SIZE, 2).of(tokens, "a tenant")
    assert not (keys == salted).all(axis=2).any()


@pytest.mark.parametrize("page_size", [1, 16, 1024, 4096])
def test_keys_of_a_longer_prefix_begin_with_the_same(page_size: int) -> None:
    keys = ContentKeys(page_size, 2)
    tokens = np.random.default_rng(0).integers(0, 9, 3 * max(page_size, 1024) + 7, np.int32)
    whole = keys.of(tokens, "a tenant")
    assert whole.shape == (2, len(tokens) // page_size, 16 * max(page_size // 16, 1) + 2)
    for length in (len(tokens) // 2, page_size, 0, len(tokens)):
        found = keys.of(tokens[:length], "a tenant")
        assert np.array_equal(found, whole[:, : length // page_size])
    assert keys._hash_piece.cache_info().hits > 0, "no page is hashed twice"


def test_the_hash_of_a_position_does_not_depend_on_the_page_size() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 3 * 1024, np.int32)
    hashes = {}
    for page_size in (1, 4, 16, 64, 256, 2048):
        keys = ContentKeys(page_size, 1).of(tokens, "a tenant")[0]
        of_values = keys[:, :-2].reshape(-1, 16)
        size = min(page_size, 16)
        assert {*keys[:, -1].tolist()} == {size.bit_length() - 1}
        for number, own in enumerate(of_values, start=1):
            assert hashes.setdefault(number * size, own.tobytes()) == own.tobytes()
    assert len(hashes) == len({*hashes.values()}) == len(tokens)
    for position in (700, 1024, 1500):
        chained = hashlib.blake2b(b"a tenant", digest_size=16).digest()
        for first in range(0, position, 1024):
            piece = tokens[first : min(first + 1024, position)].tobytes()
            chained = hashlib.blake2b(piece, key=chained, digest_size=16).digest()
        assert hashes[position] == chained


def test_a_lookup_that_finds_nothing_is_counted_with_its_reason() -> None:
    rank, tokens = StoringRank(), np.arange(12, dtype=np.int32)
    assert not rank.search(tokens).loads
    assert rank.store.misses == {"absent": 1}
    rank.has_other_sizes = True
    assert not rank.search(tokens).loads
    assert rank.store.misses == {"absent": 1, "page_size": 1}
    rank.store.search(WAITER, tokens, "", 0)
    (lookup,) = rank.take().searches
    rank.end(lookup, succeeded=False)
    assert rank.store.misses.total() == 2, "a failure is not a miss"
    rank.store_prefix(tokens)
    other = StoringRank(rank.stored)
    assert other.search(tokens).loads
    assert not other.store.misses


def test_pages_without_a_window_to_resume_from_are_a_miss_of_their_own() -> None:
    groups = (*FULL_ATTENTION, CacheGroup(6, 1))
    sizes = make_sizes(page_size=PAGE_SIZE, num_pages=33, groups=groups, host_ratio=2.0)
    blocks = CpuPool(0, sizes, "lru")
    numbers = iter(range(1, 9))
    tier = RemoteTier(blocks, groups, LoadPrices(loads_all=True), lambda: next(numbers))
    tokens = np.arange(4 * PAGE_SIZE, dtype=np.int32)
    full, none = np.ones(4, np.bool_), np.zeros(4, np.bool_)
    for window, misses in ((none, {"not_resumable": 1}), (full, {"not_resumable": 1})):
        tier.search(WAITER, tokens, "", 0)
        (searches, _, _) = tier.take()
        tier.ended(TransferEnd(0, searches[0].number, True, 0.01, (full, window)))
        assert tier.misses == misses
    assert tier.waiting_loads
