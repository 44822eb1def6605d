"""Make the golden data of tests/golden: tiny random models and their outputs in transformers.

Needs torch and transformers (never a dependency of the package):

    python scripts/make_golden.py tests/golden [NAME ...]

For each model, or those named, it writes a Hugging Face folder and `golden.npz` with, in float32,
    prompt [n]            token ids
    prompt_logits [n, V]  logits of every prompt position
    greedy [m]            the tokens that greedy decoding appends
    greedy_logits [m, V]  the logits from which each of them was chosen
for Qwen3 `embeddings.npz`, the normalized last hidden states of several prompts, concatenated,
and for models with recurrences `long.npz`, the same of a prompt of several chunks of the delta
rule, with `prompt_logits` of only its last positions.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

PROMPT_TOKENS = 45
LONG_PROMPT_TOKENS = 190
GREEDY_TOKENS = 16

COMMON = {
    "vocab_size": 250,  # no multiple of the chips in any test
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 249,
    "bos_token_id": 248,
}
SMALL = COMMON | {"hidden_size": 32, "intermediate_size": 48}
del SMALL["num_hidden_layers"]
# Clamps, sinks and both ends of the blend of frequencies are met; MXFP4 has rows of two blocks.
GPT_OSS = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 0.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
# Value heads outnumber key heads, which are wider; a quarter of a head of 24 is turned.
HYBRID = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
SHARED_EXPERT = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

# Heads of unequal parts; YaRN with both of its scales, its original context shorter than prompts.
LATENTS = SMALL | {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# Heads of an indexer are larger than the part of them that is rotated.
INDEXER = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "n_shared_experts": 1,
    "index_n_heads": 8,
    "index_head_dim": 20,
    "index_topk": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 32,
}
TINY = SMALL | {"vocab_size": 130, "eos_token_id": 129, "bos_token_id": 128}
# Prompts exceed the original context several times, so that queries have several factors.
YARN_OF_MISTRAL = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
MINISTRAL3 = TINY | {"num_hidden_layers": 2, "head_dim": 12, "rope_parameters": YARN_OF_MISTRAL}
# A tower of images, which the text model never reads.
TOWER = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2} | {
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}
QWEN3_VL = TINY | {
    "num_hidden_layers": 2,
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}
# Other heads, and another rotation, in layers without windows.
GEMMA4 = TINY | {
    "head_dim": 12,
    "global_head_dim": 20,
    "final_logit_softcapping": 9.0,
    "sliding_window": 9,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.4,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GLM_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    },
}
# Not the factors that the sizes would give.
GRANITE = TINY | {
    "pad_token_id": 0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
# A state is neither square nor as large as a head; an expert is as wide as `intermediate_size`.
GRANITE_HYBRID = GRANITE | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "shared_intermediate_size": 24,
    "intermediate_size": 16,
    "tie_word_embeddings": True,
}
NEMOTRON_H = {name: TINY[name] for name in TINY if name != "num_hidden_layers"} | {
    "head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 10,
    "n_groups": 4,
    "rescale_prenorm_residual": False,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            **COMMON,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON,
            head_dim=32,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    # Dense layers between layers with experts: a period of two, twice, and then three dense layers.
    "qwen3_moe_mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON | {"num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 48},
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[5],
            tie_word_embeddings=False,
        ),
    ),
    # Windows shorter than the prompt, from here on.
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**SMALL, num_hidden_layers=2, head_dim=16, sliding_window=11),
    ),
    "qwen2_windows": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SMALL,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    # A period of three, twice, and then two layers with windows.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SMALL,
            num_hidden_layers=8,
            head_dim=16,
            sliding_window=10,
            sliding_window_pattern=3,
            query_pre_attn_scalar=20,
            final_logit_softcapping=9.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**GPT_OSS | {"intermediate_size": 32})),
    "gpt_oss_mxfp4": (GptOssForCausalLM, GptOssConfig(**GPT_OSS | {"intermediate_size": 64})),
    # Recurrences, from here on: a period of four, twice.
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**HYBRID | SHARED_EXPERT | {"num_hidden_layers": 8}),
    ),
    # A convolution of another size, and a scan segment that is not a whole period.
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **HYBRID | {"num_hidden_layers": 5, "linear_conv_kernel_dim": 3},
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**HYBRID | SHARED_EXPERT)),
    # Models with latents follow. Here queries have no latent, as in V2-Lite.
    "deepseek_v2_lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **LATENTS,
            num_hidden_layers=3,
            q_lora_rank=None,
            first_k_dense_replace=1,
            n_routed_experts=5,
            n_shared_experts=2,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            rope_parameters=YARN,
        ),
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **LATENTS,
            num_hidden_layers=2,
            q_lora_rank=20,
            first_k_dense_replace=0,
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=2,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            routed_scaling_factor=4.0,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **LATENTS,
            num_hidden_layers=5,
            q_lora_rank=20,
            first_k_dense_replace=2,
            n_routed_experts=12,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    # One group, more experts than chips divide, one dense layer.
    "kimi_k2": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **LATENTS,
            num_hidden_layers=3,
            q_lora_rank=20,
            first_k_dense_replace=1,
            n_routed_experts=7,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            rms_norm_eps=1e-2,
            routed_scaling_factor=2.827,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    # Every third layer is not rotated, and the last period is not whole.
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(
            **TINY,
            num_hidden_layers=5,
            no_rope_layer_interval=3,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "seed_oss": (
        SeedOssForCausalLM,
        SeedOssConfig(
            **TINY | {"num_attention_heads": 6}, num_hidden_layers=2, head_dim=12, pad_token_id=0
        ),
    ),
    # Three of four pairs are rotated; the prompt exceeds the original context.
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(
            **TINY,
            num_hidden_layers=2,
            pad_token_id=0,
            tie_word_embeddings=True,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.2, 2.0, 5.0],
            },
        ),
    ),
    "phi3_window": (
        Phi3ForCausalLM,
        Phi3Config(
            **TINY | {"num_key_value_heads": 4},
            num_hidden_layers=2,
            pad_token_id=0,
            sliding_window=11,
        ),
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(
            **TINY,
            num_hidden_layers=6,
            sliding_window=10,
            pad_token_id=0,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 8.0,
                    "attention_factor": 1.2,
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **TINY,
            **GLM_EXPERTS,
            num_hidden_layers=3,
            head_dim=12,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=7,
        ),
    ),
    # Groups of experts; no biases and no norms, as in the Air models.
    "glm4_moe_groups": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **TINY,
            **GLM_EXPERTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            num_hidden_layers=4,
            head_dim=16,
            n_routed_experts=12,
        ),
    ),
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config(
            **TINY | {"intermediate_size": 16},
            num_hidden_layers=2,
            head_dim=12,
            num_local_experts=5,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        ),
    ),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig(
            **TINY,
            num_hidden_layers=3,
            head_dim=12,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config(**MINISTRAL3, pad_token_id=0)),
    # The same in a multimodal model.
    "mistral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config={"model_type": "ministral3", "pad_token_id": 0} | MINISTRAL3,
            vision_config={"model_type": "pixtral", "patch_size": 2, "image_size": 8, "head_dim": 4}
            | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
            | {"num_attention_heads": 2},
            tie_word_embeddings=False,
        ),
    ),
    "mistral4": (
        Mistral4ForCausalLM,
        Mistral4Config(
            **LATENTS | TINY | {"num_key_value_heads": 4},
            num_hidden_layers=3,
            q_lora_rank=20,
            first_k_dense_replace=1,
            n_routed_experts=12,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            pad_token_id=0,
            rope_parameters=dict(YARN_OF_MISTRAL),  # it is completed in place
        ),
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(text_config=QWEN3_VL, vision_config=TOWER, tie_word_embeddings=True),
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig(
            text_config=QWEN3_VL
            | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
            vision_config=TOWER,
            tie_word_embeddings=False,
        ),
    ),
    # Chunks shorter than the prompt, and as long as some pages; top-1 of experts' scaled inputs in
    # every second layer.
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **TINY,
            num_hidden_layers=5,
            head_dim=12,
            intermediate_size_mlp=40,
            num_local_experts=5,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            no_rope_layer_interval=3,
            attention_chunk_size=12,
            floor_scale=8,
            attn_scale=0.3,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    # Embeddings by layer; the last four layers read the caches of the second and of the third.
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **GEMMA4,
            num_hidden_layers=7,
            layer_types=["sliding_attention"] + ["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=4,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=130,
        ),
    ),
    # Experts; values are the keys of layers without windows.
    "gemma4_moe": (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config=GEMMA4
            | {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 5,
                "top_k_experts": 2,
                "moe_intermediate_size": 12,
            },
        ),
    ),
    # Attention to 16 tokens that an indexer chooses, of prompts of 45.
    "deepseek_v32": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config(
            **LATENTS | TINY | INDEXER,
            num_hidden_layers=4,
            first_k_dense_replace=1,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    # Neighbours are rotated together in the indexer, too.
    "glm_moe_dsa": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig(
            **LATENTS | TINY | INDEXER | {"index_n_heads": 11},
            num_hidden_layers=3,
            first_k_dense_replace=1,
            n_routed_experts=7,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **GRANITE,
            num_hidden_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "granite_moe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig(
            **GRANITE | {"intermediate_size": 16},
            num_hidden_layers=2,
            num_local_experts=5,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    # States and latents; forget rates by channel.
    "kimi_linear": (
        KimiLinearForCausalLM,
        KimiLinearConfig(
            **LATENTS | TINY | {"num_key_value_heads": 4, "pad_token_id": 0},
            num_hidden_layers=6,
            linear_attn_config={
                "head_dim": 10,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
                "kda_layers": [1, 2, 4, 5],
                "full_attn_layers": [3, 6],
            },
            first_k_dense_replace=1,
            num_local_experts=7,
            num_experts_per_tok=2,
            rms_norm_eps=1e-4,
        ),
    ),
    # State space models, from here on. One group, which chips share.
    "granite_hybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **GRANITE_HYBRID,
            num_hidden_layers=5,
            layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
            num_local_experts=5,
            num_experts_per_tok=2,
        ),
    ),
    # Two groups, a convolution of another size, no experts.
    "granite_hybrid_dense": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **GRANITE_HYBRID | {"mamba_n_groups": 2, "mamba_d_conv": 3},
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "mamba"],
            num_local_experts=0,
        ),
    ),
    # Layers of one kind each, of all four kinds.
    "nemotron_h": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **NEMOTRON_H,
            layers_block_type=["mamba", "moe", "attention", "mamba", "mlp", "moe", "mamba"],
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=24,
        ),
    ),
    # As published earlier: by a pattern, and with a dense layer first.
    "nemotron_h_dense": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **NEMOTRON_H | {"n_groups": 2},
            layers_block_type=["mlp", "mamba", "attention", "mlp", "mamba", "mlp"],
            conv_kernel=3,
        ),
    ),
    # Layers that reuse the choice of an earlier indexer, in no regular order; numbers that fill no
    # tile. With few heads many scores were 0, and equal.
    "glm_moe_dsa_reuse": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig(
            **LATENTS
            | TINY
            | INDEXER
            | {
                "index_n_heads": 13,
                "index_head_dim": 9,
                "index_topk": 13,
                "num_attention_heads": 6,
            },
            num_hidden_layers=7,
            indexer_types=["full", "shared", "full", "full", "shared", "shared", "shared"],
            first_k_dense_replace=2,
            n_routed_experts=6,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
    ),
}


# Their norms multiply by 1 + weight.
FROM_ZERO = (Gemma3ForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM)


def randomise(model: PreTrainedModel) -> None:
    """Give norms and biases random values too, so that tests detect if they are unused.

    Recurrences forget slowly enough that a prompt's first tokens matter at its end.
    """
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            from_zero = isinstance(model, FROM_ZERO) and "linear_attn.norm" not in name
            is_factor = "norm" in name and not from_zero
            centre = 1.0 if is_factor else 0.0
            weight.data = centre + 0.3 * torch.randn_like(weight)
        if name.endswith("sinks"):
            weight.data = torch.randn_like(weight)
        if name.endswith(("mixer.D", "mamba.D")):
            weight.data = torch.randn_like(weight)
        if name.endswith("A_log"):
            weight.data = torch.empty_like(weight).uniform_(0.005, 0.2).log()
        if name.endswith(("router.scale", "router.per_expert_scale")):
            weight.data = torch.empty_like(weight).uniform_(0.5, 2.0)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))


def packed_experts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return random MXFP4 for the experts' matrices, and give the model its values."""
    tensors = {}
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, dtype=torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors


