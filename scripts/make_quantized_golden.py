"""Make tests/golden/quantized: tiny quantized models as public tools write them, and their outputs.

Needs torch, transformers and compressed-tensors (never dependencies of the package):

    python scripts/make_quantized_golden.py tests/golden/quantized [NAME ...]

For each name of SCHEMES, or those named, it writes a Hugging Face folder and `golden.npz` with the
fields of make_golden.py, in float32, of a model that computes in float64. Its matrices are those
that the tensors stand for, and its modules' inputs are quantized where the scheme quantizes
activations: rounded to the nearest number, ties to the even one.

A token's int8 scale is its largest magnitude over 127, as in serving engines. In compressed-tensors
it is over 127.5, which puts that largest number on the boundary of two roundings, so that float32
and float64 disagree by a step. The block-scaled fp8 reference does not quantize activations, and
that of `ct_fp8_kv_scales` does not round its cache.

It prints each folder's tensors of the first layer (and first expert), and the largest difference of
the prompt's logits in float32, and of the logits of transformers' loader where it has one.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from make_golden import COMMON, PROMPT_TOKENS, randomise, write_continuation
from quantized_formats import (
    FP8_MAX,
    Tensors,
    decode_awq,
    decode_blocks,
    decode_gptq,
    decode_packed,
    decode_plain,
    encode_awq,
    encode_blocks,
    encode_compressed,
    encode_gptq,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

GROUP = 32
SIZES = COMMON | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
dense = partial(Qwen3Config, **SIZES)
moe = partial(Qwen3MoeConfig, norm_topk_prob=True, **SIZES | EXPERTS)
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
MOE_GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(SIZES["num_hidden_layers"])]


class Scheme(NamedTuple):
    config: PretrainedConfig
    quantization: dict[str, Any]
    encode: Callable[[str, torch.Tensor], Tensors]  # of a module's name and matrix
    decode: Callable[[Tensors], torch.Tensor]
    ignored: tuple[str, ...] = ("lm_head",)
    activations: QuantizationArgs | None = None
    dtype: torch.dtype = torch.bfloat16  # of unquantized tensors
    loads: bool = False  # transformers can load the folder on a CPU


def compressed(
    config: PretrainedConfig,
    storage: str,
    weights: QuantizationArgs,
    activations: QuantizationArgs | None = None,
    ignored: tuple[str, ...] = ("lm_head",),
    kv_cache: QuantizationArgs | None = None,
) -> Scheme:
    own = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations, format=storage
    )
    if config.model_type == "qwen3_moe":
        ignored = (*MOE_GATES, *ignored)
    quantization = QuantizationConfig(
        config_groups={"group_0": own},
        format=storage,
        ignore=list(ignored),
        quantization_status="compressed",
        kv_cache_scheme=kv_cache,
    ).to_dict()
    written = {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}} | quantization
    # transformers 5.24 expects zeros of another shape, and unquantized experts.
    loads = weights.symmetric and config.model_type == "qwen3"
    return Scheme(
        config,
        written,
        lambda _, weight: encode_compressed(weight, own),
        decode_packed if storage == "pack-quantized" else decode_plain,
        ignored,
        activations,
        loads=loads,
    )


def int4(group: int, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, group_size=group, symmetric=symmetric, strategy="group")


def blocks(config: PretrainedConfig, quantization: dict[str, Any]) -> Scheme:
    ignored = tuple(quantization.get("modules_to_not_convert", ("lm_head",)))
    return Scheme(
        config, quantization, lambda _, weight: encode_blocks(weight), decode_blocks, ignored
    )


def in_order(_: str, size: int) -> torch.Tensor:
    return torch.arange(size) // GROUP


def act_order(module: str, size: int) -> torch.Tensor:
    """Return groups of rows by importance, equal for modules that read the same input."""
    layer = int(re.findall(r"layers\.(\d+)", module)[0])
    reads = {"o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    seed = 4 * layer + reads.get(module.rsplit(".", 1)[1], 0)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return order // GROUP


def gptq(
    quantization: dict[str, Any],
    group_of: Callable[[str, int], torch.Tensor] = in_order,
) -> Scheme:
    def encode(module: str, weight: torch.Tensor) -> Tensors:
        own = group_of(module, weight.shape[1])
        return encode_gptq(weight, own, quantization["sym"])

    whole = {"bits": 4, "group_size": GROUP, "quant_method": "gptq"} | quantization
    return Scheme(dense(), whole, encode, decode_gptq, dtype=torch.float16)


def awq(module: str, weight: torch.Tensor) -> Tensors:
    return encode_awq(weight, in_order(module, weight.shape[1]))


INT8 = QuantizationArgs(num_bits=8, strategy="channel")
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
FP8_TENSOR = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
INT8_TOKEN = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
FP8_TOKEN = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
# GPTQModel's; AutoGPTQ's have other fields.
GPTQ_MODEL = {
    "checkpoint_format": "gptq",
    "lm_head": False,
    "meta": {
        "damp_auto_increment": 0.0025,
        "damp_percent": 0.01,
        "mse": 0.0,
        "quantizer": ["gptqmodel:2.2.0"],
        "static_groups": False,
        "true_sequential": True,
        "uri": "https://github.com/modelcloud/gptqmodel",
    },
    "pack_dtype": "int32",
}
AUTO_GPTQ = {
    "damp_percent": 0.01,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "static_groups": False,
    "true_sequential": True,
}
AWQ = {
    "bits": 4,
    "group_size": GROUP,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
# Two blocks and three, the last of each cut; those of experts one and two.
BLOCK_SIZES = {"hidden_size": 160, "intermediate_size": 320}
EXPERT_BLOCK_SIZES = {"hidden_size": 96, "moe_intermediate_size": 160}
WRITTEN_BY_TRANSFORMERS = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
WRITTEN_BY_QWEN = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", *MOE_GATES],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WRITTEN_BY_DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# Blocks are cut by the ends of both latents, and span the rows of two heads.
LATENTS = {
    "head_dim": 8,
    "kv_lora_rank": 160,
    "q_lora_rank": 136,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 48,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 160,
}
DOWN_OF_LAST = r"re:.*layers\.1\.mlp\.down_proj"

SCHEMES: dict[str, Scheme] = {
    "ct_int8_weight_only": compressed(dense(), "int-quantized", INT8),
    "ct_int8_dynamic": compressed(dense(), "int-quantized", INT8, INT8_TOKEN),
    "ct_int8_mixed": compressed(dense(), "int-quantized", INT8, ignored=("lm_head", DOWN_OF_LAST)),
    "ct_fp8_dynamic": compressed(dense(), "float-quantized", FP8, FP8_TOKEN),
    "ct_fp8_static": compressed(dense(), "float-quantized", FP8_TENSOR, FP8_TENSOR),
    "ct_fp8_kv_scales": compressed(dense(), "float-quantized", FP8, FP8_TOKEN, kv_cache=FP8_TENSOR),
    "fp8_block": blocks(dense(**BLOCK_SIZES), WRITTEN_BY_TRANSFORMERS),
    "ct_int4_group32": compressed(dense(), "pack-quantized", int4(32)),
    "ct_int4_group128": compressed(
        dense(intermediate_size=256, head_dim=64), "pack-quantized", int4(128)
    ),
    "ct_int4_asymmetric_group32": compressed(dense(), "pack-quantized", int4(32, False)),
    "awq_group32": Scheme(dense(), AWQ, awq, decode_awq, dtype=torch.float16),
    "gptq_group32": gptq(AUTO_GPTQ | {"desc_act": False, "sym": True}),
    "gptq_act_order_group32": gptq(GPTQ_MODEL | {"desc_act": True, "sym": True}, act_order),
    "gptq_asymmetric_group32": gptq(GPTQ_MODEL | {"desc_act": False, "sym": False}),
    "moe_ct_int8_weight_only": compressed(moe(), "int-quantized", INT8),
    "moe_fp8_block": blocks(moe(**EXPERT_BLOCK_SIZES), WRITTEN_BY_QWEN),
    "moe_ct_int4_group32": compressed(moe(), "pack-quantized", int4(32)),
    "latent_fp8_block": blocks(
        DeepseekV3Config(**SIZES | LATENTS | {"num_key_value_heads": 4}), WRITTEN_BY_DEEPSEEK
    ),
}
# No input is within two millionths of a boundary of two fp8 roundings: float32 rounds alike.
SEEDS = {"ct_fp8_dynamic": 123, "ct_fp8_kv_scales": 146}


def is_quantized(name: str, scheme: Scheme) -> bool:
    """Return whether `name` is the matrix of a module that the scheme quantizes."""
    if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
        return False
    module = name.removesuffix(".weight")
    patterns = [own.removeprefix("re:") for own in scheme.ignored if own.startswith("re:")]
    return module not in scheme.ignored and not any(re.match(own, module) for own in patterns)


def encode_all(model: PreTrainedModel, scheme: Scheme) -> tuple[Tensors, Tensors]:
    """Return the checkpoint's tensors, and the model's tensors that they stand for, in float64."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plain = load_file(Path(folder) / "model.safetensors")
    stored, meant = {}, {}
    for name, weight in plain.items():
        if is_quantized(name, scheme):
            module = name.removesuffix(".weight")
            tensors = scheme.encode(module, weight)
            stored |= {f"{module}.{last}": own.contiguous() for last, own in tensors.items()}
            meant[name] = scheme.decode(tensors)
            # An encoder that misplaces a number is far off; one of 4 bits errs by half a step.
            assert (meant[name] - weight).abs().max() < 0.08 * weight.abs().max() + 1e-3
        else:
            stored[name] = weight.to(scheme.dtype)
            meant[name] = stored[name].double()
    return stored, meant


