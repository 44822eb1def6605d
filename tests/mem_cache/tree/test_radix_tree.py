"""The shape of the tree: splits, siblings, ages. Content and eviction: see test_radix_cache."""

import numpy as np

from sgl_jax.core.engine_sizes import FULL_ATTENTION
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer, LockedEnd
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.tree_model import check_shape, shape_of, tokens_to


class Tree:
    """A tree of FULL attention with pages of two tokens."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(100)
        self.cache = RadixCache(FULL_ATTENTION, [self.allocator], 2, eviction_policy="lru")
        self.tree, self.full = self.cache.tree, self.cache._full

    def insert(self, *tokens: int) -> TreeNode:
        array = np.array(tokens, np.int32)
        offered = self.allocator.alloc(len(tokens) // 2, 1)
        node = self.cache._insert(array, LeaseOffer(1, offered[None]), self.tree.root)[0]
        kept = self.full.pages_of(self.tree.path_to(node))
        self.allocator.free(offered[offered != kept], 1)
        check_shape(self.tree)
        return node

    def match(self, *tokens: int) -> TreeNode | None:
        return self.cache.match_prefix(np.array(tokens, np.int32)).node


def test_a_sequence_becomes_one_edge() -> None:
    tree = Tree()
    node = tree.insert(1, 2, 3, 4, 5, 6)
    assert list(tree.tree.nodes()) == [node]
    assert node.end == 6


def test_siblings_differ_in_their_first_page_even_if_they_share_a_token() -> None:
    tree = Tree()
    first, second = tree.insert(1, 2, 3, 4), tree.insert(1, 2, 3, 5)
    assert first.parent is second.parent
    assert first.parent is not tree.tree.root
    assert tokens_to(first.parent) == (1, 2)


def test_a_split_leaves_the_lower_node_its_identity_and_gives_the_upper_one_its_locks() -> None:
    tree = Tree()
    lower = tree.match(1, 2) or tree.insert(1, 2, 3, 4, 5, 6)
    tree.cache._lock(lower)
    upper = tree.match(1, 2, 3, 4, 9, 9)
    assert upper is lower.parent
    assert lower.end == 6
    assert lower.locks == [1]
    assert upper.locks == [2]
    assert len(lower.values[0]) == 1
    assert len(upper.values[0]) == 2
    tree.full.audit(list(tree.tree.nodes()), [LockedEnd(lower), LockedEnd(upper)])


def test_a_match_covers_whole_pages_only() -> None:
    tree = Tree()
    tree.insert(1, 2, 3, 4)
    node = tree.match(1, 2, 3)
    assert node is not None
    assert node.end == 2


def test_a_match_renews_the_path_and_a_peek_does_not() -> None:
    tree = Tree()
    old, young = tree.insert(1, 2, 3, 4), tree.insert(7, 8)
    assert old.last_access < young.last_access
    before = shape_of(tree.tree)
    assert tree.cache.find(np.array([1, 2, 3, 4], np.int32)) == (old, 4)
    assert shape_of(tree.tree) == before
    tree.match(1, 2, 3, 4)
    assert old.last_access > young.last_access


def test_tokens_of_any_value_are_compared_not_hashed() -> None:
    tree = Tree()
    tree.insert(0, 2**31 - 1)
    assert tree.match(0, 2**31 - 1) is not None
    assert tree.match(2**31 - 1, 0) is None


def test_prefixes_longer_than_the_recursion_limit_are_no_problem() -> None:
    tree = Tree()
    tree.allocator = tree.full._allocator = PageAllocator(3000)
    nodes = []
    for length in range(2, 2022, 2):
        array = np.zeros(length, np.int32)
        pages = np.zeros(length // 2, np.int32)
        pages[-1:] = tree.allocator.alloc(1, 1)
        nodes.append(tree.cache._insert(array, LeaseOffer(1, pages[None]), tree.tree.root)[0])
        tree.cache._lock(nodes[-1])
    node = tree.match(*[0] * 2020)
    assert node is not None
    assert len(tree.tree.path_to(node)) == 1010
    for each in [node, *nodes]:
        tree.cache.unlock(each)
    assert tree.cache.evict(5000) == 1010


def test_a_prefix_is_as_old_as_the_youngest_of_what_continued_it() -> None:
    """Though an insert below a lock does not visit what lies above."""
    tree = Tree()
    stem, other = tree.insert(1, 2, 3, 4), tree.insert(7, 8)
    tree.cache._lock(stem)
    pages = np.concatenate([stem.values[0], tree.allocator.alloc(1, 1)])
    offer = LeaseOffer(1, pages[None], stem)
    leaf = tree.cache._insert(np.array([1, 2, 3, 4, 5, 6], np.int32), offer, stem)[0]
    tree.cache.unlock(stem)
    assert stem.last_access < other.last_access < leaf.last_access
    assert tree.cache.evict(2) == 2
    assert list(tree.tree.nodes()) == [stem]
    assert stem.last_access == leaf.last_access


def publish_in_chunks(tree: Tree, num_tokens: int, chunk: int) -> TreeNode:
    """As a prefill does: the lock moves from the end of each chunk to that of the next."""
    tree.allocator = tree.full._allocator = PageAllocator(num_tokens // 2 + 1)
    tokens = np.arange(num_tokens, dtype=np.int32)
    node = None
    for end in range(chunk, num_tokens + 1, chunk):
        held = tree.full.pages_of(tree.tree.path_to(node)) if node else np.zeros(0, np.int32)
        pages = np.concatenate([held, tree.allocator.alloc(chunk // 2, 1)])
        start, node = (
            node,
            tree.cache._insert(tokens[:end], LeaseOffer(1, pages[None]), node or tree.tree.root)[0],
        )
        if start is None:
            tree.cache._lock(node)
        else:
            tree.cache._move_lock(start, node)
    assert node is not None
    check_shape(tree.tree)
    tree.full.audit(list(tree.tree.nodes()), [LockedEnd(node)])
    return node


def test_a_prompt_published_in_many_chunks_is_a_handful_of_nodes() -> None:
    tree = Tree()
    node = publish_in_chunks(tree, 8000, 16)
    assert tree.cache.find(np.arange(8000, dtype=np.int32)) == (node, 8000)
    assert len(tree.tree.path_to(node)) <= 10
    assert tokens_to(node) == tuple(range(8000))


def test_an_edge_is_copied_when_it_doubles_not_with_every_chunk() -> None:
    """Else a long prompt in small chunks would cost the square of its length."""
    tree = Tree()
    copied = 0
    merge = tree.tree._merge

    def counting_merge(upper: TreeNode, lower: TreeNode) -> None:
        nonlocal copied
        copied += len(upper.key) + len(lower.key)
        merge(upper, lower)

    tree.tree._merge = counting_merge
    publish_in_chunks(tree, 8192, 16)
    assert copied <= 8192 * 10


def test_a_merge_leaves_the_lower_node_its_identity() -> None:
    tree = Tree()
    upper = tree.insert(1, 2)
    lower = tree.insert(1, 2, 3, 4)
    assert list(tree.tree.nodes()) == [lower]
    assert upper is not lower
    assert (lower.end, tokens_to(lower), len(lower.values[0])) == (4, (1, 2, 3, 4), 2)


def test_nodes_that_a_lock_tells_apart_merge_when_it_is_undone() -> None:
    tree = Tree()
    upper = tree.insert(1, 2)
    tree.cache._lock(upper)
    lower = tree.insert(1, 2, 3, 4)
    assert lower.parent is upper
    tree.cache.unlock(upper)
    assert list(tree.tree.nodes()) == [lower]


def test_nodes_that_a_branch_tells_apart_merge_when_it_is_gone() -> None:
    tree = Tree()
    branch = tree.insert(1, 2, 3, 4)
    rest = tree.insert(1, 2, 5, 6)
    assert branch.parent is rest.parent
    assert tree.cache.evict(1) == 1
    assert list(tree.tree.nodes()) == [rest]


def test_nodes_that_an_age_tells_apart_merge_when_the_lower_has_its_childs() -> None:
    tree = Tree()
    tree.insert(1, 2, 3, 4, 5, 6)
    lower, upper = tree.match(1, 2, 3, 4, 5, 6), tree.match(1, 2)
    assert lower is not None
    assert upper is not None
    tree.cache.unlock(upper)
    assert lower.parent is upper  # which was used more lately
    offered = tree.allocator.alloc(4, 1)
    tokens = np.arange(1, 9, dtype=np.int32)
    child = tree.cache._insert(tokens, LeaseOffer(1, offered[None], lower), lower)[0]
    assert lower.last_access < upper.last_access < child.last_access
    tree.cache.unlock(lower)
    assert list(tree.tree.nodes()) == [upper, lower, child]
    assert tree.cache.evict(1) == 1
    assert list(tree.tree.nodes()) == [lower]
    check_shape(tree.tree)


def test_what_was_used_less_lately_is_not_merged_and_leaves_first() -> None:
    tree = Tree()
    tree.insert(1, 2, 3, 4)
    other = tree.insert(7, 8)
    upper = tree.match(1, 2)
    assert upper is not None
    tree.cache.unlock(upper)
    check_shape(tree.tree)
    assert tree.cache.evict(1) == 1
    assert sorted(map(tokens_to, tree.tree.nodes())) == [(1, 2), (7, 8)]
    assert tree.cache.evict(1) == 1
    assert list(tree.tree.nodes()) == [upper]
    assert other.last_access < upper.last_access
