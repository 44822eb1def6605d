"""DeepSeek V3 and its draft layer, written plainly in float64; and a checkpoint with random drafts.

The model is the golden one of transformers, which leaves the draft layer out.
"""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors

from tests.kernels.latent_attention.reference import chosen_tokens
from tests.models.golden_server import GOLDEN

SOURCE = GOLDEN / "deepseek_v3"
# With an indexer.
SPARSE = GOLDEN / "deepseek_v32"
# With layers that reuse the choice of an indexer; the last is one of them.
REUSING = GOLDEN / "glm_moe_dsa_reuse"
# In fp8 blocks, as DeepSeek publishes its models.
QUANTIZED = GOLDEN / "quantized" / "latent_fp8_block"
FILE = "model.safetensors"
BLOCK = 128  # inputs and outputs that share a scale
SCALES = "weight_scale_inv"
DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn}


def load_tensors(folder: Path):
    """By name; safetensors' own function for numpy reads no floats of 8 and 16 bits."""
    return {
        name: np.frombuffer(own["data"], DTYPES[own["dtype"]]).reshape(own["shape"])
        for name, own in safetensors.deserialize((folder / FILE).read_bytes())
    }


def save_tensors(folder: Path, tensors):
    """A safetensors file: the length of its header, the header, and the tensors' bytes."""
    header, data = {}, b""
    for name, own in tensors.items():
        (dtype,) = (code for code, known in DTYPES.items() if own.dtype == known)
        offsets = len(data), len(data) + own.nbytes
        header[name] = {"dtype": dtype, "shape": own.shape, "data_offsets": offsets}
        data += own.tobytes()
    head = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(head).to_bytes(8, "little") + head + data)


def write_drafting_checkpoint(folder: Path, source=SOURCE, seed=0, *, query_latents=True):
    """The golden model, and after its last layer one like it that drafts. The product that joins
    its inputs is never quantized. Without `query_latents`, one matrix makes a layer's queries."""
    config = json.loads((source / "config.json").read_text())
    weights = load_tensors(source)
    rng = np.random.default_rng(seed)
    if not query_latents:
        config["q_lora_rank"] = None
        for first in [name for name in weights if name.endswith("q_a_proj.weight")]:
            second = first.replace("q_a_proj", "q_b_proj")
            shape = len(weights.pop(second)), config["hidden_size"]
            del weights[first], weights[first.replace("q_a_proj", "q_a_layernorm")]
            queries = rng.normal(0, 0.3, shape).astype(np.float32)
            weights[first.replace("q_a_proj", "q_proj")] = queries
    last, own = (f"model.layers.{config['num_hidden_layers'] + i}" for i in (-1, 0))
    like = {name.replace(last, own): array for name, array in weights.items() if last in name}
    for name, array in weights.items():
        if name.startswith("model.layers.0.self_attn.indexer."):
            like.setdefault(name.replace("model.layers.0", own), array)
    drafts = {
        name: rng.permutation(array.reshape(-1)).reshape(array.shape)
        for name, array in like.items()
    }
    hidden = config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        drafts[f"{own}.{name}.weight"] = rng.normal(1, 0.3, hidden).astype(np.float32)
    join = rng.normal(0, 0.2, (hidden, 2 * hidden)).astype(np.float32)
    drafts[f"{own}.eh_proj.weight"] = join
    drafts[f"{own}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    drafts[f"{own}.shared_head.head.weight"] = weights["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder, weights | drafts)
    return folder


