"""Configs of models with latent attention: DeepSeek V2 and V3, and Kimi K2."""

import math

import pytest

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.layer_configs import ExpertChoice, IndexerConfig, LatentConfig
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.layer_specs import num_indexers
from sgl_jax.models.registry import build_model
from sgl_jax.planner.arguments import read_config

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}


def read(**changes):
    return ModelConfig.from_dict(V3 | changes)


def read_v2(**changes):
    return ModelConfig.from_dict(V2 | changes)


def test_a_v3_has_latents_in_all_layers_and_experts_after_the_first_three():
    config = read()
    assert config.latent == LatentConfig(512, 128, 64, 128, 1536)
    assert all(spec.latent == config.latent for spec in config.layers)
    assert [spec.moe is not None for spec in config.layers] == [False] * 3 + [True] * 2
    assert (config.num_kv_heads, config.head_dim, config.rope_head_dim) == (1, 192, 64)
    assert config.score_scale == 192**-0.5
    assert config.cache_groups() == (CacheGroup(None, 0, (0, 1, 2, 3, 4)),)
    moe = config.moe
    assert moe.choice == ExpertChoice(8, True, True, 8, 4, 2, 2.5)
    assert (moe.num_experts, moe.shared_intermediate_size) == (256, 16)
    assert moe.has_choice_bias
    assert not moe.gates_shared


def test_a_v2_chooses_by_a_softmax_and_in_groups_by_their_best_expert():
    config = read_v2(q_lora_rank=None, n_shared_experts=2)
    assert config.latent.query_rank is None
    assert config.moe.choice == ExpertChoice(2, False)
    assert config.moe.shared_intermediate_size == 32
    assert not config.moe.has_choice_bias
    grouped = read_v2(
        topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=16.0
    )
    assert grouped.moe.choice == ExpertChoice(2, False, False, 3, 2, 1, 16.0)


def test_yarn_multiplies_scores_by_the_square_of_its_growth():
    growth = 0.1 * 0.707 * math.log(40) + 1
    config = read(rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707})
    assert config.score_scale == pytest.approx(192**-0.5 * growth**2)
    assert config.layers[0].rope.attention_factor == 1.0
    apart = read(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.707})
    expected = (0.1 * math.log(40) + 1) / growth
    assert apart.layers[0].rope.attention_factor == pytest.approx(expected)
    assert read(rope_scaling=YARN).score_scale == 192**-0.5
    assert read(rope_scaling=YARN | {"mscale_all_dim": 0}).score_scale == 192**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method and scoring_func must be one of greedy with soft"),
        ({"n_group": 7}, r"n_group \(7\) must divide n_routed_experts \(256\)"),
        ({"topk_group": 9}, r"topk_group \(9\) must not exceed it"),
        ({"n_routed_experts": 16, "topk_group": 2}, r"must not exceed the experts of topk_group"),
        ({"first_k_dense_replace": 6}, r"first_k_dense_replace must be in \[0, 5\], got 6"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"attention_bias": True}, "attention_bias is not supported with latent attention"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)


V32 = V3 | {"architectures": ["DeepseekV32ForCausalLM"]}
GLM = V3 | {"architectures": ["GlmMoeDsaForCausalLM"]}


def test_an_indexer_chooses_tokens_and_its_keys_are_cached():
    config, glm = ModelConfig.from_dict(V32), ModelConfig.from_dict(GLM)
    assert config.latent == LatentConfig(512, 128, 64, 128, 1536, IndexerConfig(64, 128, 2048))
    assert glm.latent.indexer == IndexerConfig(32, 128, 2048, pairs_neighbours=True)
    layouts = [
        EngineConfig.resolve(ServerArgs(), own, "cpu").pool_layouts[0] for own in (config, read())
    ]
    assert [layout.page_bytes // layout.page_size for layout in layouts] == [
        5 * row * layouts[0].dtype.itemsize for row in (640 + 128, 640)
    ]


GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "FFFFFFFFF"),
        (GLM_5_2, "FFFSSSFSS"),
        (GLM_5_2 | {"index_share_for_mtp_iteration": False}, "FFFSSSFSS"),
        ({"index_topk_freq": 2}, "FFSFSFSFS"),
        (GLM_5_2 | {"index_topk_pattern": "FSSSSSSSF"}, "FSSSSSSSF"),
        ({"index_topk_pattern": list("FSFSFSFSF")}, "FSFSFSFSF"),
        (GLM_5_2 | {"indexer_types": ["full", *["shared"] * 8]}, "FSSSSSSSS"),
    ],
    ids=str,
)
def test_layers_reuse_the_choice_of_an_earlier_indexer(fields, expected):
    config = ModelConfig.from_dict(GLM | {"num_hidden_layers": 9} | fields)
    kinds = ["S" if spec.latent.indexer.reuses else "F" for spec in config.layers]
    assert "".join(kinds) == expected
    assert config.reused_top_k == (2048 if "S" in expected else None)
    assert num_indexers(config.layers) == expected.count("F")


def test_a_draft_layer_after_a_layer_that_reuses_a_choice_has_an_indexer():
    config = read_config("glm-5.2")
    assert config.layers[-1].latent.indexer.reuses
    assert not config.drafting().draft_layer.latent.indexer.reuses
    assert num_indexers(config.drafting().all_layers) == num_indexers(config.layers) + 1 == 22


def test_an_indexer_that_a_layer_leaves_out_is_spare():
    model = build_model(
        ModelConfig.from_dict(GLM | {"index_topk_pattern": "FSFFF"}), BuildOptions(dtype="float32")
    )
    assert model.is_spare("model.layers.1.self_attn.indexer.wk.weight")
    assert not model.is_spare("model.layers.2.self_attn.indexer.wk.weight")


def test_layers_with_experts_may_be_named():
    kinds = ["dense", "sparse", "dense", "sparse", "sparse"]
    config = ModelConfig.from_dict(V32 | {"mlp_layer_types": kinds})
    assert [spec.moe is not None for spec in config.layers] == [k == "sparse" for k in kinds]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk must be a positive integer"),
        ({"index_head_dim": 64}, r"index_head_dim \(64\) must exceed qk_rope_head_dim \(64\)"),
        ({"q_lora_rank": None}, "lacks 'q_lora_rank'"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types must be 5 kinds .*, the first full"),
        ({"index_topk_pattern": "SFFFF"}, "index_topk_pattern must be 5 kinds .*, the first full"),
        (
            {"index_topk_pattern": "FFXFF"},
            "index_topk_pattern may name full and shared, got 'FFXFF",
        ),
        ({"indexer_types": 5}, "indexer_types may name full and shared, got 5"),
        ({"index_topk_freq": -1}, "index_topk_freq must be a positive integer, got -1"),
        ({"index_skip_topk_offset": 0}, "index_skip_topk_offset must be a positive integer, got 0"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 5 names dense or"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types = .* is not supported"),
    ],
)
def test_settings_of_an_indexer_that_are_not_supported_are_refused_by_name(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(GLM | changes)


def test_an_indexer_is_refused_where_results_must_not_depend_on_the_batch():
    args = ServerArgs(enable_deterministic_inference=True, attention_backend="xla")
    with pytest.raises(ValueError, match="needs a model without an indexer"):
        EngineConfig.resolve(args, ModelConfig.from_dict(V32), "cpu")


def test_an_8_bit_cache_is_refused_with_an_indexer():
    with pytest.raises(ValueError, match="fp8_e4m3 is not supported for models with an indexer"):
        EngineConfig.resolve(
            ServerArgs(kv_cache_dtype="fp8_e4m3"), ModelConfig.from_dict(V32), "cpu"
        )


def test_scales_of_a_checkpoint_are_refused_with_an_indexer_for_what_they_are():
    """Not for a flag that is not given."""
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    model = ModelConfig.from_dict(V32 | {"quantization_config": quantization})
    with pytest.raises(ValueError, match="are of heads, and latents have none"):
        EngineConfig.resolve(ServerArgs(), model, "cpu")


def test_tensors_of_layers_after_the_last_are_spare():
    """They predict further tokens."""
    model = build_model(read(), BuildOptions(dtype="float32"))
    assert model.is_spare("model.layers.5.enorm.weight")
    assert model.is_spare("model.layers.12.enorm.weight")
    assert not model.is_spare("model.layers.4.enorm.weight")


def test_heads_that_chips_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"tp_size \(3\) must divide the number of attention"):
        build_model(read(), BuildOptions(dtype="float32", tp_size=3))
