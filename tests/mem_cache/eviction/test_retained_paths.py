"""Hints of clients: which of their own paths they keep or give up, and that others lose nothing."""

from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.eviction.adaptive_policy import AdaptivePolicy
from sgl_jax.mem_cache.eviction.path_records import FIRST_CLASS, REPLACED, PathEnd
from sgl_jax.mem_cache.eviction.retained_paths import MAX_KEEP_S
from sgl_jax.mem_cache.eviction.shadow_pages import NUM_CLASSES, RETURN
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.mem_cache.tree_node import TreeNode

PAGE = 4
PROMPT_PAGES = 4


class Cache:
    """A rank's cache of 32 pages that follows expected returns from the beginning."""

    def __init__(self, num_pages: int = 32) -> None:
        sizes = EngineSizes(
            dp_size=1,
            page_size=PAGE,
            pool_pages=(1 + num_pages,),
            num_rows=2,
            max_context_len=PAGE * num_pages,
            max_step_tokens=PAGE * num_pages,
            max_prompt_logprob_tokens=1,
            vocab_size=1 << 20,
        )
        self.memory = RankMemory(0, sizes)
        self.tree = self.memory.cache.tree
        self.policy = policy = cast(AdaptivePolicy, self.tree.policy)
        policy._shadows._states["leading_policy"] = RETURN
        policy._shadows.leading_policy, policy._shadows.has_changed = RETURN, True
        policy._follow(None)
        self.now_s = 0.0

    def serve(self, tokens: np.ndarray, after_s: float = 1.0, **end: Any) -> int:
        """Compute a prompt, which ends at once; return its cached tokens."""
        self.now_s += after_s
        self.memory.tick(self.now_s)
        lease = self.memory.open_lease(tokens[:-1])
        num_cached = lease.kv_committed_len
        rows, lens = np.array([lease.row]), np.array([len(tokens)], np.int32)
        assert self.memory.grow_rows(rows, lens)
        self.memory.commit_rows(rows, lens)
        path_end = PathEnd(len(tokens), self.now_s, **end)
        release_kv_cache(self.memory, lease, tokens, insert=True, end=path_end)
        check_balance(self.memory, 0)
        return num_cached

    def num_cached(self, tokens: np.ndarray) -> int:
        return self.memory.cache.peek(tokens) // PAGE

    def leaf(self, tokens: np.ndarray) -> TreeNode:
        return next(
            node for node in self.tree.nodes() if not node.children and node.key[-1] == tokens[-1]
        )

    def audit(self) -> None:
        audit(self.memory, 0)


def prompt(number: int, num_pages: int = PROMPT_PAGES) -> np.ndarray:
    return np.arange(1000 * number, 1000 * number + num_pages * PAGE, dtype=np.int32)


def fill(cache: Cache, numbers: range, **end: Any) -> None:
    for number in numbers:
        cache.serve(prompt(number), **end)


def test_a_retained_path_stays_until_its_time_in_place_of_others_of_its_tenant() -> None:
    for keep_s, is_kept in ((0.0, False), (300.0, True), (15.0, False), (5.0, False)):
        cache = Cache()
        cache.serve(prompt(0), tenant="a", keep_s=keep_s)
        fill(cache, range(1, 31), tenant="a")  # four times the cache, in 30 s
        assert (cache.num_cached(prompt(0)) == PROMPT_PAGES) == is_kept
        cache.audit()
        pages = cache.policy.retained_pages
        assert (pages["retained_pages_exchanged"] > 0) == (keep_s > 5.0)


def test_of_paths_that_are_all_retained_as_long_the_same_ones_go_as_of_others() -> None:
    order = []
    for keep_s in (0.0, 300.0):
        cache, rng, gone = Cache(), Random(1), []
        for number in range(40):
            cache.serve(prompt(number), tenant="a", keep_s=keep_s, is_final=rng.random() < 0.3)
            gone.append([each for each in range(number) if not cache.num_cached(prompt(each))])
        order.append(gone)
        assert cache.policy.retained_pages["retained_pages_exchanged"] == 0
    assert order[0] == order[1]
    assert cache.policy.retained_pages["retained_pages_evicted"] > 0


