"""A prefix tree without a tree: the set of all cached page-aligned prefixes, searched by force.

A namespace is told apart in the model by its tokens: those of namespace i are `_SPAN * i` higher
than the tokens that the tree is given with the namespace's name.
"""

import numpy as np
from hypothesis import strategies as st

from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_node import TreeNode

Tokens = tuple[int, ...]
NAMESPACES = ("", "red", "blue")
_SPAN = 1000


def in_namespace(tokens: Tokens, namespace: str) -> Tokens:
    """What the model calls `tokens` of this namespace."""
    shift = _SPAN * NAMESPACES.index(namespace)
    return tuple(token + shift for token in tokens) if shift else tuple(tokens)


def namespace_of(tokens: Tokens) -> str:
    """The namespace of tokens as the model calls them."""
    return NAMESPACES[tokens[0] // _SPAN] if tokens else ""


def array_of(tokens: Tokens) -> np.ndarray:
    """The tokens that the tree is given: int32[len(tokens)]."""
    return np.array(tokens, np.int32) % _SPAN


class PrefixModel:
    """Each cached prefix (its length a multiple of the page size) with the page at its end.

    `uses` counts how often it was used again, up to `max_uses`; 0 is least recently used alone.
    `ghosts` are those that left, with their uses, since the last reset.
    """

    def __init__(self, page_size: int, max_uses: int = 0) -> None:
        self.page_size = page_size
        self.max_uses = max_uses
        self.pages: dict[Tokens, int] = {}
        self.ages: dict[Tokens, int] = {}
        self.uses: dict[Tokens, int] = {}
        self.ghosts: dict[Tokens, int] = {}
        self.locked: list[Tokens] = []
        self._clock = 0

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tokens[:end] for end in ends]

    def longest_match(self, tokens: Tokens) -> Tokens:
        return max((p for p in self.prefixes(tokens) if p in self.pages), key=len, default=())

    def pages_of(self, tokens: Tokens) -> list[int]:
        return [self.pages[prefix] for prefix in self.prefixes(tokens)]

    def touch(self, tokens: Tokens) -> None:
        self._clock += 1
        self.ages.update(dict.fromkeys(self.prefixes(tokens), self._clock))

    def use(self, tokens: Tokens, num_known: int = 0) -> None:
        """A request reads or writes `tokens`, the first `num_known` of which it had before."""
        prefixes = [prefix for prefix in self.prefixes(tokens) if len(prefix) > num_known]
        num_uses = 0
        for prefix in reversed(prefixes):
            if prefix in self.uses:
                self.uses[prefix] = min(self.uses[prefix] + 1, self.max_uses)
            else:
                recalled = min(self.ghosts.get(prefix, -1) + 1, self.max_uses)
                num_uses = self.uses[prefix] = max(num_uses, recalled)

    def is_locked(self, prefix: Tokens) -> bool:
        return any(locked[: len(prefix)] == prefix for locked in self.locked)

    def evictable(self) -> set[Tokens]:
        return {prefix for prefix in self.pages if not self.is_locked(prefix)}

    def leaves(self) -> set[Tokens]:
        parents = {prefix[: -self.page_size] for prefix in self.pages}
        return self.evictable() - parents

    def remove_evicted(self, remaining: dict[Tokens, int]) -> set[Tokens]:
        """Accept an eviction: what is gone was unlocked, and older than any leaf still there.

        Where uses count, that is only so of what was used as often, and of one page at a time.
        """
        gone = self.pages.keys() - remaining.keys()
        assert gone <= self.evictable(), "eviction took what is locked"
        for prefix in gone:
            del self.pages[prefix]
        assert remaining == self.pages, "eviction changed what it kept"
        if self.max_uses == 0 or len(gone) == 1:
            for prefix in gone:
                rivals = (leaf for leaf in self.leaves() if self.uses[leaf] == self.uses[prefix])
                assert all(self.ages[prefix] <= self.ages[leaf] for leaf in rivals)
        for prefix in gone:
            self.ghosts[prefix] = self.uses.pop(prefix)
        return gone

    def reset(self) -> None:
        """All is evicted, and how it was used is forgotten."""
        self.pages.clear()
        self.uses.clear()
        self.ghosts.clear()


