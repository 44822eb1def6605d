"""The dense Qwen3 that ``train_demo_model`` trains, and its Hugging Face folder.

The forward pass is written for reading and for short training sequences: no cache, no pages. The
parameters are one flat dictionary under the names that Hugging Face transformers gives them, so
exporting is only writing the file.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

Params = dict[str, jax.Array]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Config(NamedTuple):
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


def init_params(config: Config, key: jax.Array) -> Params:
    """Random fp32 weights, every matrix as [outputs, inputs]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
            f"{layer}.self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    params = {}
    for name, shape in shapes.items():
        key, subkey = jax.random.split(key)
        if len(shape) == 1:
            params[name] = jnp.ones(shape)
        else:
            scale = 0.02 if "embed" in name else shape[1] ** -0.5
            params[name] = scale * jax.random.normal(subkey, shape)
    return params


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale the last axis to a root mean square of one."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x [B, T, H, D] at positions [B, T]; pairs are (d, d + D/2)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = positions[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(
    params: Params, layer: str, x: jax.Array, positions: jax.Array, config: Config
) -> jax.Array:
    """Causal grouped-query attention over x [B, T, hidden]."""
    batch, length, _ = x.shape
    kv_heads, dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads

    def heads(part: str) -> jax.Array:
        flat = x @ params[f"{layer}.{part}_proj.weight"].T
        return flat.reshape(batch, length, -1, dim)

    q = rms_norm(heads("q"), params[f"{layer}.q_norm.weight"], config.rms_norm_eps)
    k = rms_norm(heads("k"), params[f"{layer}.k_norm.weight"], config.rms_norm_eps)
    q = rotate(q, positions, config.rope_theta) * dim**-0.5
    k = rotate(k, positions, config.rope_theta)
    q = q.reshape(batch, length, kv_heads, group, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, heads("v"))
    return out.reshape(batch, length, -1) @ params[f"{layer}.o_proj.weight"].T


def forward(params: Params, tokens: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Logits [B, T, vocab] of tokens [B, T] at positions [B, T]."""
    eps = config.rms_norm_eps
    embedding = params["model.embed_tokens.weight"]
    x = embedding[tokens]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        h = rms_norm(x, params[f"{layer}.input_layernorm.weight"], eps)
        x = x + attention(params, f"{layer}.self_attn", h, positions, config)
        h = rms_norm(x, params[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = jax.nn.silu(h @ params[f"{layer}.mlp.gate_proj.weight"].T)
        up = h @ params[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate * up) @ params[f"{layer}.mlp.down_proj.weight"].T
    return rms_norm(x, params["model.norm.weight"], eps) @ embedding.T


def export(
    folder: Path, config: Config, tokenizer: Tokenizer, stored: dict[str, np.ndarray]
) -> None:
    """Write the Hugging Face layout: weights, configuration, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    tokens = {"eos_token_id": end_of_turn, "pad_token_id": end_of_text}
    model_config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **config._asdict(),
        **tokens,
        "bos_token_id": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {
        "config.json": model_config,
        "generation_config.json": {"do_sample": False, **tokens},
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": special,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
