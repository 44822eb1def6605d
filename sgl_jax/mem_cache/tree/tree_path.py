"""Functions on paths of the prefix tree: neighbours of a node, lengths and parts of a walk."""

from collections.abc import Sequence

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree.tree_component import PathStep
from sgl_jax.mem_cache.tree.tree_node import TreeNode


def parent_of(node: TreeNode) -> TreeNode:
    """The parent of a node that must not be the root: it has no edge to split or to shorten."""
    if node.parent is None:
        raise LedgerError(f"{node!r} is the root, which is never split, locked or evicted")
    return node.parent


def only_child(node: TreeNode) -> TreeNode | None:
    return next(iter(node.children.values())) if len(node.children) == 1 else None


def matched_len(path: Sequence[PathStep]) -> int:
    """Tokens matched along `path`; only its last edge may be matched in part."""
    if not path:
        return 0
    node, num_matched = path[-1]
    return node.end - len(node.key) + num_matched


def cut_path(path: Sequence[PathStep], length: int) -> list[PathStep]:
    """The part of `path` that lies in the first `length` tokens."""
    cut = []
    for node, num_matched in path:
        if length <= 0:
            break
        cut.append(PathStep(node, min(num_matched, length)))
        length -= num_matched
    return cut
