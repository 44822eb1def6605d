"""A Qwen3.5 of full attention and its draft layer, plainly in float64; and its checkpoint."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 95,
}
HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 16


def layer_shapes(layer):
    inner = CONFIG["intermediate_size"]
    return {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (2 * HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}.self_attn.q_norm.weight": (DIM,),
        f"{layer}.self_attn.k_norm.weight": (DIM,),
        f"{layer}.mlp.gate_proj.weight": (inner, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (inner, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, inner),
    }


def random_weights(seed=0, vocab_size=CONFIG["vocab_size"]):
    """By their names in a checkpoint."""
    shapes = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        **{f"mtp.{x}.weight": (HIDDEN,) for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        "mtp.norm.weight": (HIDDEN,),
        **layer_shapes("mtp.layers.0"),
    }
    for layer in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        shapes |= layer_shapes(f"model.layers.{layer}")
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def markov_weights(seed=0, vocab_size=CONFIG["vocab_size"]):
    """Layers that add nothing: the next token depends on the last one alone, and the draft layer
    has the model's own distribution of it."""
    weights = random_weights(seed, vocab_size)
    for name, own in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "norm" in name:
            own[:] = 0
    weights["mtp.fc.weight"] = np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
    # Small, and of either sign: else a token would be followed by itself alone.
    factors = np.random.default_rng(seed).normal(0, 0.3, HIDDEN).astype(np.float32)
    weights["model.norm.weight"] = weights["mtp.norm.weight"] = factors - 1
    return weights


def write_checkpoint(folder: Path, weights, **changes):
    config = CONFIG | {"vocab_size": len(weights["model.embed_tokens.weight"])} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def attended(q, k, v, positions, cache):
    """Causal attention [n, heads, dim]; `cache` gets the key and the value of each position."""
    found, (_, num_heads, dim), num_kv_heads = np.zeros(q.shape), q.shape, k.shape[1]
    for i, position in enumerate(positions):
        cache[position] = k[i], v[i]
        keys, values = (np.array([cache[p][j] for p in range(position + 1)]) for j in (0, 1))
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            scores = keys[:, group] @ q[i, head] / np.sqrt(dim)
            shares = np.exp(scores - scores.max())
            found[i, head] = shares @ values[:, group] / shares.sum()
    return found


class DraftReference:
    """The model of `weights` over one row, without a cache.

    Tokens above the vocabulary are those of images, with `vectors`; `places` [3, n] are the rotary
    positions of the row's tokens by time, row and column, for the pairs of `axes`.
    """

    def __init__(self, weights, vectors=None, places=None, axes=()):
        self.weights = {name: own.astype(np.float64) for name, own in weights.items()}
        self.head = self.embedding = self.weights["model.embed_tokens.weight"]
        if vectors is not None:
            self.embedding = np.concatenate([self.head, vectors])
        self.places, self.axes = places, list(axes)

    def norm(self, name, x):
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG["rms_norm_eps"])
        return scaled * (1 + self.weights[f"{name}.weight"])

    def project(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def rotated(self, x, positions):
        half = int(DIM * CONFIG["rope_parameters"]["partial_rotary_factor"]) // 2
        turned = np.asarray(positions)[:, None]
        if self.places is not None:
            turned = self.places[self.axes][:, list(positions)].T
        angles = turned * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def layer(self, name, x, positions, cache):
        """x [n, hidden] at `positions`; `cache` has the key and the value of each position."""
        h = self.norm(f"{name}.input_layernorm", x)
        own = f"{name}.self_attn"
        both = self.project(f"{own}.q_proj", h).reshape(len(x), HEADS, 2 * DIM)
        q, gate = both[..., :DIM], both[..., DIM:]
        k, v = (self.project(f"{own}.{p}_proj", h).reshape(len(x), KV_HEADS, DIM) for p in "kv")
        q = self.rotated(self.norm(f"{own}.q_norm", q), positions)
        k = self.rotated(self.norm(f"{own}.k_norm", k), positions)
        found = attended(q, k, v, positions, cache)
        found = found / (1 + np.exp(-gate))
        x = x + self.project(f"{own}.o_proj", found.reshape(len(x), -1))
        h = self.norm(f"{name}.post_attention_layernorm", x)
        gate = self.project(f"{name}.mlp.gate_proj", h)
        inner = gate / (1 + np.exp(-gate)) * self.project(f"{name}.mlp.up_proj", h)
        return x + self.project(f"{name}.mlp.down_proj", inner)

    def hidden(self, tokens):
        x, positions = self.embedding[tokens], range(len(tokens))
        for layer in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
            x = self.layer(f"model.layers.{layer}", x, positions, {})
        return self.norm("model.norm", x)

    def logits(self, tokens):
        """[len(tokens), vocab]."""
        return self.hidden(tokens) @ self.head.T

    def draft_pass(self, tokens, hidden, positions, cache):
        vectors = self.norm("mtp.pre_fc_norm_embedding", self.embedding[tokens])
        both = np.concatenate([vectors, self.norm("mtp.pre_fc_norm_hidden", hidden)], axis=-1)
        x = self.layer("mtp.layers.0", self.project("mtp.fc", both), positions, cache)
        return self.norm("mtp.norm", x)

    def drafts(self, tokens, num_drafts):
        """The greedy drafts after `tokens`, the last of which no step has computed yet."""
        cache, last = {}, len(tokens) - 2
        found = self.draft_pass(tokens[1:], self.hidden(tokens[:-1]), range(last + 1), cache)
        drafts, hidden = [], found[-1:]
        for number in range(num_drafts):
            drafts.append(int((hidden @ self.head.T).argmax()))
            position = last + 1 + number
            hidden = self.draft_pass(drafts[-1:], hidden, [position], cache)
        return drafts
