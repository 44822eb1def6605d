"""A rank's memory, its blocks on the host and the store behind them, at random, by no scheduler.

Every page, block and stored value has contents that its prefix decides, and transfers end late, in
any order, or fail. After each step the ledgers balance, and all that the trees hold is right.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import TransferEnd
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.offload.cpu_ledger import audit_cpu_tier, check_cpu_balance
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.offload.remote_tier import Waiter
from sgl_jax.mem_cache.offload.saved_prefixes import save_tree, saved_prefixes
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import free_passed_window_pages, publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from tests.scheduler.driver import make_sizes
from tests.support.host_oracle import HostOracle

PAGE_SIZE = 2
MOST_PAGES = 7  # of a prompt
GROUPS = {
    "full": FULL_ATTENTION,
    "a window in the same pool": (*FULL_ATTENTION, CacheGroup(3, 0)),
    "two windows in pools": (*FULL_ATTENTION, CacheGroup(3, 1), CacheGroup(5, 2)),
}
POLICIES = ("write_through", "write_through_selective", "write_back")


@dataclass(eq=False)
class Held:
    """A request that runs."""

    tokens: Int32Array
    lease: KVLease


class HostRun:
    """One run, with the settings that its seed draws."""

    def __init__(self, groups: str, policy: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        sizes = make_sizes(
            page_size=PAGE_SIZE,
            num_pages=rng.choice([17, 33, 65]),
            num_rows=rng.choice([4, 9]),
            groups=GROUPS[groups],
            host_ratio=rng.choice([0.5, 1.0, 3.0]),
        )
        self.memory = RankMemory(0, sizes, eviction_policy=rng.choice(["lru", "adaptive"]))
        has_store = rng.random() < 0.7
        self.tier = CpuTier(self.memory, policy, "lru", loads_all=True, has_store=has_store)
        self.pools = [np.zeros((pages, 1), np.uint64) for pages in sizes.pool_pages]
        self.oracle = HostOracle(sizes, [self.pools])
        self.oracle.rng = random.Random(seed + 1)
        self.oracle.end_rate = rng.choice([0.2, 0.5, 1.0])
        self.oracle.failure_rate = rng.choice([0.0, 0.1])
        self.oracle.loss_rate = rng.choice([0.0, 0.1])
        self.held: list[Held] = []
        self.counts = {"fetched": 0, "loaded": 0, "put": 0, "copied": 0}
        self.num_searched = 0

    # -- contents ---------------------------------------------------------------------------

    def contents(self, tokens: Int32Array, namespace: str, group: int) -> NDArray[np.uint64]:
        """The contents of the whole pages of a prefix: uint64[pages, 1]."""
        values = [
            hash((namespace, group, tokens[:end].tobytes())) & (2**64 - 1)
            for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)
        ]
        return np.array(values, np.uint64).reshape(-1, 1)

    def check_contents(self, pages: Int32Array, tokens: Int32Array, namespace: str) -> None:
        """Pages int32[groups, n] of the prefix `tokens` that are there hold its contents."""
        for number, group in enumerate(self.memory.groups):
            is_there = pages[number] > 0
            expected = self.contents(tokens, namespace, number)[: pages.shape[1]]
            found = self.pools[group.pool][pages[number]]
            assert (found[is_there] == expected[is_there]).all()

    def check_tree(self, cache: RadixCache, contents: list[NDArray[np.uint64]]) -> None:
        for node in cache.nodes():
            tokens = np.concatenate([step.key for step in cache.tree.path_to(node)])
            pages = cache.tree.pages_to(node)
            for number, group in enumerate(self.memory.groups):
                is_there = pages[number] > 0
                expected = self.contents(tokens, node.namespace, number)
                assert (contents[group.pool][pages[number]] == expected)[is_there].all()

    # -- events -----------------------------------------------------------------------------

    def prompt(self) -> tuple[Int32Array, str]:
        """Tokens of which others have beginnings, and their namespace."""
        rng = self.rng
        pages = [rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, MOST_PAGES))]
        tokens = np.repeat(np.array(pages, np.int32), PAGE_SIZE)
        return tokens[: len(tokens) - rng.randrange(2)], rng.choice(("", "", "tenant"))

    def begin(self) -> None:
        """A request reads its cached prefix."""
        if not self.memory.row_pool.num_free:
            return
        tokens, namespace = self.prompt()
        lease = self.memory.open_lease(tokens[:-1], namespace)
        self.check_contents(lease.pages(PAGE_SIZE), tokens, namespace)
        self.held.append(Held(tokens, lease))

    def compute(self) -> None:
        """A request computes more of its tokens, and may publish them."""
        if not self.held:
            return
        held, memory = self.rng.choice(self.held), self.memory
        lease, start = held.lease, held.lease.kv_committed_len
        if start == len(held.tokens):
            return
        end = self.rng.randint(start + 1, len(held.tokens))
        if memory.num_available_pages < memory.pages_for(end) or not memory.grow_row(
            lease.row, end
        ):
            return
        self.save()
        pages = lease.pages(PAGE_SIZE)
        for number, group in enumerate(memory.groups):
            expected = self.contents(held.tokens[:end], lease.namespace, number)
            written = pages[number, : len(expected)]
            is_new = np.arange(len(expected)) >= start // PAGE_SIZE
            is_new &= written > 0
            self.pools[group.pool][written[is_new]] = expected[is_new]
        memory.commit_rows([lease.row], [end])  # type: ignore[arg-type]
        if self.rng.random() < 0.5:
            publish_prefix(memory, lease, held.tokens[:end])
        if not memory.lists_all:
            rows, ends = np.array([lease.row]), np.array([lease.kv_committed_len])
            free_passed_window_pages(memory.rows, [memory], rows, ends)

    def end(self) -> None:
        """A request ends."""
        if self.held:
            self.release(self.held.pop(self.rng.randrange(len(self.held))), insert=True)

    def fail(self) -> None:
        """A request ends, and nothing of it is kept."""
        if self.held:
            self.release(self.held.pop(), insert=False)

    def release(self, held: Held, *, insert: bool) -> None:
        known = held.tokens[: held.lease.kv_committed_len]
        release_kv_cache(self.memory, held.lease, known, insert=insert)

    def evict(self) -> None:
        pool = self.rng.randrange(len(self.pools))
        self.memory.cache.evict(self.rng.randint(1, 12), pool)
        self.save()

    def fetch(self) -> None:
        self.tier.begin_fetch(*self.prompt())

    def search(self) -> None:
        tokens, namespace = self.prompt()
        if self.tier.store is not None:
            self.num_searched += 1
            num_here = self.tier.blocks.cache.peek(tokens, namespace)
            waiter = Waiter(f"r{self.num_searched}", num_here, len(tokens), 0)
            self.tier.store.search(waiter, tokens, namespace, num_here)

    def restore(self) -> None:
        if self.tier.store is not None:
            self.tier.store.restore(saved_prefixes([save_tree(self.tier.blocks.cache)])[:3])

    def drop_fetches(self) -> None:
        self.tier.drop_fetches()

    def reset(self) -> None:
        """The caches are flushed, once nothing runs and nothing is on its way out."""
        if not self.held and not self.tier.is_moving_out:
            self.tier.reset()
            self.memory.cache.reset()

    def crash(self) -> None:
        """The device is lost, with all that was in flight."""
        while self.held:
            self.release(self.held.pop(), insert=False)
        self.tier.drop_fetches()
        self.memory.cache.reset()
        self.count()
        self.tier.forget()
        self.oracle.forget()

    def save(self) -> None:
        """Copies of pages that may be overwritten next begin."""
        self.oracle.copy(self.tier.take_saved())

    def move(self) -> None:
        """Transfers end, and others begin, as in an engine's turn."""
        for end in self.oracle.ended():
            self.ended(end)
        if self.tier.has_work:
            self.oracle.transfer(self.tier.take())

    def ended(self, end: TransferEnd) -> None:
        self.tier.ended(end)
        check_cpu_balance(self.tier)

    # -- the run ----------------------------------------------------------------------------

    def run(self, num_steps: int) -> None:
        events = {
            self.begin: 20,
            self.compute: 30,
            self.end: 15,
            self.fail: 1,
            self.evict: 8,
            self.fetch: 10,
            self.search: 6,
            self.restore: 1,
            self.drop_fetches: 1,
            self.reset: 3,
            self.crash: 0.5,
        }
        drawn = self.rng.choices(list(events), list(events.values()), k=num_steps)
        for number, event in enumerate(drawn):
            event()
            self.move()
            check_balance(self.memory, len(self.held) + len(self.tier.fetches))
            check_cpu_balance(self.tier)
            if number % 20 == 0:
                self.check_all()
        self.rest()

    def check_all(self) -> None:
        audit(self.memory, len(self.held) + len(self.tier.fetches))
        audit_cpu_tier(self.tier)
        self.check_tree(self.memory.cache, self.pools)
        self.check_tree(self.tier.blocks.cache, self.oracle.blocks[0])

    def rest(self) -> None:
        """Everything ends; then nothing arrives, leaves or is owned by any but the trees."""
        while self.held:
            self.release(self.held.pop(), insert=True)
        self.oracle.end_rate = 1.0
        for _ in range(2000):
            if not (self.tier.has_work or self.oracle.num_in_flight):
                break
            self.move()
        self.check_all()
        for view in self.tier.blocks.views():
            assert view.arriving_blocks == view.leaving_blocks == 0
        assert not self.tier.blocks.copies
        assert not self.tier.blocks.leaving
        assert self.tier.store is None or not self.tier.store.pending
        self.count()
        self.tier.reset()
        self.memory.cache.reset()
        for view in self.tier.blocks.views():
            assert view.free_blocks + view.reserved_blocks == view.total_blocks

    def count(self) -> None:
        self.counts["fetched"] += self.tier.num_fetched_tokens
        self.counts["copied"] += self.tier.num_copied_pages
        if self.tier.store is not None:
            self.counts["loaded"] += self.tier.store.num_loaded_tokens
            self.counts["put"] += self.tier.store.writes.num_blocks


def run_all(groups: str, policy: str, num_steps: int) -> dict[str, int]:
    """Runs of 400 steps each, with seeds from 0; returns the sums of their counts."""
    counts = dict.fromkeys(("fetched", "loaded", "put", "copied"), 0)
    for seed in range(max(num_steps // 400, 1)):
        run = HostRun(groups, policy, seed)
        try:
            run.run(400)
        except BaseException as error:
            error.add_note(f"groups {groups!r}, policy {policy!r}, seed {seed}")
            raise
        for name, value in run.counts.items():
            counts[name] += value
    return counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", GROUPS)
def test_random_events(groups: str, policy: str) -> None:
    counts = run_all(groups, policy, 1200)
    assert counts["fetched"], counts
    assert counts["put"], counts


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", GROUPS)
def test_a_million_random_events(groups: str, policy: str) -> None:
    """`SGL_JAX_STEPS` of them over all cases."""
    num_steps = int(os.environ.get("SGL_JAX_STEPS", "1000000"))
    counts = run_all(groups, policy, num_steps // (len(GROUPS) * len(POLICIES)))
    assert num_steps < 100_000 or all(counts.values()), counts