def test_a_retention_that_has_ended_counts_no_more_although_its_path_was_not_used_again() -> None:
    for after_s, goes_first in ((400.0, 0), (100.0, 7)):
        cache = Cache()
        fill(cache, range(7), tenant="a", keep_s=300.0)
        cache.serve(prompt(7), after_s, tenant="a", keep_s=300.0, pause_s=86_400.0)
        cache.audit()
        assert cache.memory.cache.evict(1)
        gone = [number for number in range(8) if cache.num_cached(prompt(number)) < PROMPT_PAGES]
        assert gone == [goes_first]
        cache.audit()


def test_a_retention_that_was_renewed_ends_at_its_new_time() -> None:
    cache = Cache()
    for after_s in (0.0, 200.0):
        cache.serve(prompt(0), after_s, tenant="a", keep_s=300.0)
    cache.serve(prompt(1), tenant="a", keep_s=300.0)
    cache.serve(prompt(2), after_s=150.0, tenant="a", keep_s=300.0, pause_s=86_400.0)
    assert cache.memory.cache.evict(1)
    assert [cache.num_cached(prompt(number)) for number in range(3)] == [4, 4, 3]
    cache.audit()


def test_longer_retention_outlasts_shorter_and_an_hour_is_the_most() -> None:
    cache = Cache()
    cache.serve(prompt(0), tenant="a", keep_s=1e300)
    kept = cache.leaf(prompt(0)).retention
    assert kept is not None
    assert kept.until_s == cache.now_s + MAX_KEEP_S
    fill(cache, range(1, 20), tenant="a", keep_s=300.0)
    assert cache.num_cached(prompt(0)) == PROMPT_PAGES
    cache.serve(prompt(20), after_s=MAX_KEEP_S, tenant="a", keep_s=300.0)
    fill(cache, range(21, 30), tenant="a", keep_s=300.0)
    assert not cache.num_cached(prompt(0))


def test_a_use_without_a_hint_shortens_no_retention_but_the_end_of_its_conversation_does() -> None:
    for last, is_kept in (({}, True), ({"keep_s": 5.0}, True), ({"is_last": True}, False)):
        cache = Cache()
        cache.serve(prompt(0), tenant="a", keep_s=300.0)
        cache.serve(prompt(0), tenant="a", is_final=True, **last)
        fill(cache, range(1, 31), tenant="a")
        assert (cache.num_cached(prompt(0)) == PROMPT_PAGES) == is_kept, last
        cache.audit()


def test_the_end_of_a_conversation_leaves_the_retention_of_what_others_use() -> None:
    beginning = prompt(0)
    first, second = (np.concatenate([beginning, prompt(number)]) for number in (1, 2))
    cache = Cache()
    cache.serve(beginning, tenant="a", keep_s=3600.0)
    cache.serve(first, tenant="a", is_final=True)
    cache.serve(second, tenant="a", is_last=True)
    fill(cache, range(3, 31), tenant="a")
    assert cache.num_cached(first) == PROMPT_PAGES
    cache.audit()


def test_a_tenant_pays_for_its_retained_pages_with_as_many_of_its_own() -> None:
    """All prompts are new, so hints do not change what is computed."""
    held: list[list[int]] = []
    for hints in (False, True):
        cache, rng, counts = Cache(160), Random(2), []
        for number in range(700):
            tenant, keep_s = "ab"[rng.random() < 0.5], rng.choice([0.0, 20.0, 300.0, 3600.0])
            pages, is_final = rng.randint(1, 6), rng.random() < 0.3
            hinted = {"keep_s": keep_s} if hints and tenant == "a" else {}
            cache.serve(prompt(number, pages), 5.0, tenant=tenant, is_final=is_final, **hinted)
            retentions = ((node.retention, node.page_hashes) for node in cache.tree.nodes())
            counts.append(sum(len(pages) for kept, pages in retentions if kept and kept[0] == "b"))
        cache.audit()
        held.append(counts)
    of_other, of_other_hinted = np.mean(held, axis=1)
    assert of_other <= of_other_hinted <= 1.05 * of_other
    assert cache.policy.retained_pages["retained_pages_exchanged"] > 500


