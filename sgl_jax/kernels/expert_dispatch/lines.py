"""Lines of a mixture of experts: one for each token and each of its experts, sorted by expert.

A chip that holds some of the experts also has lines of the other experts: they come last and belong
to no group, so nothing is computed from them. The length of the list is static, the number of lines
in use is not. So a chip processes parts of a size that suffices if experts are chosen about equally
often, until none is left. No token is ever dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.layer_configs import ExpertChoice

# Up to this many tokens, all lines are processed at once: the TPU kernels skip unused lines, and a
# loop costs more than the memory for them.
UNDIVIDED_TOKENS = 512
_SPARE = 1.5  # lines in a part, relative to a chip's share of all lines
_MULTIPLE = 64  # lines in the smallest tile of the TPU's grouped matmul


# Computes the experts' inner values from the results of gate and up.
Gated = Callable[[jax.Array, jax.Array], jax.Array]


class Router(NamedTuple):
    """A router, and the norm before it."""

    choice: ExpertChoice
    eps: float  # `eps` and `from_one` of the norm: see `rms_normalised`
    from_one: bool
    norm: jax.Array  # [hidden]
    matrices: jax.Array  # [layers, hidden, experts]
    bias: jax.Array | None  # [experts]
    choice_bias: jax.Array | None = None  # float32 [experts], added to scores only for the choice


class ExpertDispatch(NamedTuple):
    """Lines of a chip's experts, and the place of each token's lines."""

    # int32 [lines] the index of each line's choice in [top_k, tokens], flattened; None if the
    # kernels only use `places`
    choices: jax.Array | None
    places: jax.Array  # int32 [top_k, tokens] the line for each of a token's experts
    group_sizes: jax.Array  # int32 [experts] number of lines of each expert
    num_used: jax.Array  # int32 [] number of lines for experts of this chip

    @property
    def num_lines(self) -> int:
        """Return the number of lines that the arrays have room for."""
        return self.places.size if self.choices is None else len(self.choices)

    @property
    def tokens(self) -> jax.Array:
        """Return int32 [lines], the token of each line."""
        assert self.choices is not None
        return self.choices % self.places.shape[1]

    def part(self, first: jax.Array, size: int) -> "ExpertDispatch":
        """Return the `size` lines from `first` on, a multiple of `size`.

        Places outside the part are not in [0, size), or not below `num_used`.
        """
        assert self.choices is not None
        choices = jnp.pad(self.choices, (0, -len(self.choices) % size))
        stops = jnp.cumsum(self.group_sizes)
        bounds = jnp.clip(jnp.stack([stops - self.group_sizes, stops]) - first, 0, size)
        sizes = bounds[1] - bounds[0]
        return ExpertDispatch(
            lax.dynamic_slice_in_dim(choices, first, size),
            self.places - first,
            sizes,
            jnp.sum(sizes),
        )


def lines_at_once(num_tokens: int, top_k: int, num_chips: int) -> int:
    """Return the size of the parts for a chip with one of `num_chips` shares of the experts."""
    most = num_tokens * top_k
    if num_tokens <= UNDIVIDED_TOKENS:
        return most
    wanted = int(most * _SPARE) // num_chips
    return min(-(-wanted // _MULTIPLE) * _MULTIPLE, most)


def are_few(num_lines: int, num_choices: int) -> bool:
    """Return True if scattering the lines to their tokens is faster than gathering each choice.

    A TPU scatters a row in 3.4 to 4.8 times the instructions of a gather; gathers read the whole
    total once for each of the top_k, and need a second sort.
    """
    return 4 * num_lines <= num_choices


def in_parts(
    lines: ExpertDispatch,
    size: int,
    add: Callable[[jax.Array, ExpertDispatch], jax.Array],
    total: jax.Array,
) -> jax.Array:
    """Apply `add` to `total` and each part of `size` lines, for all lines in use."""

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, total = state
        return first + size, add(total, lines.part(first, size))

    start = jnp.int32(0), total
    return lax.while_loop(lambda state: state[0] < lines.num_used, turn, start)[1]
