"""The dense Qwen3 that ``train`` trains.

The forward pass is written for reading and for short training sequences: no cache, no pages. The
parameters are one flat dictionary under the names that Hugging Face transformers gives them, so
exporting is only writing the file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale the last axis to a root mean square of one."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Apply rotary embedding to x [B, T, H, D] at positions [B, T]; pairs are (d, d + D/2)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = positions[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute causal attention of scaled q [B, T, H, D] over k, v [B, T, KV, D]: [B, T, H * D]."""
    batch, length, kv_heads, dim = k.shape
    q = q.reshape(batch, length, kv_heads, -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return out.reshape(batch, length, -1)


def attend_passes(
    q: jax.Array, keys: Sequence[jax.Array], values: Sequence[jax.Array]
) -> jax.Array:
    """Compute attention of the last pass's scaled q [B, T, H, D]: [B, T, H * D].

    Each pass has keys and values [B, T, KV, D]. After n earlier passes, a query at t sees the first
    pass's keys up to t - n, and the key of each later pass at the next position.
    """
    batch, length, kv_heads, dim = keys[0].shape
    q = q.reshape(batch, length, kv_heads, -1, dim)
    num_before = len(keys) - 1
    seen = jnp.tril(jnp.ones((length, length), bool), -num_before)
    scores = [jnp.where(seen, jnp.einsum("btkgd,bskd->bkgts", q, keys[0]), -1e30)]

    def at_its_place(x: jax.Array, number: int) -> jax.Array:
        return jnp.roll(x, num_before - number, axis=1)

    later = range(1, len(keys))
    for number in later:
        own = jnp.einsum("btkgd,btkd->bkgt", q, at_its_place(keys[number], number))
        scores.append(own[..., None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights[..., :length], values[0])
    for number in later:
        share = weights[..., length + number - 1]
        out += jnp.einsum("bkgt,btkd->btkgd", share, at_its_place(values[number], number))
    return out.reshape(batch, length, -1)


def gated_mlp(params: Params, layer: str, x: jax.Array) -> jax.Array:
    """Apply the feed-forward layer to x [B, T, hidden]."""
    gate = jax.nn.silu(x @ params[f"{layer}.gate_proj.weight"].T)
    up = x @ params[f"{layer}.up_proj.weight"].T
    return (gate * up) @ params[f"{layer}.down_proj.weight"].T


class DenseQwen3(NamedTuple):
    """The shape of the model: a few of the keys of its config.json."""

    vocab_size: int = 768
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def init_params(self, key: jax.Array) -> Params:
        """Return random fp32 weights, every matrix as [outputs, inputs]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.self_attn.q_proj.weight": (q_size, hidden),
                f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
                f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
                f"{layer}.self_attn.q_norm.weight": (self.head_dim,),
                f"{layer}.self_attn.k_norm.weight": (self.head_dim,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.mlp.gate_proj.weight": (inner, hidden),
                f"{layer}.mlp.up_proj.weight": (inner, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, inner),
            }
        params = {}
        for name, shape in shapes.items():
            key, subkey = jax.random.split(key)
            if len(shape) == 1:
                params[name] = jnp.ones(shape)
            else:
                scale = 0.02 if "embed" in name else shape[1] ** -0.5
                params[name] = scale * jax.random.normal(subkey, shape)
        return params

    def forward(self, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Return logits [B, T, vocab] of tokens [B, T] at positions [B, T]."""
        return self.logits(params, self.states(params, tokens, positions)[-1])

    def logits(self, params: Params, state: jax.Array) -> jax.Array:
        """Return logits [B, T, vocab] of the last of `states`, [B, T, hidden]."""
        normal = rms_norm(state, params["model.norm.weight"], self.rms_norm_eps)
        return normal @ params["model.embed_tokens.weight"].T

    def states(self, params: Params, tokens: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """Return the hidden states [B, T, hidden] before each layer, and after the last one."""
        eps = self.rms_norm_eps
        x = params["model.embed_tokens.weight"][tokens]
        states = [x]
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}"
            h = rms_norm(x, params[f"{layer}.input_layernorm.weight"], eps)
            x = x + self._attention(params, f"{layer}.self_attn", h, positions)
            h = rms_norm(x, params[f"{layer}.post_attention_layernorm.weight"], eps)
            x = x + gated_mlp(params, f"{layer}.mlp", h)
            states.append(x)
        return states

    def describe(self) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            **self._asdict(),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
        }

    def _attention(
        self, params: Params, layer: str, x: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Apply causal grouped-query attention to x [B, T, hidden]."""
        batch, length, _ = x.shape
        dim = self.head_dim

        def heads(part: str) -> jax.Array:
            flat = x @ params[f"{layer}.{part}_proj.weight"].T
            return flat.reshape(batch, length, -1, dim)

        q = rms_norm(heads("q"), params[f"{layer}.q_norm.weight"], self.rms_norm_eps)
        k = rms_norm(heads("k"), params[f"{layer}.k_norm.weight"], self.rms_norm_eps)
        q = rotate(q, positions, self.rope_theta) * dim**-0.5
        k = rotate(k, positions, self.rope_theta)
        return attend(q, k, heads("v")) @ params[f"{layer}.o_proj.weight"].T
