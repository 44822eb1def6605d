"""Snapshots of states on the tree, on prompts small enough to follow by hand.

Four of these tests are defects that another engine had when it began to cache states (LightLLM,
pull request 1348): the root among what may be evicted, locks of the root by matches that found
nothing and by matches cut to nothing, and snapshots of a prompt that was paused or aborted.
"""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.radix_cache import PrefixMatch, RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.state_requests import Device, make_memory, numbers
from tests.mem_cache.tree_model import check_shape

FULL, STATES = 0, 1
ROW = 1


class Prompts:
    """A cache with pages of one token, prompts in letters; a capital is kept a snapshot after."""

    def __init__(self, policy: str = "lru", num_snapshots: int = 100) -> None:
        self.pools = [PageAllocator(100, "full"), PageAllocator(1 + num_snapshots, "states")]
        groups = [CacheGroup(None, FULL), CacheGroup(LAST_VALUE, STATES, (), True)]
        self.cache = RadixCache(groups, self.pools, 1, eviction_policy=policy)

    def keep(self, prompt: str) -> TreeNode:
        """A request computes `prompt`, and its lock stays: the answer is where."""
        pages = np.zeros((2, len(prompt)), np.int32)
        pages[FULL] = self.pools[FULL].alloc(len(prompt), ROW)
        is_kept = np.array([letter.isupper() for letter in prompt])
        pages[STATES, is_kept] = self.pools[STATES].alloc(int(is_kept.sum()), ROW)
        kept = self.cache.accept(tokens(prompt), LeaseOffer(ROW, pages))
        assert kept is not None
        assert kept.node is not None
        for pool, own, taken in zip(self.pools, pages, kept.pages, strict=True):
            pool.free(own[(own != taken) & (own != 0)], ROW)
        return kept.node

    def publish(self, prompt: str) -> None:
        """As `keep`, and the request ends."""
        self.cache.unlock(self.keep(prompt))

    def found(self, prompt: str) -> int:
        return self.cache.peek(tokens(prompt))

    def match(self, prompt: str) -> PrefixMatch:
        return self.cache.match_prefix(tokens(prompt))

    def held(self) -> tuple[int, int]:
        """On the tree: pages, snapshots."""
        return self.pools[FULL].num_tree, self.pools[STATES].num_tree

    def is_untouched(self, num_locks: int = 0) -> bool:
        """Whether the root is neither locked nor to be evicted, and so many locks are held."""
        tree, policy = self.cache.tree, self.cache.tree.policy
        check_shape(tree)
        assert tree.resumable is not None
        listed = [item.node for _, item in tree.resumable.windows[0].order.oldest()]
        return (
            tree.root not in policy
            and tree.root not in listed
            and self.cache.num_locks == num_locks
        )


def tokens(prompt: str) -> np.ndarray:
    return np.array([ord(letter) for letter in prompt.lower()], np.int32)


# -- the rule -------------------------------------------------------------------------------------


def test_a_prefix_is_found_as_far_as_there_is_a_snapshot() -> None:
    prompts = Prompts()
    prompts.publish("abCdeF")
    assert [prompts.found(prompt) for prompt in ("abcdef", "abcde", "abc", "ab")] == [6, 3, 3, 0]


def test_tokens_behind_the_last_snapshot_are_freed_when_nobody_holds_them() -> None:
    prompts = Prompts()
    node = prompts.keep("abCdef")
    assert prompts.held() == (6, 1)
    prompts.cache.unlock(node)
    assert prompts.held() == (3, 1)
    prompts.publish("xyz")
    assert prompts.held() == (3, 1)


def test_a_match_locks_one_snapshot_and_the_path_to_it() -> None:
    prompts = Prompts()
    prompts.publish("aBcDeF")
    match = prompts.match("abcdeX")
    assert (match.length, np.count_nonzero(match.pages, axis=1).tolist()) == (4, [4, 1])
    assert prompts.cache.num_protected == [4, 1]
    prompts.match("ab")
    assert prompts.cache.num_protected == [4, 2]
    assert prompts.cache.evict(9, STATES) == 1


def test_a_prompt_that_is_computed_again_brings_a_snapshot_where_there_was_none() -> None:
    prompts = Prompts()
    prompts.publish("abcdeF")
    assert prompts.found("abcx") == 0
    prompts.publish("abCx")
    assert (prompts.found("abcx"), prompts.held()) == (3, (6, 2))


