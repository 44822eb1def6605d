"""The EAGLE-3 head of the dense demonstration model, for ``train_draft_layer``.

The head is a separate checkpoint. Its parameters have the names of published heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.demo_model.dense_qwen3 import (
    DenseQwen3,
    Params,
    attend_passes,
    gated_mlp,
    rms_norm,
    rotate,
)

_LAYER = "midlayer"


class Eagle3Head(NamedTuple):
    """The shape of the head, which is a layer of its model's shape."""

    model: DenseQwen3
    token_ids: tuple[int, ...]  # token of each column of its logits, ascending

    @property
    def captured(self) -> tuple[int, int, int]:
        """Return the layers whose inputs the head reads; the published choice needs seven."""
        return 1, 2, 3

    def init_draft_params(self, key: jax.Array) -> Params:
        """Return random fp32 weights, every matrix as [outputs, inputs]."""
        own = self.model
        hidden, inner = own.hidden_size, own.intermediate_size
        q_size, kv_size = (
            num * own.head_dim for num in (own.num_attention_heads, own.num_key_value_heads)
        )
        shapes = {
            "fc.weight": (hidden, len(self.captured) * hidden),
            f"{_LAYER}.self_attn.q_proj.weight": (q_size, 2 * hidden),
            f"{_LAYER}.self_attn.k_proj.weight": (kv_size, 2 * hidden),
            f"{_LAYER}.self_attn.v_proj.weight": (kv_size, 2 * hidden),
            f"{_LAYER}.self_attn.o_proj.weight": (hidden, q_size),
            f"{_LAYER}.mlp.gate_proj.weight": (inner, hidden),
            f"{_LAYER}.mlp.up_proj.weight": (inner, hidden),
            f"{_LAYER}.mlp.down_proj.weight": (hidden, inner),
            "lm_head.weight": (len(self.token_ids), hidden),
        }
        keys = jax.random.split(key, len(shapes))
        params = {
            name: shape[1] ** -0.5 * jax.random.normal(own_key, shape)
            for own_key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        names = (*(f"{_LAYER}.{name}" for name in norms), "norm")
        return params | {f"{name}.weight": jnp.ones(hidden) for name in names}

    def model_outputs(
        self, params: Params, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the concatenated inputs of the captured layers, and the model's logits."""
        states = self.model.states(params, tokens, positions)
        captured = jnp.concatenate([states[layer] for layer in self.captured], axis=-1)
        return captured, self.model.logits(params, states[-1])

    def draft_logits(
        self,
        params: Params,
        captured: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        num_passes: int,
    ) -> list[jax.Array]:
        """Return the head's logits of each pass, [B, T, columns]; at t, of the token at t + 2.

        The first pass reads the model's captured states at t. Each later pass reads the result of
        the previous pass at t - 1, and the keys and values of earlier passes at the positions that
        these guessed, and of the first pass before them.
        """
        eps, batch, dim = self.model.rms_norm_eps, tokens.shape, self.model.head_dim
        after = jnp.roll(tokens, -1, axis=1)
        vectors = params["model.embed_tokens.weight"][after]
        vectors = rms_norm(vectors, params[f"{_LAYER}.input_layernorm.weight"], eps)
        x = captured @ params["fc.weight"].T
        results: list[jax.Array] = []
        keys: list[jax.Array] = []
        values: list[jax.Array] = []

        def heads(name: str, both: jax.Array) -> jax.Array:
            flat = both @ params[f"{_LAYER}.self_attn.{name}_proj.weight"].T
            return flat.reshape(*batch, -1, dim)

        for _ in range(num_passes):
            normal = rms_norm(x, params[f"{_LAYER}.hidden_norm.weight"], eps)
            both = jnp.concatenate([vectors, normal], axis=-1)
            q, k = (rotate(heads(name, both), positions, self.model.rope_theta) for name in "qk")
            keys.append(k)
            values.append(heads("v", both))
            found = attend_passes(q * dim**-0.5, keys, values)
            x = x + found @ params[f"{_LAYER}.self_attn.o_proj.weight"].T
            normal = rms_norm(x, params[f"{_LAYER}.post_attention_layernorm.weight"], eps)
            x = x + gated_mlp(params, f"{_LAYER}.mlp", normal)
            results.append(rms_norm(x, params["norm.weight"], eps) @ params["lm_head.weight"].T)
            x = jnp.roll(x, 1, axis=1)
        return results

    def describe(self) -> dict[str, Any]:
        """Return the head's config.json."""
        return self.model.describe() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.token_ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.captured]
            },
        }
