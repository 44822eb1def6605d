"""What each layer is, is read in every spelling of windows, rotary embeddings and experts."""

import math

import pytest

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.models.config import (
    CacheGroup,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)
from tests.models.configs import GEMMA3, GPT_OSS, LLAMA3, MOE, YARN, read


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


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_are_counted_in_either_spelling(name):
    moe = read(**MOE | {"num_experts": None, name: 6}).moe
    assert moe is not None
    assert (moe.num_experts, moe.choice.top_k, moe.intermediate_size) == (6, 2, 16)


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
    layers = read(num_hidden_layers=6, **MOE, **changes).layers
    assert [layer for layer, spec in enumerate(layers) if spec.moe] == sparse


def ropes(config):
    """Of the first layer with a window, and of the first without."""
    specs = sorted(config.layers, key=lambda spec: spec.sliding_window is None)
    return specs[0].rope, specs[-1].rope


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3}, [0, 1, 2]),
        ({"use_sliding_window": False, "max_window_layers": 3}, [0, 1, 2, 3, 4, 5]),
        ({"use_sliding_window": True}, [0, 1, 2, 3, 4, 5]),  # the first 28 of Qwen are full
        ({"use_sliding_window": True, "sliding_window_pattern": 3}, [2, 5]),
        ({"use_sliding_window": True, "_sliding_window_pattern": 4}, [3]),
        (
            {
                "use_sliding_window": True,
                "sliding_window_pattern": 2,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 5,
            },
            [0],
        ),
        ({"architectures": ["MistralForCausalLM"]}, []),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_which_layers_have_a_window(changes, full):
    config = read(**{"num_hidden_layers": 6, "sliding_window": 9} | changes)
    without = [i for i, spec in enumerate(config.layers) if spec.sliding_window is None]
    assert without == full
    assert {spec.sliding_window for spec in config.layers} <= {None, 9}


def test_what_a_qwen_leaves_out_is_what_transformers_takes():
    sizes = {"num_hidden_layers": 30, "max_position_embeddings": 8192}
    layers = read(**sizes, use_sliding_window=True).layers
    assert [spec.sliding_window for spec in layers] == [None] * 28 + [4096] * 2


def test_what_a_mistral_leaves_out_is_what_transformers_takes():
    layers = read(architectures=["MistralForCausalLM"], max_position_embeddings=8192).layers
    assert [spec.sliding_window for spec in layers] == [4096, 4096]


def test_a_window_of_the_whole_context_is_none():
    layers = read(architectures=["MistralForCausalLM"], max_position_embeddings=4096).layers
    assert [spec.sliding_window for spec in layers] == [None, None]


def test_what_a_gemma3_leaves_out_is_what_transformers_takes():
    config = ModelConfig.from_dict(GEMMA3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.activation, config.score_scale) == ("gelu_pytorch_tanh", 1 / 16)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1,)
    assert config.cache_groups() == (
        CacheGroup(None, 0, (5,)),
        CacheGroup(9, 1, (0, 1, 2, 3, 4, 6, 7)),
    )
    assert ropes(config) == (RopeConfig(1e4), RopeConfig(1e6))


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 100,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100},
            }
        },
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 100,
            "rope_parameters": {
                "full_attention": {"type": "linear", "factor": 8.0},
                "sliding_attention": None,
            },
        },
    ],
)
def test_layers_with_a_window_may_have_a_rope_of_their_own(spelling):
    config = ModelConfig.from_dict(GEMMA3 | spelling)
    assert ropes(config) == (RopeConfig(100.0), RopeConfig(5e5, "linear", 8.0))


def test_what_a_gpt_oss_leaves_out_is_what_transformers_takes():
    config = ModelConfig.from_dict(GPT_OSS | {"max_position_embeddings": 256})
    assert config.head_dim == 64
    assert config.attention_bias
    assert config.quantization is None
    assert config.cache_groups() == (CacheGroup(None, 0, (1, 3)), CacheGroup(128, 0, (0, 2)))
    rope = RopeConfig(
        *(150000.0, "yarn", 32.0),
        original_max_position_embeddings=4096,
        truncate=False,
        attention_factor=0.1 * math.log(32) + 1,
    )
    assert ropes(config) == (rope, rope)
    assert config.moe == MoeConfig(6, ExpertChoice(2, True), 48, 7.0, 1.702)


@pytest.mark.parametrize(
    ("changes", "attention_factor"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.5}, 1.5),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
        ({"mscale": 2.0}, 0.1 * math.log(8) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * math.log(8) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn(changes, attention_factor):
    rope = read(rope_scaling=YARN | {"truncate": False, "beta_fast": 4} | changes).layers[0].rope
    assert rope.kind == "yarn"
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (4.0, 1.0, False)
    assert rope.original_max_position_embeddings == 16
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_a_window_on_every_layer_is_honoured():
    def windows(**changes):
        return {spec.sliding_window for spec in read(sliding_window=9, **changes).layers}

    assert windows(use_sliding_window=True, max_window_layers=0) == {9}
    assert windows(use_sliding_window=False) == {None}
    assert windows(use_sliding_window=True, max_window_layers=5) == {None}