def input_scales(model: PreTrainedModel) -> Tensors:
    """Return static scales, [1] in bfloat16, of the inputs in one run."""
    largest: dict[str, torch.Tensor] = {}

    def observe(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        largest[name] = inputs[0].abs().max()

    hooks = [
        module.register_forward_pre_hook(partial(observe, name))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    model(torch.randint(0, SIZES["vocab_size"], (1, 64)))
    for hook in hooks:
        hook.remove()
    # A little too small, so that some inputs of the golden prompt are clamped.
    return {
        f"{name}.input_scale": (0.8 * own / FP8_MAX).bfloat16()[None]
        for name, own in largest.items()
    }


def cache_scales(num_layers: int) -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.{own}_scale": torch.tensor(
            [value * (1 + layer)]
        ).bfloat16()
        for layer in range(num_layers)
        for own, value in (("k", 0.02), ("v", 0.005))
    }


def quantize_inputs(model: PreTrainedModel, scheme: Scheme, stored: Tensors) -> None:
    """Round every quantized module's input to a token's scale or to the stored one."""
    args = scheme.activations
    largest = FP8_MAX if args.type == "float" else 127

    def rounded(scale: torch.Tensor | None, _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> Any:
        (x,) = inputs
        if args.dynamic:
            scale = x.abs().amax(-1, keepdim=True) / largest
        if args.type == "float":
            values = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)
        else:
            values = (x / scale).round().clamp(-128, 127)
        return (values * scale,)

    for name, module in model.named_modules():
        if is_quantized(f"{name}.weight", scheme):
            scale = None if args.dynamic else stored[f"{name}.input_scale"].to(model.dtype)
            module.register_forward_pre_hook(partial(rounded, scale))


