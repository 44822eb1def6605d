"""What attention makes of the product of a query and a key."""

from typing import NamedTuple

# The score of a key that is not seen. Finite, so that scores that are all masked leave no NaN:
# what they add is scaled by exp(MASKED - top) = 0 as soon as a visible key is met, and every query
# sees at least itself.
MASKED = -1e30


class ScoreOptions(NamedTuple):
    """As the arguments of `interface.RaggedPagedAttention`."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
