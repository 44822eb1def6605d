"""The protocol of layers that draft the tokens after a step's, by the model's hidden states."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from sgl_jax.layers.sampling.split_logits import SplitLogits


class Drafter(Protocol):
    """A layer that guesses, at position t, the token at t + 2 from a hidden state at t and the
    embedding of the token at t + 1.

    Its KV is one more layer of the model's cache, at the same slots.
    """

    @property
    def captured(self) -> Sequence[int]:
        """The layers of the model whose inputs `first_hidden` gets, ascending."""
        ...

    def first_hidden(self, hidden: jax.Array, captured: Sequence[jax.Array]) -> jax.Array:
        """The layer's first hidden states, at the positions that the model has computed:
        [T, hidden_size].

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
        """The layer over T positions.

        Args:
            vectors: [T, hidden_size] embeddings of the tokens after them.
            hidden: [T, hidden_size] hidden states at them: `first_hidden`, or this layer's own at
                the position before.
            is_token, reads: as `DecoderLayer` has them.
            kv_pool: with K and V of the positions before.
            number: int32 [] of this layer among the layers of the pool.

        Returns:
            [T, hidden_size], ready for `logits` and to be `hidden` one position on; the pool.
        """
        ...

    def logits(self, hidden: jax.Array, head: Callable[[jax.Array], SplitLogits]) -> SplitLogits:
        """hidden [n, hidden_size] of this layer -> logits; `head` is the model's."""
        ...
