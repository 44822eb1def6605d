"""Model configs are read, and what cannot be honoured is refused by name."""

import json
import re

import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.attention.batch import ScoreOptions
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import (
    CacheGroup,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
)
from sgl_jax.models.registry import build_model
from tests.models.configs import GEMMA3, GPT_OSS, MOE, PLAIN, YARN, read


def test_defaults_follow_hugging_face():
    config = read()
    assert config.head_dim == 8
    assert config.layers == (LayerSpec(RopeConfig(10000.0), None, None),) * 2
    assert not config.tie_word_embeddings
    assert config.cache_groups() == (CacheGroup(None, 0, (0, 1)),)
    assert config.eos_token_ids == ()


def test_end_tokens_of_both_files_are_joined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7, 3)


def test_experts_may_be_in_mxfp4():
    def read_packed(changes):
        return ModelConfig.from_dict(
            GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}} | changes
        )

    rules = read_packed({}).layers[0].rules
    assert rules.of("mlp.experts.down_proj").scheme == Scheme("mxfp4", 32)
    assert rules.of("self_attn.q_proj") is None
    with pytest.raises(ModelConfigError, match="awq is supported with 4 bits"):
        read_packed({"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ModelConfigError, match=r"rows of 48 numbers, no multiple of the 32"):
        build_model(read_packed({}), BuildOptions("float32"))


@pytest.mark.parametrize("name", ["num_local_experts", "swiglu_limit"])
def test_a_gpt_oss_without_experts_or_their_limit_is_refused(name):
    config = ModelConfig.from_dict(GPT_OSS | {name: None})
    with pytest.raises(ModelConfigError, match="needs num_local_experts"):
        build_model(config, BuildOptions("float32"))


def test_of_a_model_of_images_and_text_the_text_is_read():
    text = {name: value for name, value in GEMMA3.items() if name != "architectures"}
    both = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 6],
        "text_config": text,
    }
    config = ModelConfig.from_dict(both)
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert config.eos_token_ids == (1, 6)
    assert config.layers == ModelConfig.from_dict(GEMMA3).layers
    for wrong, message in (({}, "lacks 'text_config'"), ({"text_config": 3}, "must be an object")):
        with pytest.raises(ModelConfigError, match=message):
            ModelConfig.from_dict({"architectures": both["architectures"]} | wrong)


def test_scores_and_logits_may_be_scaled_and_capped():
    scores = {"query_pre_attn_scalar": 25, "attn_logit_softcapping": 50.0}
    config = ModelConfig.from_dict(GEMMA3 | scores | {"final_logit_softcapping": 30})
    assert (config.score_scale, config.score_soft_cap, config.logit_soft_cap) == (0.2, 50.0, 30.0)
    model = build_model(config, BuildOptions("float32"))
    assert model.layers["0"].attention.scores == ScoreOptions(0.2, 9, 50.0)


def test_attention_may_have_biases_on_all_its_projections():
    attention = (
        build_model(read(attention_bias=True), BuildOptions("float32")).layers["0"].attention
    )
    assert attention.qkv.bias is not None
    assert attention.output.bias is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"hidden_size": "big"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, gelu_pytorch_tanh, got 'gelu'"),
        (GEMMA3 | {"hidden_activation": "relu"}, "hidden_activation must be one of"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supp"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        (
            GEMMA3 | {"final_logit_softcapping": "30"},
            "final_logit_softcapping must be a positive number",
        ),
        (
            GEMMA3 | {"attn_logit_softcapping": -1},
            "attn_logit_softcapping must be a positive number",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "must be one of compressed-tensors, fp8",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "for GptOssForCausalLM"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "longrope, proportional, got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": YARN | {"truncate": 0}}, "truncate must be true or false"),
        ({"rope_scaling": YARN | {"beta_fast": -1.0}}, "beta_fast must be a positive number"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"rope_parameters": {"full_attention": 7}}, "full_attention must be an object"),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor must be 1.0",
        ),
        ({"architectures": []}, "list of one name"),
        ({"layer_types": ["full_attention"]}, "a list of 2 names"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "full_attention and sliding_attention; 'linear_attention' is not supported",
        ),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "use_sliding_window": True,
                "sliding_window": None,
            },
            "lacks 'sliding_window'",
        ),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        (
            {"sliding_window_pattern": 2, "use_sliding_window": True, "sliding_window": None},
            "lacks 'sliding_window'",
        ),
        ({**MOE, "mlp_only_layers": [2]}, r"layers in \[0, 2\), got \[2\]"),
        ({**MOE, "mlp_only_layers": 0.5}, "mlp_only_layers must be a list"),
        ({**MOE, "decoder_sparse_step": "2"}, "decoder_sparse_step must be a positive integer"),
        ({**MOE, "num_experts_per_tok": 5}, "must not exceed"),
        ({"vocab_size": 10**12}, "vocab_size must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"initializer_range": [0.02]}, "initializer_range must be a positive number"),
        ({"rope_theta": None, "rope_scaling": [1]}, "rope_scaling must be an object"),
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
    with pytest.raises(ModelConfigError, match=r"MambaForCausalLM.*LlamaForCausalLM, .*Qwen2"):
        read(architectures=["MambaForCausalLM"])


def test_a_sparse_architecture_without_experts_is_refused():
    config = read(architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(ModelConfigError, match="needs layers with experts"):
        build_model(config, BuildOptions("float32"))


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [(3, "must divide the number of attention heads"), (32, "attention heads")],
)
def test_heads_that_chips_cannot_share_are_refused(tp_size, message):
    with pytest.raises(ValueError, match=message):
        build_model(read(), BuildOptions("float32", tp_size=tp_size))


def test_kv_heads_that_chips_cannot_share_are_refused():
    config = read(num_attention_heads=12, num_key_value_heads=6, head_dim=8)
    with pytest.raises(ValueError, match="KV heads"):
        build_model(config, BuildOptions("float32", tp_size=4))
