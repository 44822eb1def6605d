"""Configs of models with state space layers, and of layers with a single part."""

import math

import pytest

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.core.layer_configs import StateSpaceConfig
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.config_fields import read_json
from sgl_jax.models.registry import build_model
from tests.models.golden_server import GOLDEN

GRANITE = read_json(GOLDEN / "granite_hybrid" / "config.json")
NEMOTRON = read_json(GOLDEN / "nemotron_h" / "config.json")


def read(base, **changes):
    return ModelConfig.from_dict(base | changes)


def test_a_granite_has_its_factors_and_a_size_from_its_heads():
    config = read(GRANITE, mamba_d_head="auto")
    assert config.recurrence == StateSpaceConfig(1, 8, 12, 8, 4, has_conv_bias=True)
    assert (config.embedding_scale, config.residual_scale, config.score_scale) == (3.0, 0.4, 0.2)
    assert config.logit_scale == 1 / 1.7
    assert config.moe is not None
    assert (config.moe.intermediate_size, config.moe.shared_intermediate_size) == (16, 24)
    assert all(spec.rope is None for spec in config.layers)
    rotated = read(GRANITE, position_embedding_type="rope")
    assert [spec.rope is not None for spec in rotated.layers] == [False, False, True, False, True]


def test_a_granite_without_experts_is_as_wide_as_its_shared_layer():
    config = read(GRANITE, num_local_experts=0)
    assert config.moe is None
    assert config.intermediate_size == 24


def test_layers_that_only_feed_forward_have_no_cache():
    config = ModelConfig.from_dict(NEMOTRON)
    expected = [True, False, True, True, False, False, True]
    assert [spec.mixes_tokens for spec in config.layers] == expected
    assert config.cache_groups() == (
        CacheGroup(None, 0, (2,)),
        CacheGroup(LAST_VALUE, 1, (0, 3, 6), is_recurrent=True),
    )
    assert [spec.moe is not None for spec in config.layers] == [
        kind == "moe" for kind in NEMOTRON["layers_block_type"]
    ]
    assert config.num_attention_layers == 1


def test_letters_name_the_kinds_of_layers():
    letters = {name: value for name, value in NEMOTRON.items() if name != "layers_block_type"}
    config = ModelConfig.from_dict(letters | {"hybrid_override_pattern": "ME*M-EM"})
    assert config == ModelConfig.from_dict(NEMOTRON)


def test_steps_have_the_limits_of_the_config():
    limits = {"time_step_limit": [0.01, 2.0]}
    granite, nemotron = (read(base, **limits).recurrence for base in (GRANITE, NEMOTRON))
    assert (granite.min_step, granite.max_step) == (0.01, 2.0)
    assert (nemotron.min_step, nemotron.max_step) == (0.01, 2.0)
    plain = ModelConfig.from_dict(NEMOTRON).recurrence
    assert (plain.min_step, plain.max_step) == (0.001, math.inf)  # time_step_min


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (GRANITE, "mamba_proj_bias", True),
        (GRANITE, "normalization_function", "layernorm"),
        (NEMOTRON, "moe_latent_size", 16),
        (NEMOTRON, "use_bias", True),
        (NEMOTRON, "mlp_bias", True),
        (NEMOTRON, "residual_in_fp32", True),
        (NEMOTRON, "sliding_window", 64),
        (NEMOTRON, "mamba_hidden_act", "gelu"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(base, name, value):
    with pytest.raises(ModelConfigError, match=f"^{name} = .* is not supported"):
        read(base, **{name: value})


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GRANITE, {"mamba_n_groups": 3}, r"mamba_n_heads \(8\) must be a multiple"),
        (GRANITE, {"mamba_d_head": 9}, "must be mamba_expand"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv must be 2 or more"),
        (GRANITE, {"position_embedding_type": "alibi"}, "one of nope, rope, got 'alibi'"),
        (GRANITE, {"time_step_limit": [1]}, "time_step_limit must be two numbers"),
        (GRANITE, {"time_step_limit": [-1, 1]}, "time_step_limit must be numbers from 0 on"),
        (GRANITE, {"layer_types": ["mamba"] * 5}, "must name a full_attention layer"),
        (GRANITE, {"layer_types": ["mlp"] * 5}, "'mlp' is not supported"),
        (NEMOTRON, {"layers_block_type": "M*"}, "layers_block_type must be a list"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "must be one of relu2, got 'silu'"),
    ],
)
def test_a_value_at_fault_is_named(base, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(base, **changes)


def test_chips_split_groups_or_share_them():
    dense = read_json(GOLDEN / "granite_hybrid_dense" / "config.json")
    for tp_size in (1, 2, 4):
        build_model(ModelConfig.from_dict(dense), BuildOptions("float32", tp_size=tp_size))
    with pytest.raises(ValueError, match=r"tp_size \(3\) must divide the number of state space"):
        build_model(ModelConfig.from_dict(dense), BuildOptions("float32", tp_size=3))
