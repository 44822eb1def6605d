"""The vision tower of Gemma 3: SigLIP, means of its patches, and a projection."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.layers.layer_weights import weights_of_layer
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter, stack_layers
from sgl_jax.layers.sources import OneOf, Source, Stacked, Tensor
from sgl_jax.models.gemma_vision_config import Gemma3Vision
from sgl_jax.models.vision_tower import VisionTower, attend, layer_norm, linear, places


class SiglipBlock(nnx.Module):
    """Attention among all patches, and a feed-forward layer, with pre-norms."""

    def __init__(self, config: Gemma3Vision, dtype: DTypeLike) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        self.norm1 = layer_norm("layer_norm1", hidden, dtype, config.eps)
        self.norm2 = layer_norm("layer_norm2", hidden, dtype, config.eps)
        self.q, self.k, self.v, self.proj = (
            linear(f"self_attn.{name}_proj", hidden, hidden, dtype)
            for name in ("q", "k", "v", "out")
        )
        self.up = linear("mlp.fc1", hidden, width, dtype)
        self.down = linear("mlp.fc2", width, hidden, dtype)
        self.num_heads = config.num_heads

    def __call__(self, x: jax.Array, is_patch: jax.Array) -> jax.Array:
        """Map x [N, hidden] to the result; `is_patch` is bool [N], False for padding."""
        normed = self.norm1(x)
        q, k, v = (
            own(normed).reshape(len(x), self.num_heads, -1) for own in (self.q, self.k, self.v)
        )
        x = x + self.proj(attend(q, k, v, is_patch).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True))


class Gemma3Tower(VisionTower):
    """The whole tower, with `multi_modal_projector`."""

    config: Gemma3Vision

    def __init__(self, config: Gemma3Vision, dtype: DTypeLike) -> None:
        """Declare the tower."""
        self.config = config
        side, hidden, prefix = config.images.patch_size, config.hidden_size, "vision_tower."
        embeddings, projector = f"{prefix}embeddings.", "multi_modal_projector."
        kernel = Tensor(f"{embeddings}patch_embedding.weight", (hidden, 3, side, side))
        self.patch_kernel = parameter(kernel, dtype)
        self.patch_bias = parameter(Tensor(f"{embeddings}patch_embedding.bias", (hidden,)), dtype)
        grid = Tensor(f"{embeddings}position_embedding.weight", (config.grid_side**2, hidden))
        self.positions = parameter(grid, dtype)
        self.blocks = SiglipBlock(config, dtype)
        stack_layers(self.blocks, range(config.depth), 1, f"{prefix}encoder.layers.{{}}.")
        self.last_norm = layer_norm(f"{prefix}post_layernorm", hidden, dtype, config.eps)
        norm = Tensor(f"{projector}mm_soft_emb_norm.weight", (hidden,))
        self.norm = RMSNorm(norm, config.eps, dtype, from_one=True)
        shape = hidden, config.out_hidden_size
        self.project = Linear(Tensor(f"{projector}mm_input_projection_weight", shape), dtype)
        _may_begin(self, prefix, f"{prefix}vision_model.")  # as published

    def __call__(self, patches: jax.Array, height: jax.Array, width: jax.Array) -> jax.Array:
        config = self.config
        row, column = places(len(patches), width, config.images.merge_size)
        learned = self.positions[...].at[row * config.grid_side + column].get(mode="clip")
        x = self.embedded(patches, self.patch_kernel[...]) + self.patch_bias[...] + learned
        is_patch = jnp.arange(len(patches)) < height * width
        x = through_blocks(self.blocks, config.depth, lambda block, x: block(x, is_patch), x)
        tokens = self.last_norm(x).reshape(-1, config.patches_per_token, config.hidden_size)
        means = jnp.mean(tokens.astype(jnp.float32), axis=1).astype(x.dtype)
        return self.project(self.norm(means))


def through_blocks(
    blocks: nnx.Module, depth: int, run: Callable[[Any, jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """Return x after run(block, x) for each of `depth` stacked blocks."""
    graphdef, weights = nnx.split(blocks)

    def step(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
        return run(nnx.merge(graphdef, weights_of_layer(weights, layer)), x), None

    return lax.scan(step, x, jnp.arange(depth, dtype=jnp.int32))[0]


def _may_begin(tower: nnx.Module, prefix: str, other: str) -> None:
    """Let the names of tensors that begin with `prefix` begin with `other` instead."""

    def renamed(source: Source) -> Source:
        if isinstance(source, Stacked):
            names = tuple(name.replace(prefix, other, 1) for name in source.prefixes)
            return replace(source, prefixes=names)
        assert isinstance(source, Tensor)
        return replace(source, name=source.name.replace(prefix, other, 1))

    for _, param in nnx.to_flat_state(nnx.state(tower)):
        named = renamed(param.source)
        if named != param.source:
            param.set_metadata(source=OneOf(param.source, named))
