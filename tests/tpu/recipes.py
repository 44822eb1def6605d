"""Published recipes: a model, its quantization, a slice, a mesh, and the limits of a server.

The sources:

    tpu-recipes   github.com/AI-Hypercomputer/tpu-recipes, inference/{trillium,ironwood}/vLLM
    cookbook      github.com/sgl-project/sglang-jax, docs/cookbook/autoregressive
    vllm-tpu      docs.vllm.ai, supported models and hardware on TPU
    card          the model card of a published checkpoint, on a slice that has the memory for it

Recipes of the cookbook count all devices in `--tp-size`; here `tp` are those of a rank.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import sgl_jax.planner
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.served import served_config

PUBLISHED = Path(sgl_jax.planner.__file__).parent / "models"

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DENSE = (*_DENSE, "num_key_value_heads")
_MOE = ("hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads")
_MOE = (*_MOE, "num_key_value_heads", "num_experts")


def _sizes(names: tuple[str, ...], *values: int, **others: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True)) | others


# A model with a config in `sgl_jax/planner/models`, or that of another model with other sizes.
MODELS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "llama-3.2-1b": ("llama-3.1-8b", _sizes(_DENSE, 2048, 8192, 16, 32, 8, head_dim=64)),
    "llama-3.2-3b": ("llama-3.1-8b", _sizes(_DENSE, 3072, 8192, 28, 24, 8, head_dim=128)),
    "llama-3.1-405b": ("llama-3.1-8b", _sizes(_DENSE, 16384, 53248, 126, 128, 8, head_dim=128)),
    "mistral-7b": ("llama-3.1-8b", {"vocab_size": 32768}),
    "smollm2-1.7b": (
        "llama-3.1-8b",
        _sizes(_DENSE, 2048, 8192, 24, 32, 32, head_dim=64, vocab_size=49152),
    ),
    "qwen2.5-7b": (None, _QWEN2 | _sizes(_DENSE, 3584, 18944, 28, 28, 4)),
    "qwen2.5-32b": (None, _QWEN2 | _sizes(_DENSE, 5120, 27648, 64, 40, 8)),
    "qwen2.5-72b": (None, _QWEN2 | _sizes(_DENSE, 8192, 29568, 80, 64, 8)),
    "qwen3-0.6b": ("qwen3-8b", _sizes(_DENSE, 1024, 3072, 28, 16, 8, tie_word_embeddings=True)),
    "qwen3-1.7b": ("qwen3-8b", _sizes(_DENSE, 2048, 6144, 28, 16, 8, tie_word_embeddings=True)),
    "qwen3-4b": ("qwen3-8b", _sizes(_DENSE, 2560, 9728, 36, 32, 8, tie_word_embeddings=True)),
    "qwen3-14b": ("qwen3-8b", _sizes(_DENSE, 5120, 17408, 40, 40, 8)),
    "qwen3-235b-a22b": ("qwen3-30b-a3b", _sizes(_MOE, 4096, 1536, 94, 64, 4, 128)),
    "gemma-3-4b": ("gemma-3-27b", _sizes(_DENSE, 2560, 10240, 34, 8, 4, head_dim=256)),
    "gemma-3-12b": ("gemma-3-27b", _sizes(_DENSE, 3840, 15360, 48, 16, 8, head_dim=256)),
}
_CHANNELS: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_TOKENS: dict[str, Any] = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def _compressed(kind: str) -> dict[str, Any]:
    """8-bit weights by channel and activations by token, as Red Hat and Neural Magic publish."""
    form = {"int": "int-quantized", "float": "float-quantized"}[kind]
    group = {
        "targets": ["Linear"],
        "weights": _CHANNELS | {"type": kind, "dynamic": False},
        "input_activations": _TOKENS | {"type": kind},
    }
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


# The field `quantization_config` of published checkpoints.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "w8a8-int8": _compressed("int"),
    "w8a8-fp8": _compressed("float"),
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "zero_point": True,
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "static_groups": False,
    },
}


class Recipe(NamedTuple):
    """One recipe; `sizes` replace fields of the model's config."""

    source: str
    model: str
    topology: str
    tp: int
    dp: int = 1
    ep: int = 1
    checkpoint: str | None = None  # a key of `CHECKPOINTS`
    quantization: str = "none"  # done when the weights are loaded
    kv_cache_dtype: str = "auto"
    rows: int = 256  # of the whole mesh
    chunk: int = 2048
    context: int = 4096
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """A name for a test."""
        form = self.checkpoint or self.quantization
        return f"{self.model}-{form}-{self.topology}-dp{self.dp}-tp{self.tp}"

    @property
    def args(self) -> ServerArgs:
        return ServerArgs(
            model_path=self.model,
            tp_size=self.tp,
            dp_size=self.dp,
            ep_size=self.ep,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_running_requests=self.rows,
            chunked_prefill_size=self.chunk,
            context_length=self.context,
        )

    @property
    def config(self) -> ModelConfig:
        """The model as the engine would serve it."""
        return served_config(ModelConfig.from_dict(self.config_fields()), self.args)

    def config_fields(self) -> dict[str, Any]:
        base, sizes = MODELS.get(self.model, (self.model, {}))
        fields = {} if base is None else json.loads((PUBLISHED / f"{base}.json").read_text())
        text, sizes = fields.get("text_config"), sizes | dict(self.sizes)
        if text is None:
            fields |= sizes
        else:
            text.update(sizes)
        if "num_hidden_layers" in sizes:
            (fields if text is None else text).pop("layer_types", None)
        if self.checkpoint is not None:
            fields["quantization_config"] = CHECKPOINTS[self.checkpoint]
        return fields