def follow(
    memory: RankMemory, tokens: np.ndarray, namespace: str = "", known: TreeNode | None = None
) -> PrefixCursor:
    """The cursor on a rank's tree of a prompt that waits for all ranks."""
    nodes = {} if known is None else {memory.dp_rank: known}
    return PrefixCursor(memory.waiting.follow(tokens, namespace, nodes), memory.dp_rank)


def tokens_to(node: TreeNode) -> Tokens:
    """All tokens from the root to the end of `node`, as the model calls them."""
    parts = []
    step: TreeNode | None = node
    while step is not None:
        parts.append(step.key)
        step = step.parent
    shift = _SPAN * NAMESPACES.index(node.namespace)
    return tuple((np.concatenate(parts[::-1]) + shift).tolist())


def cached_pages(tree: RadixTree) -> dict[Tokens, int]:
    """What `PrefixModel.pages` should be, read off the tree (its component 0 is FULL)."""
    found = {}
    for node in tree.nodes():
        tokens, start = tokens_to(node), node.end - len(node.key)
        for i, page in enumerate(node.values[0].tolist()):
            found[tokens[: start + (i + 1) * tree.page_size]] = page
    return found


def uses_of_pages(tree: RadixTree) -> dict[Tokens, int]:
    """What `PrefixModel.uses` should be, read off the tree."""
    return {
        tokens_to(node)[:end]: node.num_uses
        for node in tree.nodes()
        for end in range(node.end, node.end - len(node.key), -tree.page_size)
    }


def held_pages(cache: RadixCache, pool: int = 0) -> np.ndarray:
    """All pages of the pool that the cache holds, in no particular order."""
    parts = [each.pages_of(cache.nodes()) for each in cache.tree.components if each.pool == pool]
    pages = np.concatenate(parts)
    return pages[pages != 0]


def held_blocks(cache: RadixCache) -> set[int]:
    """The hashes of all pages of tokens that matches find, as `BlockLog` names them."""
    found = (node for node in cache.nodes() if not node.is_withdrawn)
    return {block for node in found for block in node.page_hashes.tolist()}


def shape_of(tree: RadixTree) -> list[tuple[object, ...]]:
    """Everything a read-only call must leave alone."""
    return [
        (node.node_id, tokens_to(node), node.last_access, tuple(node.locks))
        for node in tree.nodes()
    ]


def check_shape(tree: RadixTree) -> None:
    """The invariants of a compressed, page-aligned tree."""
    root = tree.root
    assert root.end == len(root.key) == 0
    assert not any(root.locks)
    assert all(value is None for value in root.values)
    for node in [root, *tree.nodes()]:
        for child_key, child in node.children.items():
            assert child.parent is node
            assert child.child_key == child_key
            assert node is root or child.namespace == node.namespace
            name = child.namespace.encode() if node is root else b""
            assert len(child.key) > 0
            assert len(child.key) % tree.page_size == 0
            assert child.key[: tree.page_size].tobytes() + name == child_key
            assert child.end == node.end + len(child.key)
            assert node is root or child.locks[0] <= node.locks[0]
            assert not tree.may_merge(node, child)


def token_lists(page_size: int, *, ragged: bool = False) -> st.SearchStrategy[Tokens]:
    """Sequences that often share prefixes; pages differ in their last token only, or in all."""
    pages = [(1,) * page_size, (1,) * (page_size - 1) + (2,), (3,) * page_size]
    whole = st.lists(st.sampled_from(pages), max_size=6).map(
        lambda chosen: tuple(token for page in chosen for token in page)
    )
    if not ragged:
        return whole.filter(bool)
    tail = st.lists(st.sampled_from([1, 2]), max_size=page_size - 1).map(tuple)
    return st.tuples(whole, tail).map(lambda parts: parts[0] + parts[1])