def test_a_snapshot_leaves_and_its_path_stays_for_the_next_one() -> None:
    prompts = Prompts()
    prompts.publish("abCdeF")
    assert prompts.cache.evict(1, STATES) == 1
    assert prompts.held()[1] == 1
    prompts.cache.evict(1, STATES)
    assert prompts.held() == (0, 0)


def test_what_a_conversation_went_past_leaves_before_what_prompts_branch_from() -> None:
    prompts = Prompts()
    for prompt in ("abcdeF", "abcdeFgH", "xyZuvW", "xyZrsT"):
        prompts.publish(prompt)
    assert prompts.cache.evict(1, STATES) == 1
    assert [prompts.found(prompt) for prompt in ("xyzq", "abcdefq", "abcdefgh")] == [3, 0, 8]


def test_inner_snapshots_leave_before_the_end_of_an_older_path() -> None:
    prompts = Prompts("adaptive")
    for prompt in ("pqrstU", "aBcDe", "xYz", "xYzuV"):
        prompts.publish(prompt)
    assert prompts.cache.evict(2, STATES) == 2
    found = [prompts.found(prompt) for prompt in ("abcq", "abcdeq", "pqrstuq", "xyzuvq")]
    assert found == [0, 4, 6, 5]


def test_where_prompts_branch_outlasts_a_younger_end() -> None:
    prompts = Prompts()
    for prompt in ("xyZuvW", "xyZrsT"):
        prompts.publish(prompt)
    for prompt in ("xyzuvw", "xyzrst"):  # read after the branch was
        node = prompts.match(prompt).node
        assert node is not None
        prompts.cache.unlock(node)
    assert prompts.cache.evict(1, STATES) == 1
    assert [prompts.found(prompt) for prompt in ("xyzq", "xyzuvwq", "xyzrstq")] == [3, 3, 6]


# -- four defects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("pool", [FULL, STATES])
def test_the_root_is_never_among_what_may_be_evicted(policy: str, pool: int) -> None:
    prompts = Prompts(policy)
    for _ in range(2):
        prompts.publish("abCdeF")
        prompts.publish("abXyZ")
        prompts.cache.evict(100, pool)
        assert prompts.held() == (0, 0)
        assert prompts.is_untouched()
        assert prompts.cache.evict(1, pool) == 0


def test_a_match_that_finds_nothing_locks_nothing() -> None:
    prompts = Prompts()
    holder = prompts.keep("abcd")
    for prompt in ("xyz", "abcd", "", "abx"):
        match = prompts.match(prompt)
        assert (match.length, match.node) == (0, None)
    assert prompts.is_untouched(num_locks=1)
    prompts.cache.unlock(holder)
    assert prompts.held() == (0, 0)


def test_a_match_cut_to_an_earlier_snapshot_holds_that_alone_and_none_of_the_root() -> None:
    prompts = Prompts()
    holder = prompts.keep("aBcd")
    match = prompts.match("abcd")
    assert match.node is not None
    assert (match.length, match.node.end) == (2, 2)
    prompts.cache.evict(100, STATES)  # locked
    assert prompts.found("abcd") == 2
    prompts.cache.unlock(match.node)
    prompts.cache.evict(100, STATES)
    match = prompts.match("abcd")  # cut to the root
    assert (match.length, match.node) == (0, None)
    assert prompts.is_untouched(num_locks=1)
    prompts.cache.unlock(holder)
    assert prompts.is_untouched()
    assert prompts.held() == (0, 0)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("is_published_before", [False, True])
def test_what_a_prompt_crossed_before_it_was_aborted_is_found_and_nothing_leaks(
    page_size: int, is_published_before: bool
) -> None:
    device = Device(make_memory(page_size))
    request = device.open(numbers())
    device.prefill(request, 14)
    if is_published_before:
        device.publish(request)
    device.prefill(request, 27, keep=(16, 24))
    device.end(request)  # aborted, paused or retracted in its prompt
    device.check(num_running=0)
    assert device.memory.cache.peek(numbers()) == 24
    again = device.open(numbers())
    assert again.lease.kv_committed_len == 24
    device.prefill(again, 40)
    device.end(again, insert=False)
    device.memory.cache.reset()
    allocator = device.memory.allocators[STATES]
    assert allocator.num_free == allocator.num_pages - 1