def save_packed(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    """Replace the experts in a saved model by the packed tensors."""
    replaced = {name.rsplit("_", 1)[0] for name in packed}
    file, config = folder / "model.safetensors", folder / "config.json"
    kept = {name: own for name, own in load_file(file).items() if name not in replaced}
    save_file(kept | packed, file, metadata={"format": "pt"})
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantization, indent=2) + "\n")


@torch.no_grad()
def make(folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> None:
    torch.manual_seed(seed)
    model = kind(config).eval().float()
    randomise(model)
    packed = packed_experts(model) if folder.name.endswith("mxfp4") else {}
    model.save_pretrained(folder)
    if packed:
        save_packed(folder, packed)
    (folder / "model.safetensors").chmod(0o644)
    write_continuation(model, PROMPT_TOKENS, folder / "golden.npz")
    if kind is Qwen3ForCausalLM:
        write_embeddings(model, folder / "embeddings.npz")
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        write_continuation(model, LONG_PROMPT_TOKENS, folder / "long.npz")


def write_continuation(model: PreTrainedModel, num_tokens: int, file: Path) -> None:
    prompt = torch.randint(0, model.config.get_text_config().vocab_size, (num_tokens,))
    tokens, logits = prompt, []
    for _ in range(GREEDY_TOKENS):
        all_logits = model(tokens[None]).logits[0].float()
        logits.append(all_logits[-1])
        tokens = torch.cat([tokens, all_logits[-1].argmax()[None]])
    np.savez_compressed(
        file,
        prompt=prompt.numpy().astype(np.int32),
        prompt_logits=model(prompt[None]).logits[0, -PROMPT_TOKENS:].float().numpy(),
        greedy=tokens[num_tokens:].numpy().astype(np.int32),
        greedy_logits=torch.stack(logits).numpy(),
    )


@torch.no_grad()
def write_embeddings(model: PreTrainedModel, file: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    lens = (1, 16, 45, 61)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in lens]
    states = [model.model(prompt[None]).last_hidden_state[0, -1].float() for prompt in prompts]
    np.savez_compressed(
        file,
        prompts=torch.cat(prompts).numpy().astype(np.int32),
        lens=np.array(lens),
        embeddings=torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy(),
    )


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or MODELS
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        if name in names:
            make(root / name, kind, config, seed)


if __name__ == "__main__":
    main()
