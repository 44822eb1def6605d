"""The vision tower of Gemma 4: two tables of positions, axial rotation, means of patches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.layers.linear import Linear
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter, stack_layers
from sgl_jax.layers.rotary import Rotation, rotate, rotation
from sgl_jax.layers.sources import Ones, Tensor
from sgl_jax.models.gemma_tower import through_blocks
from sgl_jax.models.gemma_vision_config import Gemma4Vision
from sgl_jax.models.vision_tower import VisionTower, attend, places

_SCORE_SCALE = 1.0
_PREFIX = "model.vision_tower."


class ClippedLinear(nnx.Module):
    """x times a matrix; with `clips`, inputs and outputs are clipped to the checkpoint's bounds."""

    def __init__(
        self, name: str, num_inputs: int, num_outputs: int, dtype: DTypeLike, *, clips: bool
    ) -> None:
        shape = num_inputs, num_outputs
        self.linear = Linear(Tensor(f"{name}.linear.weight", shape, transposed=True), dtype)
        bounds = ("input_min", "input_max", "output_min", "output_max") if clips else ()
        self.bounds = nnx.Dict(
            {own: parameter(Tensor(f"{name}.{own}", ()), dtype, initial="ones") for own in bounds}
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._clipped(self.linear(self._clipped(x, "input")), "output")

    def _clipped(self, x: jax.Array, side: str) -> jax.Array:
        if not self.bounds:
            return x
        least, most = (self.bounds[f"{side}_{end}"][...] for end in ("min", "max"))
        return jnp.clip(x, least.astype(x.dtype), most.astype(x.dtype))


class Gemma4VisionBlock(nnx.Module):
    """Attention among all patches, and a gated feed-forward layer, with norms on both sides."""

    def __init__(self, config: Gemma4Vision, dtype: DTypeLike) -> None:
        hidden, width, size = config.hidden_size, config.intermediate_size, config.head_dim

        def norm(name: str, size: int = hidden) -> RMSNorm:
            return RMSNorm(Tensor(f"{name}.weight", (size,)), config.eps, dtype)

        def matrix(name: str, num_inputs: int, num_outputs: int) -> ClippedLinear:
            return ClippedLinear(name, num_inputs, num_outputs, dtype, clips=config.clips)

        self.input_norm = norm("input_layernorm")
        self.attended_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp_output_norm = norm("post_feedforward_layernorm")
        queries, keys = (num * size for num in (config.num_heads, config.num_kv_heads))
        self.q = matrix("self_attn.q_proj", hidden, queries)
        self.k = matrix("self_attn.k_proj", hidden, keys)
        self.v = matrix("self_attn.v_proj", hidden, keys)
        self.output = matrix("self_attn.o_proj", queries, hidden)
        self.q_norm = norm("self_attn.q_norm", size)
        self.k_norm = norm("self_attn.k_norm", size)
        self.v_norm = RMSNorm(Ones((size,)), config.eps, dtype)
        self.gate = matrix("mlp.gate_proj", hidden, width)
        self.up = matrix("mlp.up_proj", hidden, width)
        self.down = matrix("mlp.down_proj", width, hidden)
        self.head_dim, self.group = size, config.num_heads // config.num_kv_heads

    def __call__(self, x: jax.Array, turns: list[Rotation], is_patch: jax.Array) -> jax.Array:
        """Map x [N, hidden] to the result; `turns` are those of columns and of rows."""
        normed = self.input_norm(x)
        q, k, v = (
            own(normed).reshape(len(x), -1, self.head_dim) for own in (self.q, self.k, self.v)
        )
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        k, v = (jnp.repeat(each, self.group, axis=1) for each in (k, self.v_norm(v)))
        attended = attend(q, k, v, is_patch, _SCORE_SCALE).reshape(len(x), -1)
        x = x + self.attended_norm(self.output(attended))
        normed = self.mlp_norm(x)
        inner = jax.nn.gelu(self.gate(normed), approximate=True) * self.up(normed)
        return x + self.mlp_output_norm(self.down(inner))


def _turned(x: jax.Array, turns: list[Rotation]) -> jax.Array:
    """Rotate the first half of each head by the columns, the other by the rows."""
    halves = jnp.split(x, 2, axis=-1)
    turned = [rotate(half, by) for half, by in zip(halves, turns, strict=True)]
    return jnp.concatenate(turned, axis=-1)


class Gemma4Tower(VisionTower):
    """The whole tower, with `embed_vision`."""

    config: Gemma4Vision

    def __init__(self, config: Gemma4Vision, dtype: DTypeLike) -> None:
        """Declare the tower."""
        self.config = config
        hidden, embedder = config.hidden_size, f"{_PREFIX}patch_embedder."
        values = config.patch_values
        kernel = Tensor(f"{embedder}input_proj.weight", (values, hidden), transposed=True)
        self.patches = Linear(kernel, dtype)
        table = Tensor(f"{embedder}position_embedding_table", (2, config.num_positions, hidden))
        self.positions = parameter(table, dtype)
        self.blocks = Gemma4VisionBlock(config, dtype)
        stack_layers(self.blocks, range(config.depth), 1, f"{_PREFIX}encoder.layers.{{}}.")
        self.standard: Any = nnx.Dict(
            {
                name: parameter(Tensor(f"{_PREFIX}{name}", (hidden,)), dtype, initial="ones")
                for name in (("std_bias", "std_scale") if config.standardizes else ())
            }
        )
        self.norm = RMSNorm(Ones((hidden,)), config.eps, dtype)
        name, shape = "model.embed_vision.embedding_projection", (hidden, config.out_hidden_size)
        self.project = Linear(Tensor(f"{name}.weight", shape, transposed=True), dtype)

    def __call__(self, patches: jax.Array, height: jax.Array, width: jax.Array) -> jax.Array:
        config = self.config
        row, column = places(len(patches), width, config.images.merge_size)
        of_columns, of_rows = (
            table.at[place].get(mode="clip")
            for table, place in zip(self.positions[...], (column, row), strict=True)
        )
        dtype = self.positions.dtype
        x = self.patches(self.normalised(patches).astype(dtype)) + (of_columns + of_rows)
        size = config.head_dim // 2
        exponents = np.arange(0, size, 2, dtype=np.float32) / size
        frequencies = (1.0 / config.theta**exponents).astype(np.float32)
        turns = [rotation(place, frequencies, 1.0, size // 2) for place in (column, row)]
        is_patch = jnp.arange(len(patches)) < height * width
        x = through_blocks(self.blocks, config.depth, lambda own, x: own(x, turns, is_patch), x)
        tokens = x.reshape(-1, config.patches_per_token, config.hidden_size).astype(jnp.float32)
        means = jnp.mean(tokens, axis=1).astype(x.dtype).astype(jnp.float32)
        means *= config.hidden_size**0.5
        if config.standardizes:
            bias, scale = (self.standard[f"std_{own}"][...] for own in ("bias", "scale"))
            means = (means - bias.astype(jnp.float32)) * scale.astype(jnp.float32)
        return self.project(self.norm(means.astype(x.dtype)))
