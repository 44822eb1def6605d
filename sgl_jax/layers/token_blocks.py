"""Hidden states scattered over the chips of a rank, in blocks of tokens.

Between a layer's products each token's hidden state lies on one chip (arXiv 2205.05198): a sum over
the chips is a reduce-scatter, and an all-gather precedes the next product. Both together exchange
as many bytes as an all-reduce, and norms are computed once instead of on each chip. The exchanges
of one block run beside the products of others where the compiler makes them asynchronous.
"""

import jax
import jax.numpy as jnp

# An array for each block: [tokens, ...], or [tokens / chips, ...] where it is scattered.
Blocks = tuple[jax.Array, ...]

_NUM_BLOCKS = 4
_TILE_ROWS = 16  # of bfloat16 in a TPU's memory: a chip's share of a block is whole tiles


def block_sizes(num_tokens: int, num_chips: int) -> tuple[int, ...]:
    """Tokens of each block; () if they cannot be dealt out to the chips in whole tiles."""
    unit = num_chips * _TILE_ROWS
    units, rest = divmod(num_tokens, unit)
    if rest:
        return ()
    number = min(_NUM_BLOCKS, units)
    return tuple(unit * (units // number + (n < units % number)) for n in range(number))


def split_blocks(x: jax.Array, sizes: tuple[int, ...]) -> Blocks:
    """x [T, ...] in blocks of these sizes."""
    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return tuple(x[stop - size : stop] for stop, size in zip(stops, sizes, strict=True))


def join_blocks(blocks: Blocks) -> jax.Array:
    """The blocks' rows, one after the other."""
    return jnp.concatenate(blocks)
