"""From token ids to vectors and back to logits, with the vocabulary split over the tensor axis."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.row_blocks import matmul
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Source


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Round the vocabulary up to a multiple of the tensor axis; the padding is never read."""
    return -(-vocab_size // tp_size) * tp_size


class Embedding(nnx.Module):
    """Token vectors, one slice of the vocabulary on each chip."""

    def __init__(
        self, weight: Source, vocab_size: int, hidden_size: int, dtype: DTypeLike, *, is_head: bool
    ) -> None:
        """Declare `weight` [padded vocabulary, padded hidden]; with `is_head`, also for logits."""
        self.weight = parameter(weight, dtype, TENSOR_AXIS, read="all" if is_head else "rows")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return vectors [T, hidden] of token_ids, int32 [T], summed over the chips' slices."""
        return sum_over_tensor(self.own_part(token_ids))

    def own_part(self, token_ids: jax.Array) -> jax.Array:
        """Return this chip's part of the vectors, with zeros for other chips' rows."""
        rows = self.weight.shape[0]
        local = token_ids - lax.axis_index(TENSOR_AXIS) * rows
        vectors = (
            self.weight[...].at[local].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        )
        return vectors[:, : self.hidden_size]

    def logits(self, hidden: jax.Array) -> SplitLogits:
        """Compute logits [n, columns] from hidden [n, hidden], if embedding and head are tied."""
        padding = self.weight.shape[1] - self.hidden_size
        padded = jnp.pad(hidden, ((0, 0), (0, padding))) if padding else hidden
        logits = matmul(padded, self.weight[...], jnp.float32, transposed=True)
        return SplitLogits(logits, self.vocab_size)


class LMHead(nnx.Module):
    """Logits from hidden states, one slice of the vocabulary on each chip."""

    def __init__(self, weight: Source, vocab_size: int, dtype: DTypeLike) -> None:
        """Declare `weight` [hidden, padded vocabulary]."""
        self.weight = parameter(weight, dtype, None, TENSOR_AXIS)
        self.vocab_size = vocab_size

    def logits(self, hidden: jax.Array) -> SplitLogits:
        """Map hidden [n, hidden] to logits of this chip's slice of the vocabulary."""
        return SplitLogits(matmul(hidden, self.weight[...], jnp.float32), self.vocab_size)
