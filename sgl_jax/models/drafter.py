"""The protocol of layers that draft the tokens after a step from the model's hidden states."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from sgl_jax.layers.sampling.split_logits import SplitLogits


class Drafter(Protocol):
    """A layer that drafts the token at t + 2 from a hidden state at t and the token at t + 1.

    Its KV is one more layer of the model's cache, in the same slots.
    """

    @property
    def captured(self) -> Sequence[int]:
        """Return the layers of the model with inputs that `first_hidden` needs, ascending."""
        ...

    def first_hidden(self, hidden: jax.Array, captured: Sequence[jax.Array]) -> jax.Array:
        """Return the first hidden states [T, hidden_size], at the positions of the model's step.

        Args:
            hidden: [T, hidden_size] of the model, after its last norm.
            captured: [T, hidden_size] inputs of the layers `captured`, in that order.
        """
        ...

    def __call__(
        self,
        vectors: jax.Array,
        hidden: jax.Array,
        is_token: jax.Array,
        reads: tuple[Any, ...],
        kv_pool: jax.Array,
        number: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Run the layer over T positions.

        Args:
            vectors: [T, hidden_size] embeddings of the tokens after them.
            hidden: [T, hidden_size] hidden states at them: `first_hidden`, or this layer's output
                at the previous position.
            is_token: bool [T], False for padding.
            reads: the tokens' rotations and an `AttentionBatch`.
            kv_pool: K and V of the previous positions.
            number: int32 [], the layer's index in the pool.

        Returns:
            [T, hidden_size], the input of `logits` and the next position's `hidden`; the pool.
        """
        ...

    def logits(self, hidden: jax.Array, head: Callable[[jax.Array], SplitLogits]) -> SplitLogits:
        """Map this layer's hidden [n, hidden_size] to logits; `head` is the model's."""
        ...
