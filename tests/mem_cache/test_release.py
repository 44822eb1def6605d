"""A lease from opening to release, over all that may happen between, audited after each rule."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.radix_cache import ChunkCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from tests.mem_cache.tree_model import (
    NAMESPACES,
    PrefixModel,
    Tokens,
    array_of,
    cached_pages,
    in_namespace,
)

MAX_LEN = 48
CUTS = [7, 20, 33, MAX_LEN]


def make_memory(
    page_size: int, *, num_pages: int = 24, num_rows: int = 6, use_radix_cache: bool = True
) -> RankMemory:
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(num_pages,),
        num_rows=num_rows,
        max_context_len=MAX_LEN,
        max_step_tokens=64,
        max_prompt_logprob_tokens=64,
        vocab_size=100,
    )
    return RankMemory(3, sizes, use_radix_cache=use_radix_cache, eviction_policy="lru")


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def as_tuple(tokens: np.ndarray) -> Tokens:
    return tuple(tokens.tolist())


class Holder:
    """A request as the memory sees it: its tokens (as the model calls them) and its lease."""

    def __init__(self, tokens: np.ndarray, lease: KVLease) -> None:
        self.tokens = tokens
        self.lease = lease

    def known(self, length: int = MAX_LEN) -> np.ndarray:
        """Its first tokens, as the memory is given them."""
        return array_of(as_tuple(self.tokens[:length]))


class LeaseMachine(RuleBasedStateMachine):
    """Open, grow, commit, publish, release and evict in any order, in a pool that is short.

    `model` is the cache searched by force: the prefixes it must have, with the page at the end of
    each. `written` is what each page holds, so that every hit is known to be the right one.
    """

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.sampled_from([64, 112, 160]),
        radix=st.sampled_from([True, True, True, False]),
    )
    def start(self, page_size: int, pool_tokens: int, radix: bool) -> None:
        self.memory = make_memory(
            page_size, num_pages=1 + pool_tokens // page_size, use_radix_cache=radix
        )
        self.page_size = page_size
        self.holders: list[Holder] = []
        self.model = PrefixModel(page_size)
        # What was written to each page, as the prefix that ends with the page's last token.
        self.written: dict[int, list[bytes]] = {}

    @rule(
        stem=st.integers(0, 1),
        cut=st.sampled_from(CUTS),
        tail=st.integers(0, 1),
        namespace=st.sampled_from(["", *NAMESPACES]),
    )
    def open_lease(self, stem: int, cut: int, tail: int, namespace: str) -> None:
        if not self.memory.row_pool.num_free:
            return
        tokens = np.full(MAX_LEN, stem, np.int32)
        tokens[cut:] = 10 + tail
        given, tokens = tokens, array(*in_namespace(as_tuple(tokens), namespace))
        expected = self.model.longest_match(as_tuple(tokens[:-1]))
        lease = self.memory.open_lease(given[:-1], namespace)
        assert lease.kv_committed_len == len(expected)
        assert lease.pages(self.page_size)[0].tolist() == self.model.pages_of(expected)
        if expected:
            self.model.touch(expected)
            self.model.use(expected)
        assert lease.cache_protected_len == lease.kv_committed_len == lease.kv_allocated_len
        assert lease.kv_committed_len % self.page_size == 0
        self.holders.append(Holder(tokens, lease))
        self.check_content(self.holders[-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow_many(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.holders), unique=True, min_size=1))
        lens = [data.draw(st.integers(0, MAX_LEN)) for _ in chosen]
        memory = self.memory
        rows = array(*(holder.lease.row for holder in chosen))
        held = [memory.pages_for(holder.lease.kv_allocated_len) for holder in chosen]
        lacking = [max(memory.pages_for(n) - pages, 0) for n, pages in zip(lens, held, strict=True)]
        assert memory.pages_to_grow(rows, array(*lens)).tolist() == lacking
        before = [holder.lease.kv_allocated_len for holder in chosen]
        view = memory.view()
        fits = sum(lacking) <= memory.num_available_pages
        assert memory.grow_rows(rows, array(*lens)) == fits
        self.accept_eviction(max(sum(lacking) - view.free_pages, 0) if fits else 0)
        after = [holder.lease.kv_allocated_len for holder in chosen]
        if fits:
            assert after == [max(old, new) for old, new in zip(before, lens, strict=True)]
            assert memory.view().free_pages == max(view.free_pages - sum(lacking), 0)
        else:
            assert after == before
            assert memory.view() == view

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        lease = holder.lease
        self.write(holder, data.draw(st.integers(lease.kv_committed_len, lease.kv_allocated_len)))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 4), num_tokens=st.sampled_from(CUTS))
    def prefill(self, which: int, num_tokens: int) -> None:
        """Grow and commit at once, as most steps do."""
        holder = self.holders[which % len(self.holders)]
        if num_tokens <= holder.lease.kv_committed_len:
            return
        lease, memory = holder.lease, self.memory
        lacking = memory.pages_for(num_tokens) - memory.pages_for(lease.kv_allocated_len)
        could_fit, before = lacking <= memory.num_available_pages, lease.kv_allocated_len
        fits = memory.grow_row(lease.row, num_tokens)
        self.accept_eviction()
        assert fits == could_fit
        assert lease.kv_allocated_len == (max(before, num_tokens) if fits else before)
        if fits:
            self.write(holder, num_tokens)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 4), ahead=st.integers(1, 8), accepted=st.integers(0, 8))
    def speculate(self, which: int, ahead: int, accepted: int) -> None:
        """Slots ahead of what is certain; how much of it was written is known only later."""
        holder = self.holders[which % len(self.holders)]
        lease = holder.lease
        certain = min(lease.kv_committed_len + 1, MAX_LEN)
        end = min(certain + ahead, MAX_LEN)
        fits = self.memory.grow_rows(array(lease.row), array(end))
        self.accept_eviction()
        if fits:
            self.write(holder, certain)
            self.write(holder, min(certain + accepted, end))

    def write(self, holder: Holder, end: int) -> None:
        lease = holder.lease
        pages = lease.pages(self.page_size)[0].tolist()
        for position in range(lease.kv_committed_len, end):
            slots = self.written.setdefault(pages[position // self.page_size], [])
            del slots[position % self.page_size :]
            slots.append(holder.tokens[: position + 1].tobytes())
        self.memory.commit_rows(array(lease.row), array(end))
        assert lease.kv_committed_len == end

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 4), num_known=st.sampled_from(CUTS))
    def publish(self, which: int, num_known: int) -> None:
        holder = self.holders[which % len(self.holders)]
        before = holder.lease.cache_protected_len
        self.expect_published(holder, num_known)
        publish_prefix(self.memory, holder.lease, holder.known(num_known))
        offered = min(holder.lease.kv_committed_len, num_known) // self.page_size * self.page_size
        expected = max(before, offered) if self.tree is not None else before
        assert holder.lease.cache_protected_len == expected
        self.check_content(holder)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 4), num_known=st.sampled_from(CUTS), insert=st.booleans())
    def release(self, which: int, num_known: int, insert: bool) -> None:
        holder = self.holders.pop(which % len(self.holders))
        if insert:
            self.expect_published(holder, num_known)
        row, epoch = holder.lease.row, int(self.memory.rows.epoch[holder.lease.row])
        release_kv_cache(self.memory, holder.lease, holder.known(num_known), insert=insert)
        assert holder.lease.released
        assert self.memory.rows.epoch[row] == epoch + 1
        assert row not in self.memory.allocator.owners()
        with pytest.raises(LeaseError, match="after its release"):
            release_kv_cache(self.memory, holder.lease, holder.known(), insert=insert)

    @rule(num_pages=st.integers(0, 10))
    def make_room(self, num_pages: int) -> None:
        view = self.memory.view()
        can = num_pages <= self.memory.num_available_pages
        assert self.memory.make_room(num_pages) == can
        self.accept_eviction(max(num_pages - view.free_pages, 0) if can else 0)
        expected = max(view.free_pages, num_pages) if can else view.free_pages
        assert self.memory.view().free_pages == expected

    @rule(seed=st.integers(0, 2**32))
    def many_things(self, seed: int) -> None:
        """Twenty at random: rules alone seldom bring two leases to publish the same prefix."""
        rng = random.Random(seed)
        for _ in range(20):
            namespace = rng.choice(["", *NAMESPACES])
            self.open_lease(rng.randrange(2), rng.choice(CUTS), rng.randrange(2), namespace)
            which, cut = rng.randrange(5), rng.choice([*CUTS, MAX_LEN, MAX_LEN])
            dice = rng.randrange(6)
            if self.holders and dice < 2:
                self.prefill(which, cut)
            elif self.holders and dice < 4:
                self.publish(which, cut)
            elif self.holders and dice == 4:
                self.release(which, cut, rng.random() < 0.8)
            else:
                self.make_room(rng.randrange(10))
            self.ledger_balances()

    @property
    def tree(self) -> RadixTree | None:
        cache = self.memory.cache
        return None if isinstance(cache, ChunkCache) else cache.tree

    def expect_published(self, holder: Holder, num_known: int) -> None:
        """Tell the model what a publication of the first `num_known` tokens adds to the cache."""
        lease, page_size = holder.lease, self.page_size
        length = min(lease.kv_committed_len, num_known) // page_size * page_size
        if self.tree is None or length <= lease.cache_protected_len:
            return
        tokens = as_tuple(holder.tokens[:length])
        offered = lease.pages(page_size, 0, length)[0].tolist()
        for prefix, page in zip(self.model.prefixes(tokens), offered, strict=True):
            self.model.pages.setdefault(prefix, page)
        self.model.touch(tokens)
        self.model.use(tokens)

    def accept_eviction(self, num_pages: int | None = None) -> None:
        """Memory was asked for: what left the cache had to go last, and was not too much."""
        if self.tree is None:
            return
        self.know_locks()
        gone = self.model.remove_evicted(cached_pages(self.tree))
        assert num_pages is None or len(gone) == num_pages

    def know_locks(self) -> None:
        self.model.locked = [
            as_tuple(holder.tokens[: holder.lease.cache_protected_len]) for holder in self.holders
        ]

    def check_content(self, holder: Holder) -> None:
        """Each page below the committed length holds the KV of this very prefix."""
        pages = holder.lease.pages(self.page_size)[0].tolist()
        for position in range(holder.lease.kv_committed_len):
            slots = self.written[pages[position // self.page_size]]
            assert slots[position % self.page_size] == holder.tokens[: position + 1].tobytes()

    @invariant()
    def ledger_balances(self) -> None:
        if not hasattr(self, "memory"):
            return
        check_balance(self.memory)
        audit(self.memory)
        self.know_locks()
        num_evictable = len(self.model.evictable())
        assert self.memory.cache.num_evictable[0] == num_evictable
        assert self.memory.cache.num_protected[0] == len(self.model.pages) - num_evictable
        assert self.tree is None or cached_pages(self.tree) == self.model.pages
        for holder in self.holders:
            lease = holder.lease
            assert 0 <= lease.cache_protected_len <= lease.kv_committed_len
            assert lease.kv_committed_len <= lease.kv_allocated_len
            assert lease.cache_protected_len % self.page_size == 0
            num_pages = self.memory.pages_for(lease.kv_allocated_len)
            listed = self.memory.rows.pages[lease.row, 0]
            assert (listed[:num_pages] > 0).all()
            assert (listed[num_pages:] == 0).all()
            self.check_content(holder)

    def teardown(self) -> None:
        """Drained and evicted, everything is free."""
        if not hasattr(self, "memory"):
            return
        for holder in self.holders:
            release_kv_cache(self.memory, holder.lease, holder.known(), insert=True)
        audit(self.memory)
        self.memory.cache.reset()
        view = self.memory.view()
        assert view.free_pages == view.total_pages - 1
        assert view.free_rows == view.total_rows


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def write_kv(memory: RankMemory, lease: KVLease, num_tokens: int) -> None:
    assert memory.grow_rows(array(lease.row), array(num_tokens))
    memory.commit_rows(array(lease.row), array(num_tokens))


def test_whole_committed_pages_enter_the_cache_and_the_rest_is_freed() -> None:
    memory = make_memory(4)
    lease = memory.open_lease(array(*range(20)))
    write_kv(memory, lease, 10)
    assert memory.grow_rows(array(lease.row), array(17))
    release_kv_cache(memory, lease, np.arange(20, dtype=np.int32), insert=True)
    assert memory.view().cached_pages == 2
    assert memory.view().free_pages == 23 - 2
    assert memory.cache.peek(np.arange(20, dtype=np.int32)) == 8


def test_tokens_the_host_does_not_know_yet_never_enter_the_cache() -> None:
    memory = make_memory(4)
    lease = memory.open_lease(array(*range(20)))
    write_kv(memory, lease, 12)
    release_kv_cache(memory, lease, np.arange(9, dtype=np.int32), insert=True)
    assert memory.view().cached_pages == 2


def test_without_insert_only_what_the_cache_had_stays() -> None:
    memory = make_memory(4)
    tokens = np.arange(30, dtype=np.int32)
    first = memory.open_lease(tokens[:8])
    write_kv(memory, first, 8)
    release_kv_cache(memory, first, tokens[:8], insert=True)
    second = memory.open_lease(tokens)
    assert second.cache_protected_len == 8
    write_kv(memory, second, 21)
    release_kv_cache(memory, second, tokens, insert=False)
    assert memory.view().cached_pages == 2
    assert memory.view().protected_pages == 0
    audit(memory)


def test_publishing_a_prefix_another_lease_published_frees_the_duplicates() -> None:
    memory = make_memory(4)
    tokens = np.arange(16, dtype=np.int32)
    leases = [memory.open_lease(tokens), memory.open_lease(tokens)]
    for lease in leases:
        write_kv(memory, lease, 14)
    assert memory.view().leased_pages == 8
    for lease in leases:
        publish_prefix(memory, lease, tokens)
    assert memory.view().cached_pages == 3
    assert memory.view().leased_pages == 2
    assert leases[0].pages(4, 0, 12)[0].tolist() == leases[1].pages(4, 0, 12)[0].tolist()
    assert leases[0].pages(4, 12)[0].tolist() != leases[1].pages(4, 12)[0].tolist()


def test_committing_more_than_is_allocated_raises() -> None:
    memory = make_memory(4)
    lease = memory.open_lease(array(1, 2))
    assert memory.grow_rows(array(lease.row), array(3))
    with pytest.raises(LeaseError, match="would commit"):
        memory.commit_rows(array(lease.row), array(4))
    assert lease.kv_committed_len == 0


@pytest.mark.parametrize("lengths", [(0, 3, 2), (4, 3, 5), (-4, 0, 0)])
def test_lengths_out_of_order_are_refused(lengths: tuple[int, int, int]) -> None:
    memory = make_memory(4)
    lease = memory.open_lease(array(1, 2))
    protected, committed, allocated = lengths
    with pytest.raises(LeaseError, match="0 <= protected <= committed <= allocated"):
        lease.set_lengths(protected=protected, committed=committed, allocated=allocated)
    assert lease.kv_allocated_len == 0


def test_a_released_lease_is_of_no_use() -> None:
    memory = make_memory(4)
    lease = memory.open_lease(array(1, 2))
    release_kv_cache(memory, lease, array(1, 2), insert=True)
    for use in (
        lambda: lease.pages(4)[0],
        lambda: lease.set_lengths(protected=0, committed=0, allocated=0),
        lambda: publish_prefix(memory, lease, array(1, 2)),
    ):
        with pytest.raises(LeaseError, match=r"rank 3.*released"):
            use()


def test_opening_a_lease_without_a_free_row_changes_nothing() -> None:
    memory = make_memory(4, num_rows=2)
    memory.open_lease(array(1, 2))
    view = memory.view()
    with pytest.raises(LeaseError, match="all 1 rows are held"):
        memory.open_lease(array(3))
    assert memory.view() == view


def test_a_large_pool_evicts_a_few_pages_ahead_and_no_more_than_it_can() -> None:
    num_pages, num_ahead = 1040, 2  # one of 512
    memory = make_memory(1, num_pages=num_pages + 1)
    for first in range(0, num_pages, MAX_LEN):
        tokens = np.arange(first, min(first + MAX_LEN, num_pages), dtype=np.int32)
        lease = memory.open_lease(tokens[:0])
        assert memory.grow_row(lease.row, len(tokens))
        memory.commit_rows(array(lease.row), array(len(tokens)))
        release_kv_cache(memory, lease, tokens, insert=True)
    assert memory.allocator.num_free == 0
    for _ in range(2):
        assert memory.make_room(10)
        assert memory.allocator.num_free == 10 + num_ahead
    assert memory.make_room(num_pages)
    assert memory.allocator.num_free == num_pages
    assert not memory.make_room(num_pages + 1)
    audit(memory)