def write_markov_checkpoint(folder: Path, num_tokens):
    """A model of so many tokens whose layers add nothing: the next token depends on the last one
    alone. Its draft layer adds something, so some drafts are right, and some are wrong."""
    write_drafting_checkpoint(folder)
    weights = load_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    own = f"model.layers.{config['num_hidden_layers']}"
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * np.float32(name.startswith(own))
    rng, hidden = np.random.default_rng(0), config["hidden_size"]
    for name in ("model.embed_tokens", "lm_head"):
        vectors = rng.normal(0, 1 / np.sqrt(hidden), (num_tokens, hidden)).astype(np.float32)
        weights[f"{name}.weight"] = 2 * vectors
    weights[f"{own}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{own}.shared_head.head.weight"] = weights["lm_head.weight"]
    weights[f"{own}.shared_head.norm.weight"] = weights["model.norm.weight"]
    weights[f"{own}.enorm.weight"] = np.ones(hidden, np.float32)
    weights[f"{own}.eh_proj.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    config |= {"vocab_size": num_tokens, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder, weights)
    return folder


class LatentDraftReference:
    """The model of a checkpoint over one row, without a cache."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.choice = {}  # of each position, by the last indexer
        stored = load_tensors(folder)
        self.weights = {name: own.astype(np.float64) for name, own in stored.items()}
        for name in [own for own in stored if own.endswith(SCALES)]:
            weight = self.weights[name.replace(SCALES, "weight")]
            scales = np.kron(self.weights[name], np.ones((BLOCK, BLOCK)))
            weight *= scales[: weight.shape[0], : weight.shape[1]]
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"].T
        self.stretch = self.config["rope_parameters"].get("factor", 1)  # by YaRN

    def norm(self, name, x):
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return scaled * self.weights[f"{name}.weight"]

    def project(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def rotated(self, x, positions, *, neighbours=True):
        """x [n, heads, dims]: neighbours or halves are pairs; YaRN stretches the slow ones."""
        rope, dims = self.config["rope_parameters"], x.shape[-1]
        frequencies = rope["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
        original = rope.get("original_max_position_embeddings", 1)

        def pair_of(turns):
            log_theta = math.log(rope["rope_theta"])
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * log_theta)

        first = max(math.floor(pair_of(rope.get("beta_fast", 32))), 0)
        last = min(math.ceil(pair_of(rope.get("beta_slow", 1))), dims - 1)
        stretched = np.clip((np.arange(dims // 2) - first) / ((last - first) or 0.001), 0, 1)
        frequencies *= 1 - stretched + stretched / self.stretch
        angles = np.asarray(positions)[:, None, None] * frequencies
        a, b = (x[..., ::2], x[..., 1::2]) if neighbours else np.split(x, 2, axis=-1)
        turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
        if not neighbours:
            return np.concatenate(turned, axis=-1)
        return np.stack(turned, axis=-1).reshape(x.shape)

    def indexer(self, name, x, latent, positions):
        """Return the scores' queries and weights, and the keys, of an indexer."""
        own = self.config
        heads, rope = own["index_n_heads"], own["qk_rope_head_dim"]
        keys = self.project(f"{name}.wk", x)
        keys = keys - keys.mean(axis=-1, keepdims=True)
        keys /= np.sqrt(np.mean(keys * keys, axis=-1, keepdims=True) + 1e-6)
        keys = keys * self.weights[f"{name}.k_norm.weight"] + self.weights[f"{name}.k_norm.bias"]
        queries = self.project(f"{name}.wq_b", latent).reshape(len(x), heads, -1)
        neighbours = own["model_type"] == "glm_moe_dsa"
        queries, keys = (
            np.concatenate(
                [
                    self.rotated(part[..., :rope], positions, neighbours=neighbours),
                    part[..., rope:],
                ],
                -1,
            )
            for part in (queries, keys[:, None])
        )
        return queries, self.project(f"{name}.weights_proj", x), keys[:, 0]

    def attention(self, name, x, positions, cache):
        """`cache` has the latent and the rotated key of each position, and an indexer's key."""
        own, heads = self.config, self.config["num_attention_heads"]
        nope, rank = own["qk_nope_head_dim"], own["kv_lora_rank"]
        if own["q_lora_rank"] is None:
            q = self.project(f"{name}.q_proj", x)
        else:
            latent = self.norm(f"{name}.q_a_layernorm", self.project(f"{name}.q_a_proj", x))
            q = self.project(f"{name}.q_b_proj", latent)
        q = q.reshape(len(x), heads, -1)
        q = np.concatenate([q[..., :nope], self.rotated(q[..., nope:], positions)], axis=-1)
        kept = self.project(f"{name}.kv_a_proj_with_mqa", x)
        latents = self.norm(f"{name}.kv_a_layernorm", kept[:, :rank])
        rotated = self.rotated(kept[:, None, rank:], positions)[:, 0]
        growth = 0.1 * own["rope_parameters"].get("mscale_all_dim", 0) * math.log(self.stretch) + 1
        found = np.zeros((len(x), heads, own["v_head_dim"]))
        top_k, indexed = own.get("index_topk"), [np.zeros(len(x))] * 3
        kinds, number = own.get("indexer_types") or [], int(name.split(".")[2])
        reuses = kinds[number : number + 1] == ["shared"]
        if top_k and not reuses:
            indexed = self.indexer(f"{name}.indexer", x, latent, positions)
        for i, position in enumerate(positions):
            cache[position] = latents[i], rotated[i], indexed[2][i]
            seen = np.arange(position + 1)
            if top_k and not reuses:
                keys = np.array([cache[p][2] for p in seen])
                self.choice[position] = chosen_tokens(indexed[0][i], indexed[1][i], keys, top_k)
            if top_k:
                seen = self.choice[position]
            before = [np.array([cache[p][j] for p in seen]) for j in (0, 1)]
            both = self.project(f"{name}.kv_b_proj", before[0]).reshape(len(seen), heads, -1)
            for head in range(heads):
                keys = np.concatenate([both[:, head, :nope], before[1]], axis=1)
                scores = keys @ q[i, head] * growth**2 / np.sqrt(q.shape[-1])
                shares = np.exp(scores - scores.max())
                found[i, head] = shares @ both[:, head, nope:] / shares.sum()
        return self.project(f"{name}.o_proj", found.reshape(len(x), -1))

    def mlp(self, name, x):
        gate = self.project(f"{name}.gate_proj", x)
        inner = gate / (1 + np.exp(-gate)) * self.project(f"{name}.up_proj", x)
        return self.project(f"{name}.down_proj", inner)

    def experts(self, name, x):
        own, found = self.config, self.mlp(f"{name}.shared_experts", x)
        scores = 1 / (1 + np.exp(-self.project(f"{name}.gate", x)))
        ranked = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        for i, of_token in enumerate(ranked):
            groups = of_token.reshape(own["n_group"], -1)
            best = np.argsort(-np.sort(groups)[:, -2:].sum(axis=1))[: own["topk_group"]]
            allowed = np.isin(np.arange(len(of_token)) // groups.shape[1], best)
            order = np.argsort(-np.where(allowed, of_token, -np.inf))
            chosen = order[: own["num_experts_per_tok"]]
            shares = scores[i, chosen] / scores[i, chosen].sum() * own["routed_scaling_factor"]
            for expert, share in zip(chosen, shares, strict=True):
                found[i] += share * self.mlp(f"{name}.experts.{expert}", x[i])
        return found

    def layer(self, number, x, positions, cache):
        name = f"model.layers.{number}"
        h = self.norm(f"{name}.input_layernorm", x)
        x = x + self.attention(f"{name}.self_attn", h, positions, cache)
        h = self.norm(f"{name}.post_attention_layernorm", x)
        is_dense = number < self.config["first_k_dense_replace"]
        return x + (self.mlp if is_dense else self.experts)(f"{name}.mlp", h)

    def hidden(self, tokens):
        x, positions = self.embedding[tokens], range(len(tokens))
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(number, x, positions, {})
        return self.norm("model.norm", x)

    def draft_pass(self, tokens, hidden, positions, cache):
        number = self.config["num_hidden_layers"]
        name = f"model.layers.{number}"
        vectors = self.norm(f"{name}.enorm", self.embedding[tokens])
        both = np.concatenate([vectors, self.norm(f"{name}.hnorm", hidden)], axis=-1)
        x = self.layer(number, self.project(f"{name}.eh_proj", both), positions, cache)
        return self.norm(f"{name}.shared_head.norm", x)

    def drafts(self, tokens, num_drafts):
        """The greedy drafts after `tokens`, the last of which no step has computed yet."""
        cache, last = {}, len(tokens) - 2
        found = self.draft_pass(tokens[1:], self.hidden(tokens[:-1]), range(last + 1), cache)
        drafts, hidden = [], found[-1:]
        for number in range(num_drafts):
            drafts.append(int((hidden @ self.head).argmax()))
            position = last + 1 + number
            hidden = self.draft_pass(drafts[-1:], hidden, [position], cache)
        return drafts
