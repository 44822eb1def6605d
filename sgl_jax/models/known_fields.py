"""The fields of `config.json` that each architecture may have.

A field that is not listed may change the model's computation. It is refused by name unless it has a
value that changes nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgl_jax.models.config_defaults import architecture_name, text_architecture
from sgl_jax.models.config_fields import ModelConfigError
from sgl_jax.models.kimi_linear_config import KIMI_LINEAR_FIELDS, KIMI_LINEAR_NEUTRAL


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _names(
    """architectures attention_bias bos_token_id eos_token_id head_dim hidden_act hidden_size
    initializer_range intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads pad_token_id quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size"""
)
_WINDOWS = _names(
    """_sliding_window_pattern layer_types max_window_layers sliding_window sliding_window_pattern
    use_sliding_window"""
)
_UNROTATED = _names("no_rope_layer_interval no_rope_layers")
_SMOLLM3 = _UNROTATED | _names("layer_types sliding_window use_sliding_window")
_LLAMA4 = _UNROTATED | _names(
    """attention_chunk_size attn_scale attn_temperature_tuning floor_scale
    interleave_moe_layer_step intermediate_size_mlp layer_types moe_intermediate_size moe_layers
    num_experts_per_tok num_local_experts scoring_func shared_expert_intermediate_size
    use_qk_norm"""
)
_PHI3 = _names("original_max_position_embeddings partial_rotary_factor sliding_window")
_EXPERTS = _names("moe_intermediate_size norm_topk_prob num_experts_per_tok")
_QWEN3_MOE = _EXPERTS | _names("decoder_sparse_step mlp_only_layers num_experts num_local_experts")
_GPT_OSS = _EXPERTS | _names("num_local_experts swiglu_alpha swiglu_limit")
_GEMMA3 = _names(
    """attn_logit_softcapping final_logit_softcapping hidden_activation query_pre_attn_scalar
    rope_local_base_freq"""
)
_GEMMA4 = _names(
    """attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim hidden_activation
    hidden_size_per_layer_input layer_types moe_intermediate_size num_experts num_experts_per_tok
    num_global_key_value_heads num_kv_shared_layers per_layer_config sliding_window top_k_experts
    use_double_wide_mlp vocab_size_per_layer_input"""
)
_DRAFT_LAYER = _names("num_nextn_predict_layers")
_HYBRID = _DRAFT_LAYER | _names(
    """attn_output_gate full_attention_interval layer_types linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    partial_rotary_factor"""
)
_GLM4_MOE = (
    _EXPERTS
    | _DRAFT_LAYER
    | _names(
        """first_k_dense_replace n_group n_routed_experts n_shared_experts partial_rotary_factor
        routed_scaling_factor scoring_func topk_group topk_method use_qk_norm"""
    )
)
_MINIMAX_M2 = _EXPERTS | _names(
    "num_local_experts partial_rotary_factor rotary_dim scoring_func use_routing_bias"
)
_GRANITE = _names("attention_multiplier embedding_multiplier logits_scaling residual_multiplier")
_GRANITE_MOE = _GRANITE | _EXPERTS | {"num_local_experts"}
_STATE_SPACE = _names(
    """mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_n_groups mamba_n_heads
    time_step_limit"""
)
_GRANITE_HYBRID = (
    _GRANITE_MOE
    | _STATE_SPACE
    | _names(
        """layer_types mamba_expand position_embedding_type shared_expert_intermediate_size
        shared_intermediate_size"""
    )
)
_NEMOTRON_H = (
    _EXPERTS
    | _STATE_SPACE
    | _names(
        """conv_kernel hybrid_override_pattern layer_norm_epsilon layer_types layers_block_type
        mamba_head_dim mamba_num_heads mlp_hidden_act moe_shared_expert_intermediate_size n_group
        n_groups n_routed_experts n_shared_experts routed_scaling_factor scoring_func
        shared_expert_intermediate_size ssm_state_size time_step_min topk_group topk_method
        use_conv_bias"""
    )
)
_HYBRID_MOE = _HYBRID | _QWEN3_MOE | {"shared_expert_intermediate_size"}
_DEEPSEEK = (
    _EXPERTS
    | _DRAFT_LAYER
    | _names(
        """first_k_dense_replace kv_lora_rank moe_layer_freq n_group n_routed_experts
        n_shared_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave
        routed_scaling_factor scoring_func topk_group topk_method v_head_dim"""
    )
)
_INDEXER = _names(
    """index_head_dim index_n_heads index_skip_topk_offset index_topk index_topk_freq
    index_topk_pattern indexer_rope_interleave indexer_types mlp_layer_types"""
)
_ROPE = _names(
    """attention_factor beta_fast beta_slow factor full_attention high_freq_factor low_freq_factor
    mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta
    rope_type sliding_attention truncate type"""
)
# Position sections of images; a text has one position for all of them.
_ROPE_OF_IMAGES = _names("mrope_interleaved mrope_section")
_ROPE_IGNORED = _names("finetuned")
_QUERY_SCALE = _names("llama_4_scaling_beta max_position_embeddings")
_ROPE_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "Ministral3ForCausalLM": _QUERY_SCALE,
        "Mistral4ForCausalLM": _QUERY_SCALE,
        "Phi3ForCausalLM": _names("long_factor short_factor"),
    }
)

# Fields by architecture, next to those of every model. The keys are the supported architectures.
_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _DEEPSEEK,
        "DeepseekV32ForCausalLM": _DEEPSEEK | _INDEXER,
        "DeepseekV3ForCausalLM": _DEEPSEEK,
        "Gemma3ForCausalLM": _WINDOWS | _GEMMA3,
        "Gemma3ForConditionalGeneration": _WINDOWS | _GEMMA3,
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _GEMMA4,
        "Glm4MoeForCausalLM": _GLM4_MOE,
        "GlmMoeDsaForCausalLM": _DEEPSEEK | _INDEXER,
        "GptOssForCausalLM": _WINDOWS | _GPT_OSS,
        "GraniteForCausalLM": _GRANITE,
        "GraniteMoeForCausalLM": _GRANITE_MOE,
        "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID,
        "KimiLinearForCausalLM": frozenset(KIMI_LINEAR_FIELDS),
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": _LLAMA4,
        "LlamaForCausalLM": _WINDOWS,
        "MiniMaxM2ForCausalLM": _MINIMAX_M2,
        "Ministral3ForCausalLM": _WINDOWS,
        "MinistralForCausalLM": _WINDOWS,
        "Mistral3ForConditionalGeneration": _WINDOWS,
        "Mistral4ForCausalLM": _DEEPSEEK | {"partial_rotary_factor"},
        "MistralForCausalLM": _WINDOWS,
        "NemotronHForCausalLM": _NEMOTRON_H,
        "Olmo3ForCausalLM": _WINDOWS,
        "Phi3ForCausalLM": _PHI3,
        "Qwen2ForCausalLM": _WINDOWS,
        "Qwen3ForCausalLM": _WINDOWS,
        "Qwen3MoeForCausalLM": _WINDOWS | _QWEN3_MOE,
        "Qwen3NextForCausalLM": _HYBRID_MOE,
        "Qwen3VLForConditionalGeneration": frozenset(),
        "Qwen3VLMoeForConditionalGeneration": _QWEN3_MOE,
        "Qwen3_5ForCausalLM": _HYBRID,
        "Qwen3_5ForConditionalGeneration": _HYBRID,
        "Qwen3_5MoeForCausalLM": _HYBRID_MOE,
        "Qwen3_5MoeForConditionalGeneration": _HYBRID_MOE,
        "SeedOssForCausalLM": _names("attention_out_bias"),
        "SmolLM3ForCausalLM": _SMOLLM3,
    }
)

# Fields without effect on a text model's computation: metadata, training, generation defaults,
# what a checkpoint says a second time, and the image part of multimodal models.
_IGNORED = _names(
    """_commit_hash _flash_attn_2_enabled _name_or_path _num_labels attn_implementation
    auto_map aux_loss_alpha bad_words_ids base_model_ep_plan base_model_pp_plan
    base_model_tp_plan begin_suppress_tokens bos_token cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token ep_size experts_per_token
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initial_context_length initializer_factor is_decoder
    is_llama_config label2id length_penalty loss_type max_length max_sequence_length min_length
    model_max_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_logits_to_keep num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token prefix pretraining_tp problem_type
    pruned_heads qk_head_dim remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id seq_aux
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
    use_return_dict"""
)
_IMAGES = _names(
    """audio_config audio_token_id boa_token_id boi_token_id boi_token_index eoa_token_index
    eoi_token_id eoi_token_index image_token_id image_token_index language_model_only
    mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size
    text_config video_token_id vision_config vision_end_token_id vision_feature_layer
    vision_soft_tokens_per_image vision_start_token_id"""
)
# Fields that transformers does not read for an architecture, although published configs have them.
_IGNORED_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "MiniMaxM2ForCausalLM": _names(
            "mlp_intermediate_size num_mtp_modules shared_moe_mode use_mtp"
        ),
        "GraniteMoeHybridForCausalLM": _names("init_method mamba_chunk_size"),
        # `expand` gives no size: heads do. The `time_step_*` are of initial weights.
        "NemotronHForCausalLM": _names(
            """attention_head_dim chunk_size expand moe_shared_expert_overlap
            num_nextn_predict_layers rescale_prenorm_residual time_step_floor time_step_max
            time_step_rank use_mamba_kernels"""
        ),
        "SmolLM3ForCausalLM": _names("max_window_layers"),
    }
)
_IGNORED_PREFIXES = ("_attn_implementation", "mtp_", "transformers.js", "unsloth_")
_IGNORED_SUFFIXES = ("dropout", "_pdrop", "_dropout_prob")

# Values that change nothing, where they are not zero, False or empty.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "activation": ("silu", "swiglu"),  # next to hidden_act
        "attn_factor": (1,),
        "embedding_multiplier": (1,),
        "extrapolation_factor": (1,),
        "is_causal": (True,),
        "logit_scale": (1,),
        "logits_scaling": (1,),
        "mamba_hidden_act": ("silu",),
        "mamba_ssm_cache_dtype": ("float32",),
        "mamba_ssm_dtype": ("float32",),
        "moe_layer_freq": (1,),
        "normalization_function": ("rmsnorm",),
        "n_group": (1,),
        "output_gate_type": ("silu", "swish"),  # of gated delta nets
        "partial_rotary_factor": (1,),
        "residual_multiplier": (1,),
        "rotary_pct": (1,),
        "routed_scaling_factor": (1,),
        "scale_depth": (),
        "scale_emb": (1,),
        "topk_group": (1,),
    }
)
_NEUTRAL_GEMMA4: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "norm_topk_prob": (True,),
        "query_pre_attn_scalar": (1,),
        "sliding_window_pattern": (6,),
        "use_bidirectional_attention": ("vision",),  # between the tokens of an image
    }
)
_NEUTRAL_INDEXER: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # Whether a draft layer chooses tokens once for several drafts. Here it chooses for each:
        # answers are the same, only drafts may be others.
        "index_share_for_mtp_iteration": (True, False),
        "layer_types": ("indexed_attention",),
        "moe_router_dtype": ("float32",),
    }
)
_NEUTRAL_OF: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": _NEUTRAL_INDEXER,
        "Gemma4ForCausalLM": _NEUTRAL_GEMMA4,
        "Gemma4ForConditionalGeneration": _NEUTRAL_GEMMA4,
        "GlmMoeDsaForCausalLM": _NEUTRAL_INDEXER,
        "KimiLinearForCausalLM": KIMI_LINEAR_NEUTRAL,
        "MiniMaxM2ForCausalLM": {
            "attn_type_list": (1,),
            "layernorm_full_attention_beta": (1,),
            "layernorm_linear_attention_beta": (1,),
            "layernorm_mlp_beta": (1,),
            "qk_norm_type": ("per_layer",),
            "use_qk_norm": (True,),
        },
        "Phi3ForCausalLM": {"full_attn_mod": (1,), "interpolate_factor": (1,)},
        "Qwen3ForCausalLM": {"use_qk_norm": (True,)},
        "Qwen3MoeForCausalLM": {"use_qk_norm": (True,), "scoring_func": ("softmax",)},
    }
)


def check_architecture(raw: Mapping[str, Any]) -> None:
    """Raise ModelConfigError, with the supported names, if the architecture is not supported."""
    name = architecture_name(raw)
    if name not in _FIELDS:
        known = ", ".join(sorted(_FIELDS))
        raise ModelConfigError(f"architecture {name!r} is not supported; supported: {known}")


def refuse_unknown_fields(raw: Mapping[str, Any]) -> None:
    """Raise ModelConfigError for a field that is not read and may change the computation.

    `raw` has the fields of a supported architecture's text model.
    """
    architecture = text_architecture(raw)
    read = _READ | _FIELDS[architecture] | _IGNORED_OF.get(architecture, frozenset())
    neutral = {**_NEUTRAL, **_NEUTRAL_OF.get(architecture, {})}
    for name, value in raw.items():
        if name not in read and not _is_ignored(name) and not _is_neutral(name, value, neutral):
            raise ModelConfigError(
                f"{name} = {value!r} is not supported for {architecture}; if it has no effect on "
                "the model's results, remove it from config.json"
            )
    for field in ("rope_parameters", "rope_scaling"):
        _refuse_unknown_rope_fields(field, raw.get(field), _ROPE_OF.get(architecture, frozenset()))


def _refuse_unknown_rope_fields(field: str, value: Any, further: frozenset[str]) -> None:
    if not isinstance(value, dict):
        return
    for name, part in value.items():
        if name in ("full_attention", "sliding_attention"):
            _refuse_unknown_rope_fields(f"{field}.{name}", part, further)
        elif name not in _ROPE | _ROPE_OF_IMAGES | _ROPE_IGNORED | further and not _is_neutral(
            name, part, _NEUTRAL
        ):
            raise ModelConfigError(f"{name} = {part!r} in {field} is not supported")


def _is_ignored(name: str) -> bool:
    return (
        name in _IGNORED
        or name in _IMAGES
        or name.startswith(_IGNORED_PREFIXES)
        or name.endswith(_IGNORED_SUFFIXES)
    )


def _is_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    if value is None or value in ("", [], {}):
        return True
    if name in neutral:
        return all(
            item in neutral[name] for item in (value if isinstance(value, list) else [value])
        )
    return value in (False, 0)