def wide_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm without transformers' narrowing to float32."""
    mean = x.pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))


def reference(
    scheme: Scheme, stored: Tensors, meant: Tensors, dtype: torch.dtype
) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        save_file(meant, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        scheme.config.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        ).eval()
    if scheme.activations is not None:
        quantize_inputs(model, scheme, stored)
    return model


def save(folder: Path, scheme: Scheme, stored: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads(scheme.config.to_json_string()) | {
        "architectures": [ARCHITECTURES[scheme.config.model_type]],
        "dtype": str(scheme.dtype).removeprefix("torch."),
        "quantization_config": scheme.quantization,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")


def report(folder: Path, stored: Tensors) -> None:
    print(f"== {folder.name}")
    for name, own in sorted(stored.items()):
        if not re.search(r"layers\.[1-9]|experts\.[1-9]", name):
            print(f"  {name}  {str(own.dtype).removeprefix('torch.')} {list(own.shape)}")


def compare(folder: Path, name: str, model: PreTrainedModel) -> None:
    golden = np.load(folder / "golden.npz")
    prompt = torch.from_numpy(golden["prompt"].astype(np.int64))
    logits = model(prompt[None]).logits[0, -PROMPT_TOKENS:].float().numpy()
    error = np.abs(logits - golden["prompt_logits"])
    print(f"  # {name}: difference {error.max():.2e} at most, {error.mean():.2e} on average")


@torch.no_grad()
def make(folder: Path, scheme: Scheme, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(scheme.config).eval().float()
    randomise(model)
    stored, meant = encode_all(model, scheme)
    if scheme.activations is not None and not scheme.activations.dynamic:
        stored |= input_scales(model)
    if scheme.quantization.get("kv_cache_scheme"):
        stored |= cache_scales(scheme.config.num_hidden_layers)
    save(folder, scheme, stored)
    report(folder, stored)
    build = partial(reference, scheme, stored, meant)
    torch.manual_seed(seed)
    write_continuation(build(torch.float64), PROMPT_TOKENS, folder / "golden.npz")
    compare(folder, "float32", build(torch.float32))
    if scheme.loads:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        compare(folder, "transformers", loaded.eval())


def main() -> None:
    Qwen3RMSNorm.forward = Qwen3MoeRMSNorm.forward = DeepseekV3RMSNorm.forward = wide_norm
    root, names = Path(sys.argv[1]), sys.argv[2:] or SCHEMES
    for seed, (name, scheme) in enumerate(SCHEMES.items()):
        if name in names:
            make(root / name, scheme, SEEDS.get(name, seed))


if __name__ == "__main__":
    main()