Hints = Callable[[Random], dict[str, Any]]
HINTS: dict[str, Hints] = {
    "none": lambda rng: {},
    "an hour for all": lambda rng: {"keep_s": 3600.0},
    "half": lambda rng: {"keep_s": rng.choice([0.0, 3600.0])},
    "some times": lambda rng: {"keep_s": rng.choice([0.0, 0.0, 20.0, 300.0, 3600.0])},
    "short pauses": lambda rng: {"pause_s": 1.0},
    "no return": lambda rng: {"is_last": True},
    "all kinds": lambda rng: {
        "keep_s": rng.choice([0.0, 300.0, 1e300]),
        "pause_s": rng.choice([None, 0.0, 8.0, 86_400.0]),
        "is_last": rng.random() < 0.1,
    },
}


def found_by_tenant(hints: Hints, num_requests: int, seed: int = 3) -> dict[str, float]:
    """Serve agents of two tenants, whose histories exceed the memory, and with the hints of one;
    return the share of its prompts' pages that each found."""
    rng, drawn, ids = Random(seed), Random(seed), iter(range(1 << 18))
    paths = [[next(ids) for _ in range(rng.randint(8, 40))] for _ in range(40)]
    due = [(rng.uniform(0, 60), agent) for agent in range(40)]
    cache, found, sent = Cache(400), {"a": 0, "b": 0}, {"a": 0, "b": 0}
    for _ in range(num_requests):
        due.sort()
        now_s, agent = due.pop(0)
        tenant = "ab"[agent % 2]
        path = paths[agent] = paths[agent][:-1] + [next(ids) for _ in range(rng.randint(2, 3))]
        hinted = hints(drawn) if tenant == "a" else {}
        tokens = np.repeat(np.array(path, np.int32), PAGE)
        after_s = max(now_s - cache.now_s, 0.0)
        found[tenant] += cache.serve(
            tokens, after_s, tenant=tenant, agent=("", str(agent)), **hinted
        )
        sent[tenant] += len(tokens)
        if len(path) > 60:
            paths[agent] = [next(ids) for _ in range(10)]
        due.append((now_s + rng.lognormvariate(5.3 if agent % 3 == 0 else 2.3, 0.7), agent))
    cache.audit()
    return {tenant: found[tenant] / sent[tenant] for tenant in found}


@pytest.mark.parametrize(
    ("name", "num_requests"),
    [
        ("half", 800),
        *(pytest.param(name, 2000, marks=pytest.mark.long) for name in HINTS if name != "none"),
    ],
)
def test_the_hints_of_one_tenant_cost_another_no_hits(name: str, num_requests: int) -> None:
    without = found_by_tenant(HINTS["none"], num_requests)["b"]
    hinted = found_by_tenant(HINTS[name], num_requests)["b"]
    assert hinted >= 0.97 * without > 0.25


def test_the_end_of_a_conversation_releases_what_no_other_path_uses() -> None:
    cache = Cache()
    shared, own = prompt(1), np.concatenate([prompt(1), prompt(2)])
    other = np.concatenate([prompt(1), prompt(3)])
    cache.serve(other, tenant="a")
    cache.serve(own, tenant="a", is_last=True)
    released = cache.leaf(prompt(2))
    assert released.return_class == REPLACED
    assert released.parent is not None
    assert released.parent.return_class == cache.leaf(prompt(3)).return_class == FIRST_CLASS
    fill(cache, range(10, 16), tenant="a")
    assert cache.num_cached(own) == cache.num_cached(shared) == PROMPT_PAGES
    assert cache.num_cached(other) == 2 * PROMPT_PAGES
    assert len(cache.policy._records) == 7  # without the one that ended


