"""The hybrid Qwen3.5 that ``train`` trains: gated delta nets and attention in turn.

Like ``dense_qwen3`` it is written for short training sequences, with parameters under the names
that Hugging Face transformers gives them. The delta rule runs in chunks (arXiv 2412.06464), as
its recurrence would be one small product a token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from benchmarks.demo_model.dense_qwen3 import (
    Params,
    attend,
    attend_passes,
    gated_mlp,
    rms_norm,
    rotate,
)

CHUNK = 64  # tokens


class HybridQwen35(NamedTuple):
    """The shape of the model: a few of the keys of its config.json."""

    vocab_size: int = 768
    hidden_size: int = 160
    intermediate_size: int = 416
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    @property
    def token_ids(self) -> range:
        """Return the token of each column of the model's and the draft layer's logits."""
        return range(self.vocab_size)

    @property
    def layer_types(self) -> list[str]:
        """Return the type of each layer: every second layer is full attention."""
        return ["linear_attention", "full_attention"] * (self.num_hidden_layers // 2)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Return RoPE's parameters for full attention: a quarter of a head is rotated."""
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}

    def init_params(self, key: jax.Array) -> Params:
        """Return random fp32 weights, every matrix as [outputs, inputs]."""
        hidden = self.hidden_size
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for i, kind in enumerate(self.layer_types):
            layer = f"model.layers.{i}"
            shapes |= self._mlp_shapes(layer)
            if kind == "full_attention":
                shapes |= self._attention_shapes(layer)
            else:
                rates = self.linear_num_value_heads
                shapes |= {
                    f"{layer}.linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
                    f"{layer}.linear_attn.in_proj_z.weight": (values, hidden),
                    f"{layer}.linear_attn.in_proj_b.weight": (rates, hidden),
                    f"{layer}.linear_attn.in_proj_a.weight": (rates, hidden),
                    f"{layer}.linear_attn.conv1d.weight": (
                        2 * keys + values,
                        1,
                        self.linear_conv_kernel_dim,
                    ),
                    f"{layer}.linear_attn.A_log": (rates,),
                    f"{layer}.linear_attn.dt_bias": (rates,),
                    f"{layer}.linear_attn.norm.weight": (self.linear_value_head_dim,),
                    f"{layer}.linear_attn.out_proj.weight": (hidden, values),
                }
        return _random_params(shapes, key)

    def init_draft_params(self, key: jax.Array) -> Params:
        """Return random fp32 weights of the draft layer, every matrix as [outputs, inputs].

        The layer is full attention after a product that joins token vectors and hidden states.
        """
        hidden, layer = self.hidden_size, "mtp.layers.0"
        vectors = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
        shapes |= {f"mtp.{name}.weight": (hidden,) for name in vectors}
        return _random_params(shapes | self._mlp_shapes(layer) | self._attention_shapes(layer), key)

    def _mlp_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }

    def _attention_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        q_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        return {
            f"{layer}.self_attn.q_proj.weight": (2 * q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
            f"{layer}.self_attn.q_norm.weight": (self.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (self.head_dim,),
        }

    def forward(self, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Return logits [B, T, vocab] of tokens [B, T] at positions [B, T]."""
        return self.logits(params, self.hidden_states(params, tokens, positions))

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Return logits [B, T, vocab] of hidden states [B, T, hidden]."""
        return hidden @ params["model.embed_tokens.weight"].T

    def hidden_states(self, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Return normalised hidden states [B, T, hidden] of tokens [B, T] at positions [B, T]."""
        x = params["model.embed_tokens.weight"][tokens]
        for i, kind in enumerate(self.layer_types):
            layer = f"model.layers.{i}"
            h = self._norm(params, f"{layer}.input_layernorm", x)
            if kind == "full_attention":
                name = f"{layer}.self_attn"
                q, k, v, gate = self._heads(params, name, h, positions)
                found = attend(q, k, v) * gate
                x = x + found @ params[f"{name}.o_proj.weight"].T
            else:
                x = x + self._delta_net(params, f"{layer}.linear_attn", h)
            h = self._norm(params, f"{layer}.post_attention_layernorm", x)
            x = x + gated_mlp(params, f"{layer}.mlp", h)
        return self._norm(params, "model.norm", x)

    def model_outputs(
        self, params: Params, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states that `draft_logits` starts from, and the model's logits."""
        hidden = self.hidden_states(params, tokens, positions)
        return hidden, self.logits(params, hidden)

    def draft_logits(
        self,
        params: Params,
        hidden: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        num_passes: int,
    ) -> list[jax.Array]:
        """Return the draft layer's logits of each pass, [B, T, vocab]; at t, of the token at t + 2.

        The first pass reads the model's `hidden` at t. Each later pass reads the result of the
        previous pass at t - 1, and the keys and values that a server has then: those of earlier
        passes at the positions that these passes guessed, and those of the first pass before them.

        Args:
            hidden: the model's hidden states, [B, T, hidden].
            tokens, positions: [B, T].
        """
        name, layer = "mtp.layers.0.self_attn", "mtp.layers.0"
        after = jnp.roll(tokens, -1, axis=1)
        vectors = params["model.embed_tokens.weight"][after]
        vectors = self._norm(params, "mtp.pre_fc_norm_embedding", vectors)
        results: list[jax.Array] = []
        keys: list[jax.Array] = []
        values: list[jax.Array] = []
        for _ in range(num_passes):
            joined = [vectors, self._norm(params, "mtp.pre_fc_norm_hidden", hidden)]
            x = jnp.concatenate(joined, axis=-1) @ params["mtp.fc.weight"].T
            h = self._norm(params, f"{layer}.input_layernorm", x)
            q, k, v, gate = self._heads(params, name, h, positions)
            keys.append(k)
            values.append(v)
            x = x + attend_passes(q, keys, values) * gate @ params[f"{name}.o_proj.weight"].T
            h = self._norm(params, f"{layer}.post_attention_layernorm", x)
            x = x + gated_mlp(params, f"{layer}.mlp", h)
            x = self._norm(params, "mtp.norm", x)
            results.append(self.logits(params, x))
            hidden = jnp.roll(x, 1, axis=1)
        return results

    def describe(self) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            **self._asdict(),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": self.layer_types,
            "rope_parameters": self.rope_parameters,
            "tie_word_embeddings": True,
            "use_cache": True,
        }

    def _norm(self, params: Params, name: str, x: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + params[f"{name}.weight"], self.rms_norm_eps)

    def _heads(
        self, params: Params, layer: str, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return scaled queries, keys and values [B, T, H, D] of x [B, T, hidden], and the gate of
        attention's result, [B, T, H * D]."""
        batch, length, _ = x.shape
        dim, rope = self.head_dim, self.rope_parameters
        rotated = int(dim * rope["partial_rotary_factor"])

        def heads(part: str, width: int) -> jax.Array:
            flat = x @ params[f"{layer}.{part}_proj.weight"].T
            return flat.reshape(batch, length, -1, width)

        def rotate_part(h: jax.Array) -> jax.Array:
            turned = rotate(h[..., :rotated], positions, rope["rope_theta"])
            return jnp.concatenate([turned, h[..., rotated:]], axis=-1)

        q, gate = jnp.split(heads("q", 2 * dim), 2, axis=-1)
        q = rotate_part(self._norm(params, f"{layer}.q_norm", q)) * dim**-0.5
        k = rotate_part(self._norm(params, f"{layer}.k_norm", heads("k", dim)))
        return q, k, heads("v", dim), jax.nn.sigmoid(gate.reshape(batch, length, -1))

    def _delta_net(self, params: Params, layer: str, x: jax.Array) -> jax.Array:
        """Apply a gated delta net to x [B, T, hidden]."""
        batch, length, _ = x.shape
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        group = self.linear_num_value_heads // self.linear_num_key_heads

        def project(part: str) -> jax.Array:
            return x @ params[f"{layer}.in_proj_{part}.weight"].T

        def by_head(flat: jax.Array, width: int) -> jax.Array:
            return flat.reshape(batch, length, -1, width)

        def key_heads(flat: jax.Array) -> jax.Array:
            h = by_head(flat, self.linear_key_head_dim)
            unit = h * jax.lax.rsqrt(jnp.sum(h * h, axis=-1, keepdims=True) + 1e-6)
            return jnp.repeat(unit, group, axis=2)

        mixed = causal_conv(project("qkv"), params[f"{layer}.conv1d.weight"][:, 0])
        q, k, v = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), axis=-1)
        speed = jnp.exp(params[f"{layer}.A_log"])
        decay = -speed * jax.nn.softplus(project("a") + params[f"{layer}.dt_bias"])
        found = delta_rule(
            key_heads(q) * self.linear_key_head_dim**-0.5,
            key_heads(k),
            by_head(v, self.linear_value_head_dim),
            decay,
            jax.nn.sigmoid(project("b")),
        )
        normed = rms_norm(found, params[f"{layer}.norm.weight"], self.rms_norm_eps)
        gated = normed.reshape(batch, length, -1) * jax.nn.silu(project("z"))
        return gated @ params[f"{layer}.out_proj.weight"].T


def _random_params(shapes: dict[str, tuple[int, ...]], key: jax.Array) -> Params:
    keys_of = jax.random.split(key, len(shapes))
    return {name: _initial(name, shapes[name], keys_of[i]) for i, name in enumerate(shapes)}


def _initial(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if name.endswith("A_log"):  # heads forget at speeds of one to sixteen ...
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if name.endswith("dt_bias"):  # ... times softplus of this, 0.001 to 0.1, as Mamba has it
        rate = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
        return rate + jnp.log(-jnp.expm1(-rate))
    if name.endswith("linear_attn.norm.weight"):
        return jnp.ones(shape)
    if len(shape) == 1:  # norms that scale by one and this
        return jnp.zeros(shape)
    scale = 0.02 if "embed" in name else shape[-1] ** -0.5
    return scale * jax.random.normal(key, shape)


def causal_conv(u: jax.Array, weight: jax.Array) -> jax.Array:
    """Convolve each channel of u [B, T, C] over its last K tokens, with weight [C, K]."""
    width = weight.shape[1]
    padded = jnp.pad(u, ((0, 0), (width - 1, 0), (0, 0)))
    taps = (padded[:, i : i + u.shape[1]] * weight[:, i] for i in range(width))
    return sum(taps, jnp.zeros_like(u))


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> jax.Array:
    """Apply the gated delta rule from a state of zeros, in chunks of `CHUNK` tokens.

    Args:
        q, k: [B, T, H, key_dim], k of length one.
        v: [B, T, H, value_dim].
        decay, beta: [B, T, H]; the logarithm of the state's decay factor, and the write rate.

    Returns:
        [B, T, H, value_dim].
    """
    length = q.shape[1]
    spare = -length % CHUNK

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, H, ...] -> [chunks, B, H, CHUNK, ...]
        padded = jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
        cut = padded.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
        return jnp.moveaxis(cut, (1, 3), (0, 2))

    q, k, v, decay, beta = map(chunks, (q, k, v, decay, beta))
    passed = jnp.cumsum(decay, axis=-1)
    gap = passed[..., :, None] - passed[..., None, :]
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Masked before the exponential: above the diagonal it could overflow.
    kept = jnp.exp(jnp.where(causal, gap, -jnp.inf))
    k_beta = k * beta[..., None]
    among = jnp.tril(k_beta @ jnp.swapaxes(k, -1, -2) * kept, -1)
    wanted = jnp.concatenate([v * beta[..., None], k_beta * jnp.exp(passed)[..., None]], axis=-1)
    solved = solve_triangular(among + jnp.eye(CHUNK), wanted, lower=True, unit_diagonal=True)
    new, from_state = jnp.split(solved, (v.shape[-1],), axis=-1)
    inner = q @ jnp.swapaxes(k, -1, -2) * kept
    q_kept = q * jnp.exp(passed)[..., None]
    k_kept = k * jnp.exp(passed[..., -1:] - passed)[..., None]
    keep_all = jnp.exp(passed[..., -1])[..., None, None]

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new, from_state, inner, q_kept, k_kept, keep_all = chunk
        written = new - from_state @ state
        out = q_kept @ state + inner @ written
        return keep_all * state + jnp.swapaxes(k_kept, -1, -2) @ written, out

    state = jnp.zeros((*k.shape[1:3], k.shape[-1], v.shape[-1]))
    _, out = jax.lax.scan(step, state, (new, from_state, inner, q_kept, k_kept, keep_all))
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length]
