"""The rule of lookbacks, sentence by sentence, on prompts small enough to follow by hand.

Pages hold one token here, a prompt is a row of letters, and the model has one layer that attends to
everything and one with a window of three tokens: the query's own, and the two before it.
"""

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.mem_cache.tree.radix_cache import PrefixMatch, RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode

FULL, WINDOW = 0, 1
ROW = 1


class Prompts:
    """A cache, the two pools of its layers, and prompts in letters."""

    def __init__(self) -> None:
        self.pools = [PageAllocator(100, "full"), PageAllocator(100, "window")]
        groups = [CacheGroup(None, FULL), CacheGroup(3, WINDOW)]
        self.cache = RadixCache(groups, self.pools, 1, eviction_policy="lru")

    def keep(self, prompt: str, window_from: int = 0) -> TreeNode:
        """A request computes `prompt`, and has freed its window's pages before `window_from`.

        Its lock stays: the answer is where.
        """
        pages = np.zeros((2, len(prompt)), np.int32)
        pages[FULL] = self.pools[FULL].alloc(len(prompt), ROW)
        pages[WINDOW, window_from:] = self.pools[WINDOW].alloc(len(prompt) - window_from, ROW)
        kept = self.cache.accept(tokens(prompt), LeaseOffer(ROW, pages))
        assert kept is not None
        assert kept.node is not None
        for pool, own, taken in zip(self.pools, pages, kept.pages, strict=True):
            pool.free(own[(own != taken) & (own != 0)], ROW)
        return kept.node

    def publish(self, prompt: str, window_from: int = 0) -> None:
        """As `keep`, and the request ends."""
        self.cache.unlock(self.keep(prompt, window_from))

    def found(self, prompt: str) -> int:
        return self.cache.peek(tokens(prompt))

    def match(self, prompt: str) -> PrefixMatch:
        return self.cache.match_prefix(tokens(prompt))

    def held(self) -> tuple[int, int]:
        """Pages on the tree: full, window."""
        return self.pools[FULL].num_tree, self.pools[WINDOW].num_tree


def tokens(prompt: str) -> np.ndarray:
    return np.array([ord(letter) for letter in prompt], np.int32)


# Position l of a path can be resumed if, for every component, all values in [l - lookback, l) are
# there. A hit is the deepest such l.


def test_a_position_can_be_resumed_if_the_window_before_it_is_there() -> None:
    prompts = Prompts()
    prompts.publish("abcdef", window_from=2)
    assert prompts.found("abcdef") == 6  # reads the window's e, f
    assert prompts.found("abcd") == 4  # c, d
    assert prompts.found("abcx") == 0  # of b, c only c is there


def test_near_the_beginning_a_window_reads_what_there_is() -> None:
    prompts = Prompts()
    prompts.publish("abc")
    assert [prompts.found(prompt) for prompt in ("a", "ab", "abc", "b")] == [1, 2, 3, 0]


# A lease that ends at l locks exactly these intervals, no more and no less, also after splits.


def test_a_lease_locks_the_path_and_its_window() -> None:
    prompts = Prompts()
    prompts.publish("abcdef")
    match = prompts.match("abcde")
    assert match.length == 5
    assert np.count_nonzero(match.pages, axis=1).tolist() == [5, 2]
    assert prompts.cache.num_protected == [5, 2]
    assert prompts.match("abc").length == 3  # splits the edge
    assert prompts.cache.num_protected == [5, 4]  # the window's b, c and d, e


def test_a_lease_may_free_its_passed_window_and_keeps_the_path() -> None:
    prompts = Prompts()
    node = prompts.keep("abcdef")
    prompts.cache.unlock_passed(node, WINDOW, 0, 5)
    assert prompts.cache.num_protected == [6, 1]
    audit_cache(prompts.cache, [(node, [0, 5])])
    prompts.cache.unlock(node, [0, 5])
    assert prompts.cache.num_protected == [0, 0]


# What is unlocked can be freed, value by value, from anywhere for WINDOW, from the leaves up for
# FULL; a value that no reachable position needs is dead and goes first.


def test_windows_go_from_anywhere_and_full_pages_from_the_leaves_up() -> None:
    prompts = Prompts()
    prompts.publish("abcdefghijklmnopqrstuvwxyz")
    prompts.cache.evict(2, WINDOW)
    assert prompts.held() == (26, 24)
    assert prompts.found("abcdefghijklmnopqrstuvwxyz") == 26
    prompts.cache.evict(1, FULL)
    assert prompts.found("abcdefghijklmnopqrstuvwxyz") == 25


def test_a_page_that_no_position_reads_is_freed_at_once() -> None:
    prompts = Prompts()
    node = prompts.keep("abcdef", window_from=2)
    assert prompts.held() == (6, 4)
    prompts.cache.unlock_passed(node, WINDOW, 0, 5)  # only f is locked
    prompts.cache.evict(1, WINDOW)  # c: d, e and e, f are read
    assert (prompts.held(), prompts.found("abcdef")) == ((6, 3), 6)
    prompts.cache.evict(1, WINDOW)  # d: e, f
    assert (prompts.held(), prompts.found("abcdef")) == ((6, 2), 6)
    prompts.cache.evict(1, WINDOW)  # e: no position reads f alone, but a lease holds it
    assert (prompts.held(), prompts.found("abcdef")) == ((6, 1), 0)
    prompts.cache.unlock(node, [0, 5])
    assert prompts.held() == (0, 0)


def test_what_a_lock_held_of_a_broken_window_goes_with_it_also_where_edges_merge() -> None:
    prompts = Prompts()
    upper = prompts.keep("abcd", window_from=2)
    lower = prompts.keep("abcdefgh", window_from=6)
    prompts.cache.unlock_passed(upper, WINDOW, 0, 3)
    prompts.cache.evict(1, WINDOW)  # c, so that nothing reads d, which is locked
    assert prompts.held() == (8, 3)
    prompts.cache.unlock(upper, [0, 3])
    assert prompts.cache.nodes() == [lower]
    assert prompts.held() == (8, 2)


def test_tokens_behind_the_last_position_that_can_be_resumed_are_freed() -> None:
    prompts = Prompts()
    prompts.publish("abcdef", window_from=5)  # f alone is no window
    assert prompts.held() == (0, 0)
    assert not prompts.cache.nodes()


def test_a_match_is_cut_to_an_earlier_position_and_locks_only_the_path_to_it() -> None:
    prompts = Prompts()
    prompts.publish("abcd")
    longer = prompts.keep("abcdefgh", window_from=7)
    assert prompts.found("abcdefgh") == 4
    match = prompts.match("abcdefgh")
    assert match.node is not None
    assert match.node.end == 4
    audit_cache(prompts.cache, [(longer, None), (match.node, None)])
    prompts.cache.unlock(longer)
    assert prompts.cache.num_protected == [4, 2]


# Insert fills what is missing, so a tombstone heals.


def test_a_prompt_computed_again_brings_back_what_was_freed() -> None:
    prompts = Prompts()
    prompts.publish("abcdef", window_from=4)
    assert (prompts.found("abcd"), prompts.held()) == (0, (6, 2))
    prompts.publish("abcd")
    assert (prompts.found("abcd"), prompts.held()) == (4, (6, 6))
    assert prompts.found("abcdef") == 6
