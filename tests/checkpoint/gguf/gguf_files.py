"""GGUF files of the golden models, written as llama.cpp's converter does."""

import json
import shutil
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[2] / "golden"
F32 = GGMLQuantizationType.F32
# transformers' names of modules, by llama.cpp's.
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_MODULES = MODULES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# What a file of the golden models cannot say, as it can.
CONFIGS = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "gemma3": {"query_pre_attn_scalar": 16},
}
# "ab" and the printable bytes; "Ġ" stands for a space.
VOCABULARY = ["a", "b", "ab", "Ġ", *map(chr, [*range(33, 97), *range(99, 127)])]
VOCABULARY += [f"token{number}" for number in range(len(VOCABULARY), 250)]


def golden_copy(family, folder, kind=F32, changes=()):
    """A copy of a golden folder with `CONFIGS`' fields, and the weights that `kind` stands for."""
    shutil.copytree(GOLDEN / family, folder)
    config = json.loads((folder / "config.json").read_text()) | CONFIGS.get(family, {})
    config |= {"initializer_range": 0.02, **dict(changes)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    for name, array in tensors.items():
        if stored_kind(array, kind) != F32:
            tensors[name] = dequantize(quantize(array, kind), kind).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored_kind(array, kind):
    return kind if array.ndim == 2 and array.shape[1] % 32 == 0 else F32


def write_gguf(family, file, kind=F32, *, facts=(), tensors=(), tokenizer=None):
    """Write a golden model; None in `facts` and `tensors` leaves one out.

    Attributes of the writer are what the reader must find, so nothing here comes from the package.
    """
    config = json.loads((GOLDEN / family / "config.json").read_text()) | CONFIGS.get(family, {})
    found = model_facts(family, config) | (tokenizer or tokenizer_facts()) | dict(facts)
    writer = GGUFWriter(file, found.pop("general.architecture"))
    for key, value in found.items():
        add_fact(writer, key, value)
    stored = stored_tensors(family, config) | dict(tensors)
    for name, array in stored.items():
        if array is not None:
            own = stored_kind(array, kind)
            writer.add_tensor(name, quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_fact(writer, key, value):
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def model_facts(family, config):
    facts = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if "head_dim" in config:
        facts["attention.key_length"] = config["head_dim"]
    rope = config["rope_parameters"]
    if family == "gemma3":
        facts |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": config["sliding_window_pattern"],
            "final_logit_softcapping": config["final_logit_softcapping"],
            "rope.freq_base": rope["full_attention"]["rope_theta"],
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": rope["full_attention"]["factor"],
        }
    else:
        facts["rope.freq_base"] = rope["rope_theta"]
    return {
        "general.architecture": family,
        **{f"{family}.{name}": value for name, value in facts.items()},
    }


def tokenizer_facts():
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [1] * 250,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 248,
        "tokenizer.ggml.eos_token_id": 249,
    }


def stored_tensors(family, config):
    """The tensors by llama.cpp's names, as it stores them."""
    modules = GEMMA_MODULES if family == "gemma3" else MODULES
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = {}
    for name, array in load_file(GOLDEN / family / "model.safetensors").items():
        name = name.replace("model.layers.", "blk.")
        module, kind = name.rsplit(".", 1)
        prefix = ""
        if module.startswith("blk."):
            prefix = ".".join(module.split(".")[:2]) + "."
            module = module.removeprefix(prefix)
        module = modules[module]
        if family == "llama" and module in heads:
            halves = array.reshape(heads[module], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if family == "gemma3" and module.endswith("norm"):
            array = array + np.float32(1)
        stored[f"{prefix}{module}.{kind}"] = array
    if family == "llama":
        stored["rope_freqs.weight"] = llama3_factors(16, config["rope_parameters"])
    return stored


def llama3_factors(head_dim, rope):
    """By how much Llama 3.1 divides each frequency, one at a time."""
    factors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (dim / head_dim)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
