"""Vision towers, and that of Qwen3-VL and Qwen3.5: patches to the vectors of an image's tokens.

A transformer over all patches of one image. Patches are in the order of tokens: the patches of a
token, `merge_size` in each direction, follow each other, and an MLP merges them. Each chip of a
rank computes the whole tower, so that every number of chips can run every tower.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.row_blocks import matmul
from sgl_jax.layers.layer_weights import weights_of_layer
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.norm import LayerNorm
from sgl_jax.layers.parameter import parameter, stack_layers
from sgl_jax.layers.rotary import Rotation, rotate
from sgl_jax.layers.sources import Tensor
from sgl_jax.models.vision_config import Qwen3VLVision, VisionConfig

_EPS = 1e-6
SCORE_BYTES = 2**26  # of one block of queries in float32


class VisionTower(nnx.Module):
    """A tower of any family."""

    config: VisionConfig

    def __call__(self, patches: jax.Array, height: jax.Array, width: jax.Array) -> jax.Array:
        """Compute the vectors of an image's tokens.

        Args:
            patches: uint8 [N, patch_values], each [side, side, 3]; padded to a power of two of
                tokens.
            height, width: int32 [], in patches.

        Returns:
            [N / patches_per_token, row_width]: what the text model reads for each token, the
            vector itself and those added after its first layers. Arbitrary for padding.
        """
        raise NotImplementedError

    def normalised(self, patches: jax.Array) -> jax.Array:
        """Return the values of patches, float32 [N, patch_values]."""
        images = self.config.images
        mean, std = (
            np.tile(np.array(values, np.float32), images.patch_size**2)
            for values in (images.mean, images.std)
        )
        return (patches.astype(jnp.float32) / 255 - mean) / std

    def embedded(self, patches: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return the normalised patches times `kernel`, [hidden_size, 3, side, side]."""
        flat = kernel.transpose(2, 3, 1, 0).reshape(-1, self.config.hidden_size)
        return matmul(self.normalised(patches).astype(kernel.dtype), flat)


def linear(name: str, num_inputs: int, num_outputs: int, dtype: DTypeLike) -> Linear:
    weight = Tensor(f"{name}.weight", (num_inputs, num_outputs), transposed=True)
    return Linear(weight, dtype, bias=Tensor(f"{name}.bias", (num_outputs,)))


def layer_norm(name: str, size: int, dtype: DTypeLike, eps: float = _EPS) -> LayerNorm:
    return LayerNorm(Tensor(f"{name}.weight", (size,)), Tensor(f"{name}.bias", (size,)), eps, dtype)


