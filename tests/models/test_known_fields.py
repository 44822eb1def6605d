"""Fields of config.json that the engine does not compute are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.models import config_defaults, known_fields, registry
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.config_defaults import completed
from tests.models import configs
from tests.models.configs import GEMMA3, GPT_OSS, HYBRID, PLAIN

RECORD = json.loads(Path("tests/golden/config_fields.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = RECORD["configs"]
SUPPORTED = sorted(known_fields._FIELDS)
MOE = PLAIN | configs.MOE
LLAMA = PLAIN | {"architectures": ["LlamaForCausalLM"]}


def default_config(architecture: str) -> dict[str, Any]:
    """Return transformers' default config. Some fields have no usable default there."""
    usable: dict[str, dict[str, Any]] = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 2}} | {
        "Glm4MoeForCausalLM": {"head_dim": 128},
        # By default it has no attention.
        "GraniteMoeHybridForCausalLM": {
            "layer_types": [*["linear_attention"] * 31, "full_attention"]
        },
    }
    return CONFIGS[architecture] | usable.get(architecture, {})


def read_with(base: dict[str, Any], **changes: Any) -> ModelConfig:
    """Read a config with changed fields, also in its text section."""
    if isinstance(base.get("text_config"), dict):
        base = base | {"text_config": base["text_config"] | changes}
    return ModelConfig.from_dict(base | changes)


def test_fields_are_known_for_the_supported_architectures() -> None:
    assert set(SUPPORTED) == set(registry._ARCHITECTURES) == set(CONFIGS)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_default_config_of_transformers_is_read(architecture: str) -> None:
    assert ModelConfig.from_dict(default_config(architecture)).architecture == architecture


def test_an_unsupported_architecture_is_named_before_any_field() -> None:
    for name in RECORD["architectures"]:
        if name not in SUPPORTED:
            with pytest.raises(ModelConfigError, match=f"architecture '{name}' is not supported"):
                ModelConfig.from_dict({"architectures": [name]})


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (LLAMA, "no_rope_layers", [1, 1, 1, 0]),
        (LLAMA, "no_rope_layer_interval", 4),
        (LLAMA, "embedding_multiplier", 12.0),
        (LLAMA, "residual_multiplier", 0.22),
        (LLAMA, "attention_multiplier", 0.0078125),
        (LLAMA, "logits_scaling", 8.0),
        (LLAMA, "logit_scale", 0.0625),
        (LLAMA, "scale_emb", 12),
        (LLAMA, "scale_depth", 1.4),
        (LLAMA, "attention_sink", True),
        (LLAMA, "rotary_dim", 64),
        (LLAMA, "rotary_pct", 0.25),
        (LLAMA, "rope_interleave", True),
        (LLAMA, "use_qk_norm", True),
        (LLAMA, "clip_qkv", 8.0),
        (LLAMA, "attention_chunk_size", 8192),
        (LLAMA, "attn_temperature_tuning", True),
        (LLAMA, "is_causal", False),
        (LLAMA, "use_parallel_residual", True),
        (LLAMA, "num_kv_shared_layers", 2),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "num_experts", 8),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "final_logit_softcapping", 30.0),
        (LLAMA, "a_field_of_tomorrow", "new"),
        (MOE, "swiglu_limit", 7.0),
        (MOE, "routed_scaling_factor", 2.5),
        (MOE, "scoring_func", "sigmoid"),
        (MOE, "n_group", 8),
        (MOE, "shared_expert_intermediate_size", 512),
        (HYBRID, "linear_attn_config", {"kda_layers": [1]}),
        (HYBRID, "sliding_window", 4096),
        (GPT_OSS, "use_qk_norm", True),
        (GEMMA3, "hidden_size_per_layer_input", 256),
        (GEMMA3, "use_bidirectional_attention", True),
        (CONFIGS["DeepseekV3ForCausalLM"], "index_topk", 2048),
        (CONFIGS["DeepseekV3ForCausalLM"], "mla_use_nope", True),
        (CONFIGS["DeepseekV3ForCausalLM"], "sliding_window", 512),
    ],
)
def test_a_field_that_is_not_computed_is_refused(
    base: dict[str, Any], name: str, value: Any
) -> None:
    with pytest.raises(ModelConfigError, match=f"^{name} = .* is not supported"):
        read_with(base, **{name: value})


