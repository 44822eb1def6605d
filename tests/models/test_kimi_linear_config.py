"""Kimi Linear's config.json: its spellings, its layers, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

import sgl_jax.planner
from sgl_jax.models.config import ModelConfig, ModelConfigError

PUBLISHED = Path(sgl_jax.planner.__file__).parent / "models" / "kimi-linear-48b-a3b.json"
RAW: dict[str, Any] = json.loads(PUBLISHED.read_text())
FULL = {3, 7, 11, 15, 19, 23, 26}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def test_the_published_config_has_states_and_latents() -> None:
    config = read()
    for number, spec in enumerate(config.layers):
        assert (spec.latent is not None, spec.recurrence is None) == (number in FULL,) * 2
        assert spec.rope is None
        assert (spec.moe is None) == (number == 0)
    assert config.recurrence is not None
    assert config.recurrence.decays_by_channel
    assert config.moe is not None
    assert config.moe.has_choice_bias
    assert config.moe.choice.scale == 2.446
    assert config.max_position_embeddings == 1048576
    assert [len(group.layers) for group in config.cache_groups()] == [7, 20]


def test_the_names_of_transformers_are_read_too() -> None:
    renamed = {
        "model_max_length": "max_position_embeddings",
        "num_experts": "num_local_experts",
    } | {
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    raw = {renamed.get(name, name): value for name, value in RAW.items()}
    linear = raw.pop("linear_attn_config")
    raw |= {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    raw["layer_types"] = [
        "full_attention" if layer in linear["full_attn_layers"] else "linear_attention"
        for layer in range(1, 28)
    ]
    assert ModelConfig.from_dict(raw) == read()


def test_without_lists_every_fourth_layer_after_the_first_is_full() -> None:
    linear = {"head_dim": 64, "num_heads": 8}
    config = read(linear_attn_config=linear, num_hidden_layers=10)
    assert [spec.latent is not None for spec in config.layers] == [n in (4, 8) for n in range(10)]
    assert config.recurrence is not None
    assert (config.recurrence.num_value_heads, config.recurrence.value_dim) == (8, 64)


LINEAR = RAW["linear_attn_config"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mla_use_nope", {"mla_use_nope": False}),
        ("moe_router_activation_func", {"moe_router_activation_func": "softmax"}),
        ("num_nextn_predict_layers", {"num_nextn_predict_layers": 1}),
        ("rope_scaling", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("attention_bias", {"attention_bias": True}),
        ("linear_num_key_heads", {"linear_num_key_heads": 16}),
        ("gate in linear_attn_config", {"linear_attn_config": LINEAR | {"gate": "silu"}}),
        ("kda_layers", {"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}}),
        ("kda_layers", {"linear_attn_config": LINEAR | {"kda_layers": list(range(1, 28))}}),
        ("full_attn_layers", {"linear_attn_config": LINEAR | {"full_attn_layers": 4}}),
        ("hidden_act", {"hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=name):
        read(**changes)