class VisionBlock(nnx.Module):
    """Attention among all patches, and a feed-forward layer, with pre-norms."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        self.norm1 = layer_norm("norm1", hidden, dtype)
        self.norm2 = layer_norm("norm2", hidden, dtype)
        self.qkv = linear("attn.qkv", hidden, 3 * hidden, dtype)
        self.proj = linear("attn.proj", hidden, hidden, dtype)
        self.up = linear("mlp.linear_fc1", hidden, width, dtype)
        self.down = linear("mlp.linear_fc2", width, hidden, dtype)
        self.num_heads = config.num_heads

    def __call__(self, x: jax.Array, turns: Rotation, is_patch: jax.Array) -> jax.Array:
        """Map x [N, hidden] to the result; `is_patch` is bool [N], False for padding."""
        qkv = self.qkv(self.norm1(x)).reshape(len(x), 3, self.num_heads, -1)
        q, k, v = rotate(qkv[:, 0], turns), rotate(qkv[:, 1], turns), qkv[:, 2]
        x = x + self.proj(attend(q, k, v, is_patch).reshape(x.shape))
        inner = jax.nn.gelu(self.up(self.norm2(x)), approximate=True)
        return x + self.down(inner)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, is_key: jax.Array, scale: float | None = None
) -> jax.Array:
    """Attend from all N patches to all keys; q, k and v are [N, heads, size], N a multiple of 64.

    `scale` multiplies scores; None: one over the root of the size.

    Scores are computed for blocks of queries: those of a large image do not fit in memory.
    """
    num, heads, size = q.shape
    block = num
    scale = size**-0.5 if scale is None else scale
    while block > 8 and 4 * heads * block * num > SCORE_BYTES:
        block //= 2
    bias = jnp.where(is_key, 0.0, -jnp.inf).astype(jnp.float32)

    def of_block(q: jax.Array) -> jax.Array:
        wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = wide("qhd,khd->hqk", q, k) * scale + bias
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return wide("hqk,khd->qhd", shares, v).astype(v.dtype)

    out: jax.Array = lax.map(of_block, q.reshape(num // block, block, heads, size))
    return out.reshape(num, heads, size)


class PatchMerger(nnx.Module):
    """Maps the patches of each token to its vector; `is_early` norms each patch by itself."""

    def __init__(
        self, config: Qwen3VLVision, dtype: DTypeLike, prefix: str = "", *, is_early: bool
    ) -> None:
        merged = config.hidden_size * config.patches_per_token
        self.norm = layer_norm(f"{prefix}norm", config.hidden_size if is_early else merged, dtype)
        self.up = linear(f"{prefix}linear_fc1", merged, merged, dtype)
        self.down = linear(f"{prefix}linear_fc2", merged, config.out_hidden_size, dtype)
        self.merged_size = merged
        self.is_early = is_early

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [N, hidden] to [N / patches_per_token, out_hidden_size]."""
        if self.is_early:
            x = self.norm(x).reshape(-1, self.merged_size)
        else:
            x = self.norm(x.reshape(-1, self.merged_size))
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Qwen3VLTower(VisionTower):
    """The whole tower."""

    config: Qwen3VLVision

    def __init__(self, config: Qwen3VLVision, dtype: DTypeLike, prefix: str) -> None:
        """Declare the tower; `prefix` precedes the names of its tensors."""
        self.config = config
        side, hidden = config.images.patch_size, config.hidden_size
        # Videos have two frames in a patch; both are the image.
        kernel = Tensor(f"{prefix}patch_embed.proj.weight", (hidden, 3, 2, side, side))
        self.patch_kernel = parameter(kernel, dtype)
        self.patch_bias = parameter(Tensor(f"{prefix}patch_embed.proj.bias", (hidden,)), dtype)
        grid = Tensor(f"{prefix}pos_embed.weight", (config.grid_side**2, hidden))
        self.positions = parameter(grid, dtype)
        self.blocks = VisionBlock(config, dtype)
        stack_layers(self.blocks, range(config.depth), 1, f"{prefix}blocks.{{}}.")
        self.merger = PatchMerger(config, dtype, f"{prefix}merger.", is_early=True)
        self.deepstack = nnx.Dict(
            {
                str(i): PatchMerger(
                    config, dtype, f"{prefix}deepstack_merger_list.{i}.", is_early=False
                )
                for i in range(len(config.deepstack))
            }
        )

    def __call__(self, patches: jax.Array, height: jax.Array, width: jax.Array) -> jax.Array:
        config = self.config
        row, column = places(len(patches), width, config.images.merge_size)
        x = self._embed(patches) + self._learned(row, column, height, width)
        turns = self._rotation(row, column)
        is_patch = jnp.arange(len(patches)) < height * width
        graphdef, weights = nnx.split(self.blocks)
        num_kept = len(config.deepstack)
        slots = np.full(config.depth, num_kept, np.int32)  # the last slot is never read
        slots[list(config.deepstack)] = np.arange(num_kept)

        def run(carry: tuple[jax.Array, jax.Array], layer: jax.Array) -> tuple[Any, None]:
            x, kept = carry
            block: VisionBlock = nnx.merge(graphdef, weights_of_layer(weights, layer))
            x = block(x, turns, is_patch)
            if num_kept:
                kept = lax.dynamic_update_index_in_dim(kept, x, jnp.asarray(slots)[layer], 0)
            return (x, kept), None

        kept = jnp.zeros((num_kept + 1 if num_kept else 0, *x.shape), x.dtype)
        (x, kept), _ = lax.scan(run, (x, kept), jnp.arange(config.depth, dtype=jnp.int32))
        further = [merge(kept[int(i)]) for i, merge in self.deepstack.items()]
        return jnp.concatenate([self.merger(x), *further], axis=-1)

    def _embed(self, patches: jax.Array) -> jax.Array:
        kernel = jnp.sum(self.patch_kernel[...].astype(jnp.float32), axis=2)
        return self.embedded(patches, kernel.astype(self.patch_kernel.dtype)) + self.patch_bias[...]

    def _learned(
        self, row: jax.Array, column: jax.Array, height: jax.Array, width: jax.Array
    ) -> jax.Array:
        """Interpolate the learned positions between the four nearest points of their grid."""
        side, grid = self.config.grid_side, self.positions[...]
        rows, columns = _taps(row, height, side), _taps(column, width, side)
        points = [
            grid[i * side + j].astype(jnp.float32) * (own * other)[:, None]
            for i, own in rows
            for j, other in columns
        ]
        return reduce(jnp.add, points).astype(grid.dtype)

    def _rotation(self, row: jax.Array, column: jax.Array) -> Rotation:
        config = self.config
        num = config.hidden_size // config.num_heads // 4  # frequencies of rows, and of columns
        exponents = np.arange(num, dtype=np.float32) / num
        frequencies = (1.0 / config.theta**exponents).astype(np.float32)
        angles = jnp.concatenate(
            [axis.astype(jnp.float32)[:, None] * frequencies for axis in (row, column)], axis=-1
        )[:, None]
        return Rotation(jnp.cos(angles), jnp.sin(angles))


def places(num_patches: int, width: jax.Array, merge: int) -> tuple[jax.Array, jax.Array]:
    """Return each patch's row and column, int32 [N]."""
    patch = jnp.arange(num_patches, dtype=jnp.int32)
    token, own = patch // merge**2, patch % merge**2
    tokens_wide = width // merge
    return (
        token // tokens_wide * merge + own // merge,
        token % tokens_wide * merge + own % merge,
    )


def _taps(place: jax.Array, size: jax.Array, side: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Return the two points of a grid's axis around each place of `size` places, with shares."""
    step = (side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32)
    at = jnp.clip(place.astype(jnp.float32) * step, 0, side - 1)
    first = jnp.minimum(at.astype(jnp.int32), side - 1)
    share = at - first
    return (first, 1 - share), (jnp.minimum(first + 1, side - 1), share)
