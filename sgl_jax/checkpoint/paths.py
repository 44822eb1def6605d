"""Parameters by path: ("layers", "attention", "qkv") names a leaf of the nested dictionaries."""

from collections.abc import Mapping
from typing import Any

from sgl_jax.layers.parameter import ParamTree

Path = tuple[str, ...]


def flatten(tree: ParamTree) -> dict[Path, Any]:
    """Each leaf by its path, in order of the paths."""
    flat: dict[Path, Any] = {}
    for name in sorted(tree):
        value = tree[name]
        if isinstance(value, dict):
            flat.update({(name, *path): leaf for path, leaf in flatten(value).items()})
        else:
            flat[(name,)] = value
    return flat


def unflatten(flat: Mapping[Path, Any]) -> ParamTree:
    """The nested dictionaries again."""
    tree: ParamTree = {}
    for path, leaf in flat.items():
        folder = tree
        for name in path[:-1]:
            folder = folder.setdefault(name, {})
        folder[path[-1]] = leaf
    return tree
