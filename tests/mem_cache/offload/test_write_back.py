"""Under write-back, host memory gets all that the device's cache stops serving.

Prompts come one after another. What write-through finds, on the device or on the host, write-back
finds, too, for every kind of cache.
"""

from collections.abc import Iterable

import numpy as np
import pytest

from benchmarks.trace.recurrent import StatesReplay
from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import TransferEnd
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.offload.cpu_ledger import audit_cpu_tier
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.rank_memory import RankMemory
from tests.support.long import long_but

PAGE = 16
INTERVAL = 32
STATES = (CacheGroup(None), CacheGroup(LAST_VALUE, 1, (), True))
GROUPS = {
    "full": FULL_ATTENTION,
    "states": STATES,
    "a window": (*FULL_ATTENTION, CacheGroup(40, 1)),
    "a window and states": (
        CacheGroup(None),
        CacheGroup(40, 1),
        CacheGroup(LAST_VALUE, 2, (), True),
    ),
}


class HostReplay(StatesReplay):
    """The memory of a rank and its host memory; copies and fetches end before the next step."""

    def __init__(self, groups: tuple[CacheGroup, ...], policy: str, pools: tuple[int, ...]) -> None:
        super().__init__(64, 8, PAGE, 4096, interval=INTERVAL)
        self.sizes = self.sizes._replace(
            groups=groups,
            pool_pages=pools,
            host_blocks=tuple(1 + 12 * (pages - 1) for pages in pools),
        )
        self.memory = RankMemory(0, self.sizes)
        self.tier = CpuTier(self.memory, policy, "lru", loads_all=True)

    def serve(self, tokens: Int32Array) -> int:
        if self.tier.begin_fetch(tokens[:-1], "") is not None:
            self.end_transfers()
        found = super().serve(tokens)
        self.end_transfers()
        return found

    def end_transfers(self) -> None:
        taken = self.tier.take()
        for move in (*taken.copies, *taken.fetches):
            self.tier.ended(TransferEnd(0, move.number, True, 0.01))
        audit(self.memory, 0)
        audit_cpu_tier(self.tier)


def conversations(count: int, turns: int, growth: int) -> Iterable[Int32Array]:
    """Prompts of conversations that take turns, and now and then begin again at an earlier turn."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 50_000, 200 + turns * growth).astype(np.int32) for _ in range(count)]
    for turn in range(turns):
        for text in texts:
            yield text[: 129 + turn * growth]
        if turn:
            other = texts[turn % count][: 129 + (turn - 1) * growth].copy()
            other[-10:] += 60_000
            yield other


@pytest.mark.parametrize("groups", long_but(GROUPS, "full", "states"))
def test_write_back_finds_what_write_through_finds(groups: str) -> None:
    pools = {"full": (97,), "states": (513, 13), "a window": (97, 33)}.get(groups, (97, 33, 13))
    prompts = list(conversations(16, 4, 48))
    found = {}
    for policy in ("write_through", "write_back"):
        replay = HostReplay(GROUPS[groups], policy, pools)
        found[policy] = sum(map(replay.serve, prompts))
    assert found["write_through"] > 0.6 * sum(map(len, prompts[16:]))
    assert found["write_back"] >= 0.99 * found["write_through"]


def test_states_that_are_evicted_alone_are_on_the_host() -> None:
    """Pages suffice, and only snapshots are short: each prompt is found the second time."""
    replay = HostReplay(STATES, "write_back", (513, 13))
    prompts = list(conversations(16, 1, 0))
    assert sum(map(replay.serve, prompts)) == 0
    assert sum(map(replay.serve, prompts)) == 16 * 128


def test_a_snapshot_before_a_copy_in_flight_that_the_host_lacks_is_copied() -> None:
    replay = HostReplay(STATES, "write_back", (513, 13))
    tokens = np.arange(161, dtype=np.int32)
    replay.serve(tokens)
    tier, cache = replay.tier, replay.memory.cache
    node = cache.find(tokens)[0]
    tier.before_eviction(node, 96)
    replay.end_transfers()
    on_host = tier.blocks.cache.num_evictable[1]
    assert tier.blocks.cache.evict(on_host - 1, 1) == on_host - 1
    assert tier.blocks.cache.peek(tokens, "") == 96, "only the last snapshot is left"
    tier.before_eviction(node, 160)
    tier.before_eviction(node, 64)
    replay.end_transfers()
    assert tier.blocks.cache.peek(tokens[:65], "") == 64


class SlowReplay(HostReplay):
    """As before, but no copy ends."""

    num_copied = 0

    def end_transfers(self) -> None:
        self.num_copied += sum(len(move.pages[0]) for move in self.tier.take().copies)


def test_prefixes_in_flight_are_not_copied_again_and_again() -> None:
    replay = SlowReplay(GROUPS["a window"], "write_back", (1537, 97))
    rng = np.random.default_rng(5)
    for _ in range(16):
        replay.serve(rng.integers(0, 50_000, 1536).astype(np.int32))
    assert 256 <= replay.num_copied <= 256 + 16 * 96
