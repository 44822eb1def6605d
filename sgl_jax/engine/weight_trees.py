"""Named tensors from the weights that a trainer hands over: a tree, or an iterator of pairs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sgl_jax.checkpoint.array_tensors import on_host
from sgl_jax.checkpoint.trainer_names import as_checkpoint_tensors

_BUCKET_BYTES = 2**28

# A tree of arrays (nested mappings, such as an `nnx.State`), or pairs of name and array.
Weights = Mapping[Any, Any] | Iterable[tuple[str, Any]]


def in_buckets(weights: Weights) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the tensors of `weights` by their names in a checkpoint, and True with the last.

    A tree is one bucket, of its own arrays. Of an iterator, which may make arrays one at a time,
    the buckets are copies in host memory, so that each array can be dropped once the next is made.
    """
    if isinstance(weights, Mapping):
        yield dict(_named(weights)), True
        return
    bucket: dict[str, Any] = {}
    num_bytes = 0
    for name, array in weights:
        copy = np.array(on_host(name, array))
        bucket.update(as_checkpoint_tensors(name, copy))
        num_bytes += copy.nbytes
        if num_bytes >= _BUCKET_BYTES:
            yield bucket, False
            bucket, num_bytes = {}, 0
    yield bucket, True


def _named(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{key}.")
        else:
            array = value.get_value() if hasattr(value, "get_value") else value  # nnx.Variable
            yield from as_checkpoint_tensors(f"{prefix}{key}", array)
