"""Llama or Qwen3 and an EAGLE-3 head, plainly in float64; and their checkpoints."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.models.draft_reference import attended

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS, VOCAB, DRAFTED = 32, 4, 2, 16, 48, 7, 96, 40
CAPTURED = (2, 3, 4)  # of seven layers
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 95,
}
HEAD_CONFIG = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFTED,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
}


def layer_shapes(layer, num_inputs=HIDDEN, *, qk_norm=False):
    shapes = {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * DIM, num_inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * DIM, num_inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * DIM, num_inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    return shapes | {f"{layer}.self_attn.{x}_norm.weight": (DIM,) for x in "qk" if qk_norm}


def random_tensors(shapes, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(0, 0.3, shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def model_weights(seed=0, *, qk_norm=False):
    """By their names in a checkpoint."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= layer_shapes(f"model.layers.{layer}", qk_norm=qk_norm)
    return random_tensors(shapes, seed)


def head_weights(seed=1, drafted=DRAFTED):
    """With `drafted` of the model's tokens."""
    shapes = {
        "fc.weight": (HIDDEN, len(CAPTURED) * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        **layer_shapes("midlayer", 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (drafted, HIDDEN),
    }
    tokens = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:drafted])
    is_drafted = np.isin(np.arange(VOCAB), tokens)
    mapping = {"d2t": tokens - np.arange(drafted), "t2d": is_drafted}
    return random_tensors(shapes, seed) | mapping


def chain_weights(seed=0, vocab_size=VOCAB):
    """A model and a head whose layers add nothing: the next token depends on the last one alone,
    and the most likely one is another for each. The first draft knows the last token but one."""
    model, head = model_weights(seed), head_weights(seed)
    for name, own in (*model.items(), *head.items()):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            own[:] = 0
        elif name.endswith("norm.weight"):
            own[:] = 1
    rng = np.random.default_rng(seed)
    vectors = rng.normal(0, 1, (vocab_size, HIDDEN)).astype(np.float32)
    follower = np.roll(np.arange(vocab_size), -1)  # of each token, one long cycle
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    model["model.embed_tokens.weight"] = vectors
    model["lm_head.weight"], head["lm_head.weight"] = np.zeros((2, vocab_size, HIDDEN), np.float32)
    model["lm_head.weight"][follower] = units
    head["lm_head.weight"][follower[follower]] = units
    head["fc.weight"] = np.eye(HIDDEN, len(CAPTURED) * HIDDEN, dtype=np.float32)
    del head["d2t"], head["t2d"]
    return model, head


def write_checkpoint(folder: Path, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


class Eagle3Reference:
    """The model and its head over one row, without a cache."""

    def __init__(self, model, head, captured=CAPTURED):
        self.model, self.head = (
            {name: own.astype(np.float64) for name, own in weights.items()}
            for weights in (model, head)
        )
        self.captured = captured
        self.lm_head = self.head.get("lm_head.weight", self.model["lm_head.weight"])
        offsets = head.get("d2t", np.zeros(VOCAB, np.int64))
        self.tokens = offsets.astype(np.int64) + np.arange(len(offsets))

    def layer(self, weights, name, inputs, residual, positions, cache, config):
        """`inputs` of attention, already normalised; `cache` as in `attended`."""

        def project(own, x):
            return x @ weights[f"{name}.{own}.weight"].T

        def heads(own, size):
            x = project(f"self_attn.{own}_proj", inputs).reshape(len(inputs), size, DIM)
            factor = weights.get(f"{name}.self_attn.{own}_norm.weight")
            return x if factor is None else normalised(x, factor, config)

        q, k = (
            rotated(heads(own, size), positions, config["rope_theta"])
            for own, size in (("q", HEADS), ("k", KV_HEADS))
        )
        found = attended(q, k, heads("v", KV_HEADS), positions, cache)
        x = residual + project("self_attn.o_proj", found.reshape(len(inputs), -1))
        h = normalised(x, weights[f"{name}.post_attention_layernorm.weight"], config)
        gate = project("mlp.gate_proj", h)
        inner = gate / (1 + np.exp(-gate)) * project("mlp.up_proj", h)
        return x + project("mlp.down_proj", inner)

    def inputs_of_layers(self, tokens):
        """The hidden states before each layer, and after the last one."""
        x, positions = self.model["model.embed_tokens.weight"][tokens], range(len(tokens))
        states = [x]
        for number in range(LAYERS):
            name = f"model.layers.{number}"
            h = normalised(x, self.model[f"{name}.input_layernorm.weight"], CONFIG)
            x = self.layer(self.model, name, h, x, positions, {}, CONFIG)
            states.append(x)
        return states

    def draft_pass(self, tokens, hidden, positions, cache):
        vectors = self.model["model.embed_tokens.weight"][tokens]
        both = [
            normalised(x, self.head[f"midlayer.{name}.weight"], HEAD_CONFIG)
            for x, name in ((vectors, "input_layernorm"), (hidden, "hidden_norm"))
        ]
        joined = np.concatenate(both, axis=-1)
        return self.layer(self.head, "midlayer", joined, hidden, positions, cache, HEAD_CONFIG)

    def drafts(self, tokens, num_drafts):
        """The greedy drafts after `tokens`, the last of which no step has computed yet."""
        states, cache, last = self.inputs_of_layers(tokens[:-1]), {}, len(tokens) - 2
        joined = np.concatenate([states[layer] for layer in self.captured], axis=-1)
        hidden = joined @ self.head["fc.weight"].T
        hidden = self.draft_pass(tokens[1:], hidden, range(last + 1), cache)[-1:]
        drafts = []
        for number in range(num_drafts):
            normal = normalised(hidden, self.head["norm.weight"], HEAD_CONFIG)
            column = int((normal @ self.lm_head.T).argmax())
            drafts.append(int(self.tokens[column]))
            hidden = self.draft_pass(drafts[-1:], hidden, [last + 1 + number], cache)
        return drafts


def normalised(x, factor, config):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * factor


def rotated(x, positions, theta):
    half = DIM // 2
    angles = np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
