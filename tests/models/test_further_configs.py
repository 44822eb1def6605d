"""Configs of families with unrotated layers, other rotations and other routers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.core.layer_configs import ExpertChoice, LatentConfig
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.layers.parameter import declarations
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError, MoeConfig, RopeConfig
from sgl_jax.models.quantization import LayerRules
from sgl_jax.models.registry import build_model
from sgl_jax.models.rope_config import QueryScale
from sgl_jax.models.served import served_config
from tests.models.configs import PLAIN

PUBLISHED = Path("sgl_jax/planner/models")
SMOLLM3 = PLAIN | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}
PHI3 = PLAIN | {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 32}
LONGROPE = {"type": "longrope", "long_factor": [2.0, 4.0], "short_factor": [1.0, 1.5]}
OLMO3 = PLAIN | {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4}


def published(name):
    return ModelConfig.from_path(PUBLISHED / f"{name}.json")


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.json")), ids=lambda file: file.stem)
def test_a_published_config_is_read(file):
    assert ModelConfig.from_path(file).layers


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, [True, True, True, False, True]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False, True]),
        ({"no_rope_layers": [0, 1, 1, 0, 0, 1]}, [False, True, True, False, False]),
    ],
)
def test_some_layers_do_not_rotate(changes, rotated):
    layers = ModelConfig.from_dict(SMOLLM3 | changes).layers
    assert [spec.rope is not None for spec in layers] == rotated


def test_only_unrotated_layers_have_windows():
    windows = {"use_sliding_window": True, "sliding_window": 9}
    layers = ModelConfig.from_dict(SMOLLM3 | windows).layers
    assert [spec.sliding_window for spec in layers] == [None, None, None, 9, None]


@pytest.mark.parametrize("value", [[1, 1, 1, 0], [1, 1, 1, 0, 2], "all"])
def test_a_wrong_list_of_unrotated_layers_is_refused(value):
    with pytest.raises(ModelConfigError, match="no_rope_layers must be a list of 5 numbers"):
        ModelConfig.from_dict(SMOLLM3 | {"no_rope_layers": value})


@pytest.mark.parametrize("context", [32, 33, None])
def test_longrope_has_other_factors_for_contexts_beyond_the_original(context):
    config = ModelConfig.from_dict(
        PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "head_dim": 8}
    )
    served = served_config(config, ServerArgs(model_path="m", context_length=context))
    rope = served.layers[0].rope
    factors = np.array(LONGROPE["short_factor" if context == 32 else "long_factor"])
    expected = 1e4 ** -np.array([0, 0.5]) / factors
    np.testing.assert_allclose(rope.inverse_frequencies(8), expected, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))


def test_longrope_has_a_factor_for_each_rotated_pair():
    with pytest.raises(ModelConfigError, match="long_factor must have a number for each of the 4"):
        ModelConfig.from_dict(PHI3 | {"rope_scaling": LONGROPE})


@pytest.mark.parametrize("context", [None, 4096])
def test_a_published_phi_has_no_window(context):
    args = ServerArgs(model_path="m", context_length=context)
    specs = set(served_config(published("phi-4-mini"), args).layers)
    assert [(spec.sliding_window, spec.rope.num_dims(128)) for spec in specs] == [(None, 96)]


def test_the_windows_of_an_olmo3_are_not_scaled():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    config = ModelConfig.from_dict(OLMO3 | {"rope_scaling": yarn, "sliding_window": 9})
    window, full = config.layers[0], config.layers[3]
    assert (window.sliding_window, full.sliding_window) == (9, None)
    assert window.rope == RopeConfig(5e5)
    assert (full.rope.kind, full.rope.theta) == ("yarn", 5e5)


def test_a_glm_normalises_and_rotates_as_its_config_says():
    air, large = published("glm-4.5-air"), published("glm-4.6")
    assert (air.qk_norm, large.qk_norm) == (False, True)
    assert large.attention_bias
    assert not large.attention_output_bias
    assert large.layers[0].rope.num_dims(large.head_dim) == 64
    assert [spec.moe is None for spec in large.layers] == [True] * 3 + [False] * 89
    assert large.moe.choice == ExpertChoice(8, True, True, best_of_group=2, scale=2.5)
    assert large.moe.has_choice_bias
    assert large.moe.shared_intermediate_size == 1536
    assert large.draft_names.join == "model.layers.92.eh_proj"


def test_a_minimax_has_a_field_for_the_rotated_dimensions():
    config = published("minimax-m2-fp8")
    assert config.layers[0].rope.num_dims(config.head_dim) == 64
    assert config.moe.choice == ExpertChoice(8, True, has_sigmoid_scores=True)
    assert config.moe.has_choice_bias
    assert config.moe.intermediate_size == 1536


def test_linear_attention_of_a_minimax_is_refused():
    changes = {"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 0]}
    with pytest.raises(ModelConfigError, match=r"attn_type_list = .* is not supported"):
        ModelConfig.from_dict(PLAIN | changes)


def test_a_seed_oss_has_no_bias_after_attention():
    config = published("seed-oss-36b")
    assert config.attention_bias
    assert not config.attention_output_bias


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm3-3b", 3.08),
        ("phi-4-mini", 3.84),
        ("phi-4", 14.7),
        ("olmo-3-7b", 7.30),
        ("seed-oss-36b", 36.2),
        ("glm-4.5-air", 106),
        ("glm-4.6", 353),
        ("minimax-m2-fp8", 229),
        ("ministral-3-8b", 8.5),
        ("mistral-small-4", 119),
        ("qwen3-vl-8b", 8.19),
        ("qwen3-vl-30b-a3b", 30.5),
        ("llama-4-scout", 107.8),
        ("llama-4-maverick", 400),
    ],
)
def test_a_published_model_has_as_many_parameters_as_its_name_says(name, billions):
    config = replace(published(name), quantization=None)
    config = replace(
        config, layers=tuple(replace(spec, rules=LayerRules()) for spec in config.layers)
    )
    declared = declarations(build_model(config, BuildOptions("bfloat16"))).values()
    found = sum(math.prod(own.array.shape) for own in declared)
    assert found == pytest.approx(billions * 1e9, rel=0.01)


def test_queries_of_a_ministral_grow_with_their_positions():
    config = published("ministral-3-8b")
    assert config.layers[0].query_scale == QueryScale(0.1, 16384)
    assert config.layers[0].rope.kind == "yarn"
    assert config.score_scale == 128**-0.5


def test_a_mistral_4_has_latents_and_no_bias_of_its_router():
    config = published("mistral-small-4")
    assert config.latent == LatentConfig(256, 64, 64, 128, 1024)
    assert config.layers[0].query_scale == QueryScale(0.1, 8192)
    assert config.moe.choice == ExpertChoice(4, True, best_of_group=2)
    assert not config.moe.has_choice_bias
    assert config.score_scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)


MISTRAL4 = json.loads((PUBLISHED / "mistral-small-4.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type in text_config must be one of mistral, ministral3,"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor must be 0.5",
        ),
    ],
)
def test_a_wrong_text_part_is_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(MISTRAL4 | {"text_config": MISTRAL4["text_config"] | changes})


def test_of_a_qwen3_vl_the_text_model_is_read():
    assert published("qwen3-vl-30b-a3b").layers[0].moe == MoeConfig(128, ExpertChoice(8, True), 768)
    assert published("qwen3-vl-8b").layers[0].rope == RopeConfig(5e6)


def test_a_llama_4_has_chunks_where_it_rotates():
    config = published("llama-4-scout")
    chunked, full = config.layers[2], config.layers[3]
    assert (chunked.sliding_window, chunked.is_chunked, chunked.query_scale) == (8192, True, None)
    assert (full.rope, full.sliding_window, full.is_chunked) == (None, None, False)
    assert full.query_scale == QueryScale(0.1, 8192, first=1)
    assert [len(group.layers) for group in config.cache_groups()] == [12, 36]
    assert config.moe.choice == ExpertChoice(1, False, has_sigmoid_scores=True)
    assert config.moe.weighs_inputs
    assert config.moe.shared_intermediate_size == 8192


def test_a_llama_4_may_have_dense_layers():
    config = published("llama-4-maverick")
    assert [spec.moe is None for spec in config.layers] == [True, False] * 24
    assert config.intermediate_size == 16384
    assert not config.qk_norm
