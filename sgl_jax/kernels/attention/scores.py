"""What attention makes of the products of queries and keys: a layer's options, and the mask."""

from typing import NamedTuple

import jax

# The score of a key that is not seen. Finite, so that scores that are all masked leave no NaN:
# what they add is scaled by exp(MASKED - m) = 0 as soon as a visible key is met, and every query
# sees at least itself.
MASKED = -1e30


class ScoreOptions(NamedTuple):
    """How a layer computes its scores; all but `sinks` are static."""

    scale: float  # multiplies q @ k
    sliding_window: int | None = None  # a query at p sees keys at (p - sliding_window, p]
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sinks: jax.Array | None = None  # [q_heads] logits in the softmax whose value is zero
