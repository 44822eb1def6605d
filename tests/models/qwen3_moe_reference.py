"""Qwen3-MoE written plainly in float64: the experts of each token and layer, and how near others
were."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]


class Routing(NamedTuple):
    experts: NDArray[np.int64]  # [tokens, layers, top_k], ascending; 0 in layers without experts
    margins: Array  # [tokens, layers] from the last chosen logit to the next; inf without experts


class Qwen3MoeReference:
    """The model of a checkpoint over one row, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: own.astype(np.float64) for name, own in stored.items()}

    def routing(self, tokens: list[int]) -> Routing:
        x = self.weights["model.embed_tokens.weight"][tokens]
        top_k, num_layers = self.config["num_experts_per_tok"], self.config["num_hidden_layers"]
        experts = np.zeros((len(x), num_layers, top_k), np.int64)
        margins = np.full((len(x), num_layers), np.inf)
        for layer in range(num_layers):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            inputs = self.norm(f"{name}.post_attention_layernorm", x)
            if f"{name}.mlp.gate.weight" not in self.weights:
                x = x + self.mlp(f"{name}.mlp", inputs)
                continue
            logits = self.project(f"{name}.mlp.gate", inputs)
            chosen = np.argsort(-logits, axis=1)[:, :top_k]
            ranked = -np.sort(-logits, axis=1)
            margins[:, layer] = ranked[:, top_k - 1] - ranked[:, top_k]
            shares = np.exp(np.take_along_axis(logits, chosen, axis=1))
            shares /= shares.sum(axis=1, keepdims=True)
            results = np.zeros_like(x)
            for i, own in enumerate(chosen):
                for expert, share in zip(own, shares[i], strict=True):
                    results[i] += share * self.mlp(f"{name}.mlp.experts.{expert}", inputs[i])
            x = x + results
            experts[:, layer] = np.sort(chosen, axis=1)
        return Routing(experts, margins)

    def norm(self, name: str, x: Array) -> Array:
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return scaled * self.weights[f"{name}.weight"]

    def project(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, name: str, x: Array) -> Array:
        gate = self.project(f"{name}.gate_proj", x)
        inner = gate / (1 + np.exp(-gate)) * self.project(f"{name}.up_proj", x)
        return self.project(f"{name}.down_proj", inner)

    def attention(self, name: str, x: Array) -> Array:
        heads, dims = self.config["num_attention_heads"], self.config["head_dim"]
        q, k, v = (
            self.project(f"{name}.{part}_proj", x).reshape(len(x), -1, dims) for part in "qkv"
        )
        q, k = (
            self.rotated(self.norm(f"{name}.q_norm", q)),
            self.rotated(self.norm(f"{name}.k_norm", k)),
        )
        k, v = (np.repeat(own, heads // own.shape[1], axis=1) for own in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dims)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        found = np.einsum("hqk,khd->qhd", shares, v)
        return self.project(f"{name}.o_proj", found.reshape(len(x), -1))

    def rotated(self, x: Array) -> Array:
        dims = x.shape[-1]
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, dims, 2) / dims)
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