RECIPES = (
    Recipe("vllm-tpu", "qwen3-0.6b", "v5e-1", 1, rows=128, chunk=1024),
    Recipe("vllm-tpu", "qwen3-1.7b", "v5e-1", 1, rows=128, chunk=1024),
    Recipe("vllm-tpu", "llama-3.2-1b", "v5e-1", 1, rows=128, chunk=1024),
    Recipe("vllm-tpu", "llama-3.1-8b", "v5e-4", 4, rows=128, chunk=1024),
    Recipe("card", "llama-3.1-8b", "v5e-1", 1, checkpoint="w8a8-int8", rows=64, chunk=1024),
    Recipe("card", "llama-3.1-8b", "v5e-1", 1, checkpoint="gptq", rows=64, chunk=1024),
    Recipe("card", "qwen2.5-7b", "v5e-4", 4, rows=128),
    Recipe("card", "qwen2.5-7b", "v5e-1", 1, checkpoint="awq", rows=64, chunk=1024),
    Recipe("card", "gemma-3-4b", "v5e-1", 1, rows=64, chunk=1024),
    Recipe("card", "smollm2-1.7b", "v5e-1", 1, rows=64, chunk=1024),
    Recipe("card", "gpt-oss-20b", "v5e-4", 4, rows=128),
    Recipe("card", "llama-3.3-70b", "v5e-8", 8, checkpoint="w8a8-int8"),
    Recipe("tpu-recipes", "llama-3.3-70b", "v6e-8", 8, chunk=512, context=2048),
    Recipe("tpu-recipes", "llama-3.1-8b", "v6e-1", 1, rows=128, chunk=1024, context=2048),
    Recipe("tpu-recipes", "qwen3-4b", "v6e-1", 1, rows=128, chunk=1024),
    Recipe("tpu-recipes", "qwen3-32b", "v6e-4", 4),
    Recipe("tpu-recipes", "qwen2.5-32b", "v6e-4", 4, rows=128),
    Recipe("cookbook", "qwen3-8b", "v6e-4", 4),
    Recipe("cookbook", "llama-3.1-8b", "v6e-4", 4, rows=64),
    Recipe("cookbook", "llama-3.3-70b", "v6e-16", 16),
    Recipe("cookbook", "qwen3-30b-a3b", "v6e-16", 16, ep=16),
    Recipe("cookbook", "deepseek-v2-lite", "v6e-4", 4, ep=4),
    Recipe("cookbook", "deepseek-v3", "v6e-64", 8, dp=8, ep=64, rows=64, chunk=1024),
    Recipe("vllm-tpu", "mistral-7b", "v6e-1", 1, rows=128),
    Recipe("vllm-tpu", "qwen2.5-72b", "v6e-8", 8),
    Recipe("card", "qwen3-14b", "v6e-1", 1, checkpoint="awq", rows=128),
    Recipe("card", "qwen3-32b", "v6e-4", 4, checkpoint="fp8-block"),
    Recipe("card", "llama-3.3-70b", "v6e-4", 4, checkpoint="w8a8-int8", rows=128),
    Recipe("card", "gemma-3-12b", "v6e-1", 1, rows=64),
    Recipe("card", "gemma-3-27b", "v6e-4", 4),
    Recipe("card", "gpt-oss-120b", "v6e-8", 8),
    Recipe("card", "qwen3-next-80b-a3b", "v6e-8", 8),
    Recipe("card", "qwen3.5-27b", "v6e-4", 4),
    Recipe("card", "llama-3.1-8b", "v5p-2", 1, checkpoint="w8a8-fp8"),
    Recipe("card", "qwen3-32b", "v5p-8", 4),
    Recipe("card", "llama-3.3-70b", "v5p-8", 4),
    Recipe("card", "gpt-oss-120b", "v5p-8", 4),
    Recipe("card", "qwen3-30b-a3b", "v5p-2", 1),
    Recipe("card", "qwen3-235b-a22b", "v5p-16", 8, ep=8),
    Recipe("card", "llama-3.1-405b", "v5p-16", 8, checkpoint="w8a8-int8", rows=64),
    Recipe(
        *("tpu-recipes", "qwen3-32b", "tpu7x-2", 2),
        quantization="w8a8_fp8",
        kv_cache_dtype="fp8_e4m3",
        rows=135,
        chunk=4096,
        context=9216,
    ),
    Recipe(
        *("tpu-recipes", "qwen3-coder-480b-a35b-fp8", "tpu7x-8", 8),
        ep=8,
        kv_cache_dtype="fp8_e4m3",
        rows=512,
        chunk=8192,
        context=10240,
    ),
    Recipe(
        *("tpu-recipes", "qwen3.5-397b-a17b-fp8", "tpu7x-8", 8),
        ep=8,
        rows=128,
        context=9216,
    ),
    Recipe(
        *("tpu-recipes", "gpt-oss-120b", "tpu7x-2", 2),
        kv_cache_dtype="fp8_e4m3",
        rows=1024,
        chunk=8192,
        context=9216,
    ),
    Recipe("cookbook", "llama-3.3-70b", "tpu7x-8", 8, context=32768),
    Recipe("cookbook", "qwen3-8b", "tpu7x-8", 8, context=32768),
    Recipe("cookbook", "qwen3-30b-a3b", "tpu7x-8", 8, ep=8, context=32768),
    Recipe(
        *("cookbook", "deepseek-v3", "tpu7x-32", 8),
        dp=4,
        ep=32,
        rows=128,
        chunk=1024,
        context=32768,
    ),
    Recipe("card", "qwen3.5-35b-a3b", "tpu7x-2", 2),
    Recipe("card", "kimi-k2", "tpu7x-32", 8, dp=4, ep=32, rows=128, chunk=1024),
)