def test_a_field_inside_of_rope_parameters_is_refused() -> None:
    for kind in ({"llama_4_scaling_beta": 0.1}, {"sliding_attention": {"short_factor": [1.0]}}):
        for field in ("rope_parameters", "rope_scaling"):
            with pytest.raises(ModelConfigError, match=r"(beta|short_factor) = .* in rope_"):
                ModelConfig.from_dict(LLAMA | {field: {"rope_type": "default", **kind}})


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True, "logit_scale": 1.0, "rotary_pct": 1.0, "n_group": 1},
        {"clip_qkv": None, "no_rope_layers": [], "num_kv_shared_layers": 0, "mlp_bias": False},
        {"attention_dropout": 0.1, "resid_pdrop": 0.1, "torch_dtype": "bfloat16", "top_k": 20},
        {"use_qk_norm": True, "unsloth_fixed": True, "_attn_implementation_autoset": True},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {"type": "default", "finetuned": True, "attn_factor": 1}},
        {"activation": "swiglu", "_flash_attn_2_enabled": True, "loss_type": "ForCausalLM"},
    ],
)
def test_fields_without_effect_are_accepted(changes: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(PLAIN | changes) == ModelConfig.from_dict(PLAIN)


# Some fields count only if others have a value.
OTHERS: list[dict[str, Any]] = [
    {},
    {"layer_types": None},
    {"layer_types": None, "use_sliding_window": True},
    {"layer_types": None, "use_sliding_window": True, "max_window_layers": 0},
    {"layer_types": None, "use_sliding_window": True, "sliding_window": 9},
    {"rope_parameters": None},
    {"moe_layers": None, "no_rope_layers": None},
    {"num_experts": None},
    {"topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "n_group": 2},
]


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_known_field_changes_the_model_or_is_checked(architecture: str) -> None:
    base = default_config(architecture)
    plain, fields = read_with(base), known_fields._READ | known_fields._FIELDS[architecture]

    def is_read(name: str) -> bool:
        for other in OTHERS:
            if name in other or not set(other) <= fields:
                continue
            for value in (["?"], 0):
                try:
                    if read_with(base, **other, **{name: value}) != plain:
                        return True
                except (ModelConfigError, TypeError):
                    return True
        return False

    aliases = config_defaults._ALIASES.get(config_defaults.text_architecture(completed(base)), {})
    assert [name for name in sorted(fields - aliases.keys()) if not is_read(name)] == []


# Fields of any model of transformers that are accepted with any value, next to those that a model
# reads: none changes how a decoder of text computes at inference.
HARMLESS = """
activation_dropout aligner_attention_probs_dropout_prob attention_probs_dropout_prob attn_pdrop
audio_config begin_suppress_tokens classifier_dropout classifier_dropout_prob
decoder_start_token_id dropout emb_pdrop embd_pdrop embed_dropout embedding_dropout
encoder_no_repeat_ngram_size eoi_token_index forced_eos_token_id hidden_dropout hidden_dropout_prob
image_token_id image_token_index initializer_factor is_decoder local_attention_probs_dropout_prob
lsh_attention_probs_dropout_prob mlp_dropout model_max_length mtp_hidden_states_first
mtp_layer_types mtp_layers_block_type mtp_local_layer_ids mtp_loss_scaling_factor
mtp_mlp_layer_types num_logits_to_keep output_router_logits pretraining_tp qk_head_dim
resid_dropout resid_pdrop residual_dropout router_aux_loss_coef router_jitter_noise sep_token_id
summary_first_dropout summary_last_dropout suppress_tokens vision_config
"""


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_no_other_field_of_transformers_starts_in_silence(architecture: str) -> None:
    base = default_config(architecture)
    read = known_fields._READ | known_fields._FIELDS[architecture] | set(completed(base))
    accepted = set()
    for name in sorted(set(RECORD["fields"]) - read):
        try:
            read_with(base, **{name: 7.25})
        except ModelConfigError as error:
            message = str(error)
        else:
            message = name
            accepted.add(name)
        assert name in message
    unread = known_fields._IGNORED_OF.get(architecture, frozenset())
    assert sorted(accepted - unread - set(HARMLESS.split())) == []
