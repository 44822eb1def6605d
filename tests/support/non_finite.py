"""Weights that make the results of some tokens, or of all, NaN: put in after the start."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from sgl_jax.executor.model_executor import ModelExecutor


@contextmanager
def changed_weights(
    executor: ModelExecutor, part: str, change: Callable[[jax.Array], jax.Array]
) -> Iterator[None]:
    """Within, the weights whose path contains `part` are `change` of them."""
    before = executor.weights.arrays
    tree: Any = jax.tree.unflatten(executor._programs._params_tree, before)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    is_meant = [part in jax.tree_util.keystr(path) for path, _ in leaves]
    assert any(is_meant), f"no weights are called {part}"
    executor.weights.arrays = tuple(
        jax.device_put(change(leaf), leaf.sharding) if meant else leaf
        for meant, (_, leaf) in zip(is_meant, leaves, strict=True)
    )
    try:
        yield
    finally:
        executor.weights.arrays = before


def nan_token(executor: ModelExecutor, token: int) -> Any:
    """Within, the embedding of `token` is NaN. The model's head must be another matrix."""
    return changed_weights(executor, "['embedding']", lambda table: table.at[token].set(jnp.nan))


def nan_weights(executor: ModelExecutor, part: str = "['norm']") -> Any:
    """Within, all weights of `part` are NaN, and so are all logits."""
    return changed_weights(executor, part, lambda weights: jnp.full_like(weights, jnp.nan))
