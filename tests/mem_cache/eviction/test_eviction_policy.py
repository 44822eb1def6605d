"""The order in which prefixes leave: what each policy keeps, and what it may cost."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from sgl_jax.mem_cache.eviction.shadow_caches import GHOSTS_PER_PAGE
from sgl_jax.mem_cache.eviction.shadow_pages import NUM_CLASSES
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from tests.mem_cache.cache_loads import (
    Replay,
    conversations,
    excerpt,
    fresh_pages,
    hit_rate,
    moving_working_set,
    scan_and_hot_set,
    system_prompts,
    take,
    uniform_reuse,
)
from tests.mem_cache.drawn_loads import drawn_load, loss
from tests.mem_cache.drawn_mixtures import loss as mixture_loss
from tests.mem_cache.found_loads import FOUND
from tests.mem_cache.tree_model import uses_of_pages

LOADS = [system_prompts, conversations, uniform_reuse, scan_and_hot_set, moving_working_set]


def scan_past_a_hot_prompt(policy: str, num_prompts: int) -> bool:
    """Whether a prompt that came back now and then is held after a scan of so many others."""
    replay, pages = Replay(32, policy), fresh_pages()
    hot = take(pages, 4)
    for _ in range(20):
        replay.serve(hot)
        for _ in range(3):
            replay.serve(take(pages, 8))
    assert replay.holds(hot)
    for _ in range(num_prompts):
        replay.serve(take(pages, 8))
    return replay.holds(hot)


def test_a_scan_does_not_flush_what_is_reused() -> None:
    held = {policy: scan_past_a_hot_prompt(policy, 20) for policy in EVICTION_POLICIES}
    assert held == {"adaptive": True, "lru": False}


def test_what_is_used_no_more_leaves_in_the_end() -> None:
    assert not scan_past_a_hot_prompt("adaptive", 2000)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_returns_is_kept_longer_than_what_never_did(page_size: int) -> None:
    replay = Replay(16, "adaptive", page_size)
    pages = fresh_pages()
    returning = take(pages, 8)
    for _ in range(4):
        replay.serve(returning)
        for _ in range(2):
            replay.serve(take(pages, 8))
    assert replay.holds(returning)


def test_a_prompt_that_returns_in_part_is_a_node_for_each_number_of_uses() -> None:
    replay = Replay(16, "adaptive")
    stem, first, second = [1, 2, 3, 4], [5, 6], [7, 8]
    replay.serve(stem + first)
    replay.cache.evict(6)
    replay.serve(stem + second)
    assert uses_of_pages(replay.cache.tree) == {
        (1,): 1,
        (1, 2): 1,
        (1, 2, 3): 1,
        (1, 2, 3, 4): 1,
        (1, 2, 3, 4, 7): 0,
        (1, 2, 3, 4, 7, 8): 0,
    }
    assert len(replay.cache.nodes()) == 2


def test_a_prompt_is_recalled_however_it_is_divided() -> None:
    """As one insertion, or chunk by chunk below a lock."""
    replay = Replay(20, "adaptive", page_size=4)
    prompt = take(fresh_pages(), 10)
    replay.serve(prompt)
    replay.cache.evict(10)
    for end in (3, 7, 10):
        replay.serve(prompt[:end])
    uses = list(uses_of_pages(replay.cache.tree).values())
    assert sorted(uses) == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


def test_uses_are_counted_up_to_the_last_class() -> None:
    replay = Replay(16, "adaptive")
    for _ in range(NUM_CLASSES + 3):
        replay.serve([1, 2])
    assert set(uses_of_pages(replay.cache.tree).values()) == {NUM_CLASSES - 1}


def test_what_left_too_long_ago_is_forgotten() -> None:
    num_pages = 16
    for num_between, uses in ((GHOSTS_PER_PAGE // 2, 1), (2 * GHOSTS_PER_PAGE, 0)):
        replay = Replay(num_pages, "adaptive")
        pages = fresh_pages()
        early = take(pages, num_pages)
        replay.serve(early)
        for _ in range(num_between):
            replay.serve(take(pages, num_pages))
        replay.serve(early)
        assert set(uses_of_pages(replay.cache.tree).values()) == {uses}


def test_lru_counts_no_uses_and_keeps_what_was_used_last() -> None:
    replay = Replay(8, "lru")
    for prompt in ([1, 2], [1, 2], [1, 2], [3, 4], [5, 6], [7, 8], [9, 10]):
        replay.serve(prompt)
    assert not replay.holds([1])
    assert all(replay.holds(prompt) for prompt in ([3, 4], [5, 6], [7, 8], [9, 10]))
    assert set(uses_of_pages(replay.cache.tree).values()) == {0}


def test_a_reset_forgets_how_prompts_were_used() -> None:
    replay = Replay(16, "adaptive")
    prompts, seen = scan_and_hot_set()[:100], []
    for _ in range(2):
        hits = [replay.serve(prompt) for prompt in prompts]
        seen.append((hits, uses_of_pages(replay.cache.tree)))
        replay.cache.reset()
        audit_cache(replay.cache, [])
    assert seen[0] == seen[1]
    replay.serve(prompts[-1][:4])
    assert set(uses_of_pages(replay.cache.tree).values()) == {0}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_same_requests_leave_the_same_tree(policy: str) -> None:
    kept = []
    for _ in range(2):
        replay = Replay(60, policy)
        hits = [replay.serve(prompt) for prompt in system_prompts()[:200]]
        kept.append((hits, uses_of_pages(replay.cache.tree)))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("num_pages", [40, 160])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_adaptive_never_serves_much_less_than_lru(load: object, num_pages: int) -> None:
    assert callable(load)
    prompts = load()
    adaptive, lru = (hit_rate(prompts, num_pages, policy) for policy in EVICTION_POLICIES)
    assert adaptive >= lru - 0.015


# Loads on which other leads of a new leading policy, early or late, lost .022 to .045.
# On 102 and 1016, LFU loses to LRU for some turnovers, but not on the whole.
@pytest.mark.parametrize("seed", [102, 265, 356, 538, 1016, 1378, 1676, 3405])
def test_adaptive_follows_a_better_order_neither_too_soon_nor_too_late(seed: int) -> None:
    assert loss(drawn_load(seed)) <= 0.02


@pytest.mark.parametrize("seed", [14, 31, 44, 57])
def test_adaptive_never_serves_much_less_than_lru_or_lfu(seed: int) -> None:
    assert loss(replace(drawn_load(seed), num_pages=40)) <= 0.02


@pytest.mark.long
@pytest.mark.parametrize("first", [200, 230, 260])
def test_drawn_loads_are_served_about_as_well_as_by_lru_or_lfu(first: int) -> None:
    losses = [loss(drawn_load(seed)) for seed in range(first, first + 30)]
    assert max(losses) <= 0.02
    assert sum(losses) <= 0


@pytest.mark.parametrize("seed", [31, 32])
def test_a_drawn_mixture_is_served_about_as_well_as_by_lru(seed: int) -> None:
    assert mixture_loss(seed) <= 0.002


@pytest.mark.long
def test_few_drawn_mixtures_lose_to_lru_and_none_loses_much() -> None:
    losses = [mixture_loss(seed) for seed in range(30)]
    assert max(losses) <= 0.01
    assert sum(each > 0.002 for each in losses) <= 4
    assert sum(losses) / len(losses) <= -0.01


@pytest.mark.long
def test_loads_found_by_search_lose_little() -> None:
    assert max(map(loss, FOUND)) <= 0.02


@pytest.mark.parametrize(("load", "gain"), [(system_prompts, 0.08), (scan_and_hot_set, 0.05)])
def test_adaptive_serves_more_where_some_prompts_are_read_once(load: object, gain: float) -> None:
    assert callable(load)
    prompts = load()
    assert hit_rate(prompts, 80, "adaptive") >= hit_rate(prompts, 80, "lru") + gain


@pytest.mark.parametrize(
    ("num_blocks", "floor", "gain"),
    [(800, 0.044, 0.008), (1500, 0.049, 0.008), (3000, 0.060, -0.01)],
)
def test_recorded_traffic_is_served_better(num_blocks: int, floor: float, gain: float) -> None:
    prompts = excerpt()
    adaptive, lru = (hit_rate(prompts, num_blocks, policy) for policy in EVICTION_POLICIES)
    assert adaptive >= floor
    assert adaptive >= lru + gain


def test_the_counts_of_long_ago_fade() -> None:
    """A hundred times what the cache holds has left: its counts are of the last few times."""
    policy = AdaptivePolicy(num_pages=8, page_size=1)
    replay = Replay(8, "adaptive")
    replay.cache._full._policy = replay.cache.tree.policy = policy
    pages = fresh_pages()
    for _ in range(200):
        replay.serve(take(pages, 8))
    assert policy._num_left[0] <= 2 * 8 * 8 + 8


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eviction_policy must be one of .*adaptive.* got 'lfu'"):
        RadixCache(FULL_ATTENTION, [PageAllocator(4)], 1, eviction_policy="lfu")


def test_an_audit_finds_a_leaf_that_would_never_be_chosen() -> None:
    for policy in EVICTION_POLICIES:
        replay = Replay(8, policy)
        replay.serve([1, 2])
        audit_cache(replay.cache, [])
        replay.cache.nodes()[0].last_access += 1
        with pytest.raises(LedgerError, match=r"does not list TreeNode.* at its age"):
            audit_cache(replay.cache, [])


def test_an_audit_finds_a_leaf_in_a_class_that_is_not_its_own() -> None:
    replay = Replay(8, "adaptive")
    replay.serve([1, 2])
    replay.cache.nodes()[0].num_uses += 1
    with pytest.raises(LedgerError, match="membership of the eviction set is wrong"):
        audit_cache(replay.cache, [])


def test_eviction_page_by_page_takes_the_tail_of_an_edge_first() -> None:
    for policy in EVICTION_POLICIES:
        replay = Replay(8, policy)
        replay.serve([1, 2, 3, 4])
        for left in (3, 2, 1, 0):
            assert replay.cache.evict(1) == 1
            found = replay.cache.peek(np.array([1, 2, 3, 4], np.int32))
            assert found == left
