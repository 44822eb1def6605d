"""A chunk of the gated delta rule in vector memory, ordered by head, float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.inverse import SIDE_BY_SIDE
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import LANES

NO_DECAY_BELOW = -128.0  # log of a decay; its exp is zero
COARSE_STEPS = 1024.0  # steps per unit of the log: sums of 64 tokens in such steps are exact


class HeadDecays(NamedTuple):
    """Logs of decays of whole heads, in two parts, summed since the chunk began."""

    coarse: Any  # [Hv, C, 128] a token's number in all lanes of a head
    fine: Any  # [Hv, C, 128]
    coarse_rows: Any  # [128, 2 * C] a head's numbers, twice
    fine_rows: Any  # [128, 2 * C]

    @classmethod
    def scratch(cls, value_heads: int) -> "HeadDecays":
        values = pltpu.VMEM((value_heads, CHUNK_TOKENS, LANES), jnp.float32)
        return cls(values, values, _rows_scratch(), _rows_scratch())

    def since(self, head: Any, tokens: slice) -> jax.Array:
        """Return a head's decay since the chunk began, in all lanes."""
        return jnp.exp(self.coarse[head, tokens] + self.fine[head, tokens])

    def spread(self, log_decay: jax.Array, heads_each: int) -> None:
        """Store a chunk's decays [C, 128], with one head in each lane.

        A row of values has those of `heads_each` heads, 1 or 2; the numbers of two heads fill half
        of the lanes each.
        """
        coarse, fine = coarse_and_fine(log_decay)
        up_to = _tokens_up_to()
        # A token's gates are in a separate register; products with ones combine them.
        for target, gate in ((self.coarse, coarse), (self.fine, fine)):
            summed = product(up_to, gate, (1, 0))
            for line in range(target.shape[0]):
                heads = range(line * heads_each, (line + 1) * heads_each)
                shape = (CHUNK_TOKENS, LANES // heads_each)
                wide = [jnp.broadcast_to(summed[:, n : n + 1], shape) for n in heads]
                target[line] = wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis=1)
        for target, gate in ((self.coarse_rows, coarse), (self.fine_rows, fine)):
            target[...] = _by_row(gate, up_to)


class ChunkByHead(NamedTuple):
    """Buffers of a chunk."""

    q: Any  # [Hk, C, 128]
    k: Any  # [Hk, C, 128]
    v: Any  # [Hv, C, 128] values, then outputs
    beta_rows: Any  # [128, 2 * C] a head's numbers, twice
    decays: Any  # of whole heads `HeadDecays`; by channel [Hv, C, 128], a token's logs

    @classmethod
    def scratch(cls, key_heads: int, value_heads: int, *, by_channel: bool) -> "ChunkByHead":
        keys, values = (
            pltpu.VMEM((n, CHUNK_TOKENS, LANES), jnp.float32) for n in (key_heads, value_heads)
        )
        decays = values if by_channel else HeadDecays.scratch(value_heads)
        return cls(keys, keys, values, _rows_scratch(), decays)

    def spread_betas(self, beta: jax.Array) -> None:
        """Store a chunk's betas [C, 128], with one head in each lane."""
        row, column = row_and_column((CHUNK_TOKENS, CHUNK_TOKENS))
        self.beta_rows[...] = _by_row(beta, (column == row).astype(jnp.float32))


def _rows_scratch() -> Any:
    return pltpu.VMEM((LANES, SIDE_BY_SIDE * CHUNK_TOKENS), jnp.float32)


def _tokens_up_to() -> jax.Array:
    row, column = row_and_column((CHUNK_TOKENS, CHUNK_TOKENS))
    return (column <= row).astype(jnp.float32)


def _by_row(gate: jax.Array, which: jax.Array) -> jax.Array:
    """Return sums of a gate [C, 128] over tokens, a head in each row: [128, 2 * C]."""
    return product(gate, jnp.concatenate([which] * SIDE_BY_SIDE, axis=0), (0, 1))


def coarse_and_fine(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split a decay's log into two parts with that sum.

    A chunk's sums of the first part are exact, and sums of the second are small, so differences of
    sums since the chunk began do not cancel where a head forgets much and then little.
    """
    log_decay = jnp.maximum(log_decay, NO_DECAY_BELOW)
    coarse = jnp.round(log_decay * COARSE_STEPS) * (1 / COARSE_STEPS)
    return coarse, log_decay - coarse
