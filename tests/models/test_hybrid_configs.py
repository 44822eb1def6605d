"""Configs of models with recurrences: which layers have one, and what is refused."""

import json
from dataclasses import replace

import pytest

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.core.layer_configs import ExpertChoice, GatedDeltaConfig
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError, RopeConfig
from sgl_jax.models.registry import build_model
from tests.models.configs import EXPERTS, HYBRID
from tests.models.golden_server import GOLDEN

LINEAR, FULL = "linear_attention", "full_attention"
TEXT_PART = {name: value for name, value in HYBRID.items() if name != "architectures"}


def read(**changes):
    return ModelConfig.from_dict(HYBRID | changes)


def recurrent_layers(config):
    return [layer for layer, spec in enumerate(config.layers) if spec.recurrence]


@pytest.mark.parametrize(
    ("changes", "recurrent"),
    [
        ({}, [0, 1, 2, 4, 5, 6]),
        ({"full_attention_interval": 2}, [0, 2, 4, 6]),
        ({"layer_types": [LINEAR, FULL, FULL, LINEAR, *[FULL] * 4]}, [0, 3]),
        ({"layer_types": [FULL] * 8}, []),
    ],
)
def test_layers_have_a_recurrence_by_interval_or_by_list(changes, recurrent):
    config = read(**changes)
    assert recurrent_layers(config) == recurrent
    assert all((spec.rope is None) == (spec.recurrence is not None) for spec in config.layers)


def test_what_a_qwen3_5_leaves_out_is_what_transformers_takes():
    config = read()
    assert config.recurrence == GatedDeltaConfig(16, 32, 128, 128, 4)
    assert config.head_dim == 256
    assert config.attention_gate
    assert config.layers[3].rope == RopeConfig(share=0.25)


def test_recurrences_are_the_last_group_in_a_pool_of_their_own():
    assert read(layer_types=[LINEAR, FULL] * 4).cache_groups() == (
        CacheGroup(None, 0, (1, 3, 5, 7)),
        CacheGroup(LAST_VALUE, 1, (0, 2, 4, 6), is_recurrent=True),
    )
    assert read(layer_types=[FULL] * 8).cache_groups() == (CacheGroup(None, 0, tuple(range(8))),)


def qwen3_6(**changes):
    """The config of a Qwen3-MoE hybrid with all fields that Qwen3.6 publishes next to Qwen3.5's."""
    text = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    del text["architectures"]
    text |= {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
    }
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 1]}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": "qwen3_5_moe",
        "text_config": text | changes,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
    }


def test_a_qwen3_6_is_computed_as_a_qwen3_5():
    expected = ModelConfig.from_path(GOLDEN / "qwen3_5_moe")
    config = ModelConfig.from_dict(qwen3_6())
    assert replace(config, architecture=expected.architecture) == expected
    with pytest.raises(ModelConfigError, match="output_gate_type = 'sigmoid' is not supported"):
        ModelConfig.from_dict(qwen3_6(output_gate_type="sigmoid"))


def test_the_text_part_of_a_model_with_images_is_read():
    raw = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": TEXT_PART | EXPERTS | {"tie_word_embeddings": False, "eos_token_id": 7},
    }
    config = ModelConfig.from_dict(raw)
    assert recurrent_layers(config) == [0, 1, 2, 4, 5, 6]
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (7,)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.shared_intermediate_size) == (4, 512)
    assert config.moe.choice == ExpertChoice(2, norm_topk_prob=True)


@pytest.mark.parametrize(
    "spelling",
    [
        {"partial_rotary_factor": 0.5, "rope_theta": 1e7},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e7}},
        {
            "rope_parameters": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e7,
                "rope_type": "default",
                "mrope_section": [11, 11, 10],  # of images' positions; a text's are all alike
                "mrope_interleaved": True,
            }
        },
    ],
)
def test_a_part_of_a_head_may_be_turned(spelling):
    rope = read(**spelling).layers[3].rope
    assert rope == RopeConfig(1e7, share=0.5)
    assert rope.num_dims(256) == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR] * 8}, "layer_types must name a full_attention layer"),
        ({"layer_types": ["sliding_attention"] * 8}, "'sliding_attention' is not supported"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer"),
        ({"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads .16."),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be 2 or more"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
        ({"partial_rotary_factor": 0.02}, "an even number of dimensions, got 5"),
        ({"partial_rotary_factor": 0.001}, "an even number of dimensions, got 0"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be silu"),
        ({"attn_output_gate": 1}, "attn_output_gate must be true or false"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)


def test_key_heads_must_divide_among_the_chips():
    changes = {"linear_num_key_heads": 6, "linear_num_value_heads": 12}
    with pytest.raises(ValueError, match="must divide linear_num_key_heads"):
        build_model(read(**changes), BuildOptions("float32", tp_size=4))