def test_hints_do_not_count_for_pages_that_others_use() -> None:
    for first in ("b", ""):
        cache = Cache()
        cache.serve(prompt(1), tenant=first, is_expected=bool(first))
        longer = np.concatenate([prompt(1), prompt(2)])
        cache.serve(longer, tenant="a", is_last=True)
        inner = cache.leaf(prompt(2)).parent
        assert inner is not None
        assert inner.return_class == FIRST_CLASS
        cache.serve(longer, tenant="a", pause_s=86_400.0, keep_s=3600.0)
        assert inner.return_class == FIRST_CLASS
        assert inner.retention is not None
        assert inner.retention.holder is None
        cache.serve(prompt(1), tenant="a", is_last=True)
        assert inner.return_class == FIRST_CLASS


def test_hints_count_below_pages_that_others_used() -> None:
    """Once no other path goes on from the shared pages, they are still no part of the leaf."""
    cache = Cache()
    shared, own = prompt(1, 2), prompt(2, 6)
    other, longer = (np.concatenate([shared, end]) for end in (prompt(3), own))
    cache.serve(other, tenant="b")
    for _ in range(NUM_CLASSES):  # until both parts count as used equally often
        cache.serve(longer, tenant="a", keep_s=3600.0)
    while cache.num_cached(other) > 2:
        assert cache.memory.cache.evict(1)
    assert cache.num_cached(longer) == 8
    inner = cache.leaf(own).parent  # each turn computes the last page again
    assert inner is not None
    assert inner.holder == "a"
    assert inner.parent is not None
    assert inner.parent.is_shared
    cache.audit()
    cache.serve(np.concatenate([longer, prompt(5)]), tenant="b")
    assert inner.is_shared
    assert inner.parent is cache.tree.root, "now all pages are"
    cache.audit()


def test_ends_of_retentions_that_are_renewed_take_no_more_memory() -> None:
    cache = Cache()
    for _ in range(500):
        for number in range(3):
            cache.serve(prompt(number), tenant="a", keep_s=3600.0)
    assert len(cache.policy._retained._ends) < 100
    cache.audit()


def test_a_replaced_path_that_another_tenant_has_too_keeps_its_place() -> None:
    for other, is_replaced in (("a", True), ("b", False)):
        cache, agent = Cache(), ("", "x")
        cache.serve(prompt(1), tenant=other, agent=("", "y"))
        cache.serve(prompt(1), tenant="a", agent=agent)
        cache.serve(np.concatenate([prompt(1, 1), prompt(2)]), tenant="a", agent=agent)
        former = cache.leaf(prompt(1))
        assert (former.return_class == REPLACED) == is_replaced
        cache.policy._follow(cache.policy._shadows.read())
        page_hash = int(former.page_hashes.view(np.int64)[-1])
        assert (cache.policy._shadows.num_uses(page_hash) == REPLACED) == is_replaced


def test_agents_without_a_tenant_keep_nothing_in_place_of_each_others_paths() -> None:
    cache = Cache()
    cache.serve(prompt(0), agent=("", "x"), keep_s=3600.0)
    for number in range(1, 12):
        cache.serve(prompt(number), agent=("", str(number)))
    assert not cache.num_cached(prompt(0))


@pytest.mark.parametrize("is_family", [False, True])
def test_conversations_of_a_family_are_told_apart_by_their_prompts(is_family: bool) -> None:
    """They begin with the same page, so one agent's id would make them one conversation."""
    cache, agent = Cache(64), ("", "k")
    ends = [np.concatenate([prompt(1, 1), prompt(number, 8)]) for number in (2, 3)]
    for tokens in ends:
        cache.serve(tokens, agent=agent, is_family=is_family)
    assert (cache.leaf(prompt(2, 8)).return_class == REPLACED) == (not is_family)
