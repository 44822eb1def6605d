"""Model configs are read in both spellings, and what cannot be honoured is refused by name."""

import json
import re

import pytest

from sgl_jax.models.config import (
    CacheGroup,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
)
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.registry import build_model

PLAIN = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes):
    return ModelConfig.from_dict(PLAIN | changes)


def test_defaults_follow_hugging_face():
    config = read()
    assert config.head_dim == 8
    assert config.layers == (LayerSpec(RopeConfig(10000.0), None, None),) * 2
    assert not config.tie_word_embeddings
    assert config.cache_groups() == (CacheGroup(None, 0, (0, 1)),)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_rope_is_read_in_every_spelling(spelling):
    assert read(**spelling).layers[0].rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


def test_end_tokens_of_both_files_are_joined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7, 3)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_are_counted_in_either_spelling(name):
    moe = read(**{name: 6}, num_experts_per_tok=2, moe_intermediate_size=16).moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (6, 2, 16)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}, [1, 5]),
    ],
)
def test_which_layers_have_experts(changes, sparse):
    layers = read(num_hidden_layers=6, **EXPERTS, **changes).layers
    assert [layer for layer, spec in enumerate(layers) if spec.moe] == sparse


def test_a_window_on_every_layer_is_honoured():
    def windows(**changes):
        return {spec.sliding_window for spec in read(sliding_window=9, **changes).layers}

    assert windows(use_sliding_window=True, max_window_layers=0) == {9}
    assert windows(use_sliding_window=False) == {None}
    assert windows(use_sliding_window=True, max_window_layers=5) == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"hidden_size": "big"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "default, linear, llama3, got 'yarn'"),
        ({"architectures": []}, "list of one name"),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ({**EXPERTS, "mlp_only_layers": [2]}, r"layers in \[0, 2\), got \[2\]"),
        ({**EXPERTS, "mlp_only_layers": 0.5}, "mlp_only_layers must be a list"),
        ({**EXPERTS, "decoder_sparse_step": "2"}, "decoder_sparse_step must be a positive integer"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "must not exceed"),
        ({"vocab_size": 10**12}, "vocab_size must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"initializer_range": [0.02]}, "initializer_range must be a positive number"),
        ({"rope_theta": None, "rope_scaling": [1]}, "rope_scaling must be objects"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": 4}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": "x"}, "max_window"),
        ({"eos_token_id": 10**12}, r"eos_token_id must be a token id in \[0, 64\), got 10{12}"),
        ({"eos_token_id": [3, 64]}, "got 64"),
        ({"eos_token_id": "</s>"}, "got '</s>'"),
        ({"bos_token_id": -1}, "bos_token_id must be a token id"),
        ({"pad_token_id": 1.5}, "pad_token_id must be a token id"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)


def test_the_file_at_fault_is_named(tmp_path):
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text(json.dumps(PLAIN | {"eos_token_id": 3, "pad_token_id": -1}))
    generation.write_text(json.dumps({"eos_token_id": [3, 64]}))
    with pytest.raises(ModelConfigError, match=re.escape(f"{str(generation)!r}: eos_token_id")):
        ModelConfig.from_path(tmp_path)
    generation.unlink()
    ModelConfig.from_path(tmp_path)
    config.write_text(json.dumps(PLAIN | {"hidden_size": "big"}))
    with pytest.raises(ModelConfigError, match=re.escape(f"{str(config)!r}: hidden_size")):
        ModelConfig.from_path(tmp_path)
    config.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelConfigError, match="is not valid JSON"):
        ModelConfig.from_path(tmp_path)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ModelConfigError, match=r"no config\.json in model folder"):
        ModelConfig.from_path(tmp_path)


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        ModelConfig.from_path(tmp_path)


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    config = read(architectures=["MambaForCausalLM"])
    with pytest.raises(ModelConfigError, match=r"MambaForCausalLM.*LlamaForCausalLM, Qwen2"):
        build_model(config, BuildOptions("float32"))


def test_a_sparse_architecture_without_experts_is_refused():
    config = read(architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(ModelConfigError, match="needs num_experts, and layers that have them"):
        build_model(config, BuildOptions("float32"))


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [(3, "must divide the number of attention heads"), (32, "attention heads")],
)
def test_heads_that_cannot_be_dealt_out_are_refused(tp_size, message):
    with pytest.raises(ValueError, match=message):
        build_model(read(), BuildOptions("float32", tp_size=tp_size))


def test_kv_heads_that_cannot_be_dealt_out_are_refused():
    config = read(num_attention_heads=12, num_key_value_heads=6, head_dim=8)
    with pytest.raises(ValueError, match="KV heads"):
        build_model(config, BuildOptions("float32", tp_size=4))
