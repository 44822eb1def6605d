"""The prefixes in a host's memory as plain values, for another engine to load."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree_node import parent_of


class SavedPrefix(NamedTuple):
    """A whole path of a tree: `tokens` int32[n], whole pages."""

    tokens: Int32Array
    namespace: str


class SavedTree(NamedTuple):
    """The nodes of a tree in columns, parents first.

    All columns but `tokens`, int32[n], have an entry per node; arrays are int64. `parents` are
    indices of nodes, -1 for the root. `ends` are the ends of the nodes' edges in `tokens`. A larger
    `last_use` is later.
    """

    parents: Int32Array
    ends: Int32Array
    tokens: Int32Array
    last_use: Int32Array
    num_uses: Int32Array
    namespaces: list[str]


def save_tree(cache: RadixCache) -> SavedTree:
    nodes = cache.nodes()
    index_of = {node.node_id: index for index, node in enumerate(nodes)}
    keys = [node.key for node in nodes]
    return SavedTree(
        parents=np.array([index_of.get(parent_of(node).node_id, -1) for node in nodes], np.int64),
        ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *keys]),
        last_use=np.array([node.last_access for node in nodes], np.int64),
        num_uses=np.array([node.num_uses for node in nodes], np.int64),
        namespaces=[node.namespace for node in nodes],
    )


def tree_of(prefixes: Sequence[SavedPrefix]) -> SavedTree:
    """Return prefixes without a common part as a tree; the first counts as used last."""
    keys = [prefix.tokens for prefix in prefixes]
    return SavedTree(
        parents=np.full(len(keys), -1, np.int64),
        ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *keys]),
        last_use=np.flip(np.arange(len(keys), dtype=np.int64)),
        num_uses=np.ones(len(keys), np.int64),
        namespaces=[prefix.namespace for prefix in prefixes],
    )


def saved_prefixes(trees: Sequence[SavedTree]) -> list[SavedPrefix]:
    """Return the paths to all leaves: reused paths first, and then by latest use."""
    found: list[tuple[bool, float, SavedPrefix]] = []
    for tree in trees:
        is_leaf = np.ones(len(tree.parents), np.bool_)
        is_leaf[tree.parents[tree.parents >= 0]] = False
        # Compare ages of different trees as fractions of each tree's life.
        latest = max(int(tree.last_use.max(initial=0)), 1)
        for leaf in np.flatnonzero(is_leaf).tolist():
            path = [leaf]
            while tree.parents[path[-1]] >= 0:
                path.append(int(tree.parents[path[-1]]))
            keys = [_key(tree, node) for node in path[::-1]]
            prefix = SavedPrefix(np.concatenate(keys), tree.namespaces[leaf])
            found.append((tree.num_uses[leaf] > 1, tree.last_use[leaf] / latest, prefix))
    found.sort(key=lambda each: each[:2], reverse=True)
    return [prefix for _, _, prefix in found]


def _key(tree: SavedTree, node: int) -> Int32Array:
    first = int(tree.ends[node - 1]) if node else 0
    return tree.tokens[first : int(tree.ends[node])]
