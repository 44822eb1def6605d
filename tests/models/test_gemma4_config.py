"""Gemma 4: heads by layer, layers that read another layer's cache, embeddings by layer."""

import json
from dataclasses import replace

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.layers.parameter import declarations
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.eagle3_config import with_eagle3_head
from sgl_jax.models.gemma4_config import HeadSizes
from sgl_jax.models.registry import build_model
from tests.models.configs import PLAIN
from tests.models.test_further_configs import published

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "global_head_dim": 24,
    "vocab_size_per_layer_input": 64,
}


def read(**changes):
    return ModelConfig.from_dict(GEMMA4 | changes)


def page_bytes(config):
    args = ServerArgs(model_path="", dtype="bfloat16", page_size=16)
    return EngineConfig.resolve(args, config, "tpu").page_bytes


def test_the_last_layers_read_the_cache_of_the_last_layer_of_their_kind():
    config = published("gemma-4-e2b")
    sources = [spec.cache_source for spec in config.layers]
    assert sources == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [spec.mlp_width for spec in config.layers] == [None] * 15 + [12288] * 20
    full, windows = config.cache_groups()
    assert (full.layers, full.sliding_window, full.pool) == ((4, 9, 14), None, 0)
    assert windows.layers == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13)
    assert (windows.sliding_window, windows.pool) == (512, 1)
    places = config.cache_places()
    assert (places[4], places[19], places[15]) == ((0, 0), (0, 2), (1, 11))


def test_layers_without_a_cache_take_no_page():
    config = published("gemma-4-e2b")
    unshared = replace(
        config, layers=tuple(replace(spec, cache_source=None) for spec in config.layers)
    )
    token = 2 * 2 * 16  # K and V in bfloat16, 16 tokens
    assert page_bytes(config) == [3 * 512 * token, 12 * 256 * token]
    assert page_bytes(unshared) == [7 * 512 * token, 28 * 256 * token]


def test_pages_have_the_heads_of_their_layers():
    token = 2 * 2 * 16
    full, windows = page_bytes(published("gemma-4-31b"))
    assert (full, windows) == (10 * 4 * 512 * token, 50 * 16 * 256 * token)


def test_as_many_layers_of_unlike_heads_do_not_share_a_pool():
    kinds = [SLIDING, FULL] * 3
    config = read(num_hidden_layers=6, layer_types=kinds)
    assert [group.pool for group in config.cache_groups()] == [0, 1]
    config = read(num_hidden_layers=6, layer_types=kinds, global_head_dim=16)
    assert [group.pool for group in config.cache_groups()] == [0, 0]


def test_heads_of_layers_are_read_in_either_spelling():
    by_kind = read(attention_k_eq_v=True, num_global_key_value_heads=2)
    assert [spec.heads for spec in by_kind.layers] == [None] * 5 + [HeadSizes(2, 24)] * 2
    assert [spec.values_are_keys for spec in by_kind.layers] == [False] * 5 + [True] * 2
    sizes = {"head_dim": 24, "num_key_value_heads": 2}
    listed = {str(layer): sizes for layer in (5, 6)}
    assert read(attention_k_eq_v=True, per_layer_config=listed) == by_kind
    assert read(num_global_key_value_heads=2).layers[5].heads == HeadSizes(4, 24)
    assert read(per_layer_config={}).layers[5].heads is None


def test_a_window_as_long_as_the_context_keeps_its_pool():
    config = read(max_position_embeddings=256)
    assert [group.sliding_window for group in config.cache_groups()] == [None, 256]


def test_fields_of_other_families_leave_windows_and_scores_as_they_are():
    config = read(use_sliding_window=False, query_pre_attn_scalar=None)
    assert config == read()
    assert config.score_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 7}, r"num_kv_shared_layers must be in \[0, 7\), got 7"),
        ({"num_kv_shared_layers": -1}, r"num_kv_shared_layers must be in \[0, 7\), got -1"),
        ({"num_kv_shared_layers": 5}, "leaves no layer with a cache of some kind"),
        ({"vocab_size_per_layer_input": 63}, "must be at least vocab_size"),
        ({"per_layer_config": {"7": {}}}, r"layers in \[0, 7\), got '7'"),
        ({"per_layer_config": {"6": {"head_dim": 24}}}, "layers of one kind the same heads"),
        ({"per_layer_config": {"6": {"rms_norm_eps": 1}}}, "rms_norm_eps = 1 in per_layer_config"),
        ({"global_head_dim": 23}, "every head_dim must be even"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "a multiple of every num_key",
        ),
        ({"rope_parameters": None}, "rope_parameters must have"),
        ({"rope_parameters": {FULL: {"rope_theta": 10.0}}}, "must have sliding_attention"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"enable_moe_block": True, "top_k_experts": 2}, "needs num_experts"),
    ],
)
def test_a_wrong_field_is_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)


def test_experts_count_only_if_they_are_enabled():
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    assert read(**experts).moe is None
    assert read(**experts, enable_moe_block=True).moe.choice.top_k == 2


def test_experts_are_quantized_at_load_as_the_dense_layers_are():
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = read(**experts, enable_moe_block=True).quantized("int8")
    declared = declarations(build_model(config, BuildOptions("bfloat16")))
    for part in (("mlp",), ("experts",)):
        for name in ("gate", "up", "down"):
            values = declared["layers", "0", "mlp", *part, name, "weight", "values"]
            assert values.array.dtype == "int8"


def test_a_step_reads_only_the_rows_of_its_tokens():
    config = published("gemma-4-e2b")
    table = declarations(build_model(config, BuildOptions("bfloat16")))[
        "per_layer", "table", "weight"
    ]
    assert table.array.shape == (262144, 35 * 256)
    assert table.read == "rows"


def test_keys_of_layers_that_share_a_cache_may_be_stored():
    model = build_model(read(num_kv_shared_layers=1), BuildOptions("float32"))
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        assert model.is_spare(f"model.layers.6.self_attn.{name}")
        assert not model.is_spare(f"model.layers.5.self_attn.{name}")
    assert not model.is_spare("model.layers.6.self_attn.q_proj.weight")


def test_what_has_one_shape_for_all_layers_is_refused(tmp_path):
    args = ServerArgs(model_path="", kv_cache_dtype="fp8_e4m3", kv_cache_scales="scales.json")
    with pytest.raises(ValueError, match="not supported for heads of unlike sizes"):
        EngineConfig.resolve(args, read(), "cpu")
    shared = read(num_kv_shared_layers=1, global_head_dim=16)
    assert not shared.has_unlike_heads
    with pytest.raises(ValueError, match="not supported for layers that read another layer's"):
        EngineConfig.resolve(args, shared, "cpu")
    head = PLAIN | {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(head))
    with pytest.raises(ModelConfigError, match="EAGLE3 is not supported for models with heads of"):
        with_eagle3_head(read(), tmp_path)
