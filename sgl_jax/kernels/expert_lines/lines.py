"""Lines of a mixture of experts: one for each token and each of its experts, sorted by expert.

A chip that holds some of the experts has lines of the others, too: they come last and belong to no
group, so nothing is computed of them. The longest list is static, the lines that are in use are
not: so a chip takes a number at a time that is enough if experts are chosen about alike, and goes
on until none is left. No token is ever dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.expert_choice import ExpertChoice

# Tokens whose lines are all taken at once: the TPU's kernels skip unused lines, and a loop costs
# more than the room for them.
UNDIVIDED_TOKENS = 512
_SPARE = 1.5  # lines taken at a time, relative to a chip's share of all
_MULTIPLE = 64  # of lines: the smallest tile of the TPU's grouped product


# The inner values of a gate's and an up's results.
Gated = Callable[[jax.Array, jax.Array], jax.Array]


class Router(NamedTuple):
    """A router, and the norm of its inputs."""

    choice: ExpertChoice
    eps: float  # of the norm, as `from_one`: see `rms_normalised`
    from_one: bool
    norm: jax.Array  # [hidden]
    matrices: jax.Array  # [layers, hidden, experts]
    bias: jax.Array | None  # [experts]
    choice_bias: jax.Array | None = None  # float32 [experts], added to scores for the choice alone


class ExpertLines(NamedTuple):
    """Lines of a chip's experts, and where each token finds its own."""

    # int32 [lines] the index of each line's choice in [top_k, tokens], flattened; None: the kernels
    # use `places` alone
    choices: jax.Array | None
    places: jax.Array  # int32 [top_k, tokens] the line of each token's experts
    group_sizes: jax.Array  # int32 [experts] lines of each
    num_used: jax.Array  # int32 [] lines that belong to an expert of this chip

    @property
    def num_lines(self) -> int:
        """Lines that there is room for."""
        return self.places.size if self.choices is None else len(self.choices)

    @property
    def tokens(self) -> jax.Array:
        """int32 [lines] the token of each."""
        assert self.choices is not None
        return self.choices % self.places.shape[1]

    def part(self, first: jax.Array, size: int) -> "ExpertLines":
        """The `size` lines from `first` on, a multiple of it; places outside are not in [0, size)
        or not below `num_used`."""
        assert self.choices is not None
        choices = jnp.pad(self.choices, (0, -len(self.choices) % size))
        stops = jnp.cumsum(self.group_sizes)
        bounds = jnp.clip(jnp.stack([stops - self.group_sizes, stops]) - first, 0, size)
        sizes = bounds[1] - bounds[0]
        return ExpertLines(
            lax.dynamic_slice_in_dim(choices, first, size),
            self.places - first,
            sizes,
            jnp.sum(sizes),
        )


def lines_at_once(num_tokens: int, top_k: int, num_chips: int) -> int:
    """The size of the parts for a chip that has one of `num_chips` shares of the experts."""
    most = num_tokens * top_k
    if num_tokens <= UNDIVIDED_TOKENS:
        return most
    wanted = int(most * _SPARE) // num_chips
    return min(-(-wanted // _MULTIPLE) * _MULTIPLE, most)


def are_few(num_lines: int, num_choices: int) -> bool:
    """True for lines that are sooner scattered to their tokens than found by each choice.

    A TPU scatters a row in 3.4 to 4.8 times the instructions that gather one; gathers pass the
    whole total once for each of the top_k, and need a second sort.
    """
    return 4 * num_lines <= num_choices


def in_parts(
    lines: ExpertLines,
    size: int,
    add: Callable[[jax.Array, ExpertLines], jax.Array],
    total: jax.Array,
) -> jax.Array:
    """`total` after `add` of each part of `size` lines, until all lines in use had their turn."""

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, total = state
        return first + size, add(total, lines.part(first, size))

    start = jnp.int32(0), total
    return lax.while_loop(lambda state: state[0] < lines.num_used, turn, start)[1]
