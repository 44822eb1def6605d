"""Make the golden data of tests/golden/vision: tiny random models with images in transformers.

Needs torch and transformers (never a dependency of the package):

    python scripts/make_vision_golden.py tests/golden/vision [NAME ...]

For each model, or those named, it writes a Hugging Face folder and `golden.npz` with, in float32,
    pixels_I [h, w, 3]       image I, uint8
    vectors_I [n, width]     the vector of each of its tokens, then those added after layers
and for each chat of `CHATS`
    CHAT_prompt [n]          token ids, with a placeholder for each token of an image
    CHAT_images [m]          the images in the prompt
    CHAT_greedy [k]          the tokens that greedy decoding appends
    CHAT_logits [k, V]       the logits from which each of them was chosen
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from make_golden import GEMMA4, HYBRID, SHARED_EXPERT, randomise
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

GREEDY_TOKENS = 12
_OF_TOWERS = ("visual.", "vision_tower.", "embed_vision.", "multi_modal_projector.")
IMAGE, START, END, VIDEO = 240, 241, 242, 243
TOKENS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": VIDEO,
}
PATCH, MERGE = 4, 2
# Sides in patches; wide, high, and the size of the learned grid.
IMAGES = ((4, 10), (12, 6), (6, 6))
# Texts of so many tokens, and images by number between them.
CHATS = {
    "single": (9, 0, 14),
    "several": (5, 1, 3, 0, 11, 2, 8),
    "second": (9, 0, 14, "answer", 10, 2, 6),  # continues the first
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 36,
    "out_hidden_size": 32,
}
TEXT = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 249,
    "bos_token_id": 248,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID_TEXT = HYBRID | {
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}
DEEP = {"deepstack_visual_indexes": [0, 2]}
GEMMA3 = TEXT | {
    "num_hidden_layers": 4,
    "sliding_window": 6,  # less than an image
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SIGLIP = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": 6 * PATCH,
    "vision_use_head": False,
}
GEMMA4_TEXT = GEMMA4 | {
    **{name: TEXT[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")},
    "max_position_embeddings": 512,
}
GEMMA4_TOWER = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": PATCH,
    "pooling_kernel_size": 3,
    "position_embedding_size": 20,
}
GEMMA_TOKENS = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END}
MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config=dict(TEXT), vision_config=TOWER | DEEP, tie_word_embeddings=True, **TOKENS
        ),
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig(
            text_config=TEXT | MOE,
            vision_config=TOWER | DEEP,
            tie_word_embeddings=False,
            **TOKENS,
        ),
    ),
    "qwen3_5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config=dict(HYBRID_TEXT), vision_config=TOWER, tie_word_embeddings=False, **TOKENS
        ),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig(
            text_config=HYBRID_TEXT | SHARED_EXPERT,
            vision_config=TOWER,
            tie_word_embeddings=False,
            **TOKENS,
        ),
    ),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=dict(GEMMA3),
            vision_config=SIGLIP,
            mm_tokens_per_image=9,
            tie_word_embeddings=True,
            **GEMMA_TOKENS,
        ),
    ),
    # Embeddings by layer, shared caches; an image's tokens see no later ones.
    "gemma4": (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config=GEMMA4_TEXT
            | {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 6,
                "vocab_size_per_layer_input": 250,
                "pad_token_id": 7,
            },
            vision_config=GEMMA4_TOWER | {"use_clipped_linears": True},
            **GEMMA_TOKENS,
        ),
    ),
    "gemma4_moe": (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config=GEMMA4_TEXT
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 5,
                "top_k_experts": 2,
                "moe_intermediate_size": 12,
            },
            vision_config=GEMMA4_TOWER | {"standardize": True},
            **GEMMA_TOKENS,
        ),
    ),
}
PREPROCESSOR = {
    "size": {"shortest_edge": 64, "longest_edge": 65536},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


GEMMA3_IMAGES = {
    "size": {"height": 6 * PATCH, "width": 6 * PATCH},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
    "image_processor_type": "Gemma3ImageProcessor",
    "do_pan_and_scan": None,
}


GEMMA4_IMAGES = {
    "max_soft_tokens": 12,
    "patch_size": PATCH,
    "pooling_kernel_size": 3,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "image_processor_type": "Gemma4ImageProcessor",
}


def normalized(pixels: np.ndarray, preprocessor: dict[str, Any]) -> torch.Tensor:
    """Return pixels [h, w, 3] as the processor does, [3, h, w]."""
    mean, std = (np.array(preprocessor[f"image_{name}"]) for name in ("mean", "std"))
    return torch.tensor((pixels / 255 - mean) / std, dtype=torch.float32).permute(2, 0, 1)


def patches_of(pixels: np.ndarray) -> torch.Tensor:
    """Return the normalized patches [N, 3 * 2 * PATCH * PATCH] in the order of tokens."""
    values = normalized(pixels, PREPROCESSOR)
    side, (rows, columns) = PATCH * MERGE, (n // (PATCH * MERGE) for n in pixels.shape[:2])
    assert (rows * side, columns * side) == pixels.shape[:2]
    cut = values.reshape(3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6)  # rows, columns, in the token, channels, in the patch
    frames = cut.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1)
    return frames.reshape(len(frames), -1)


def qwen_arguments(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    grids = [[1, h // PATCH, w // PATCH] for h, w, _ in (pixels.shape for pixels in images)]
    return {
        "pixel_values": torch.cat([patches_of(pixels) for pixels in images]),
        "image_grid_thw": torch.tensor(grids),
    }


def qwen_vectors(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    made = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
    return torch.cat([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])], -1)


def gemma3_arguments(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.stack([normalized(each, GEMMA3_IMAGES) for each in images])}


def gemma4_arguments(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    most = GEMMA4_IMAGES["max_soft_tokens"] * 9
    patches = torch.zeros(len(images), most, 3 * PATCH**2)
    places = torch.full((len(images), most, 2), -1)
    for number, pixels in enumerate(images):
        rows, columns = (n // PATCH for n in pixels.shape[:2])
        cut = torch.tensor(pixels / 255, dtype=torch.float32)
        cut = cut.reshape(rows, PATCH, columns, PATCH, 3).permute(0, 2, 1, 3, 4)
        patches[number, : rows * columns] = cut.reshape(rows * columns, -1)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[number, : rows * columns] = torch.stack([column, row], -1).reshape(-1, 2)
    return {"pixel_values": patches, "image_position_ids": places}


def gemma_vectors(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    made = model.model.get_image_features(**given, return_dict=True).pooler_output
    return made[0] if isinstance(made, list | tuple) else made.reshape(-1, made.shape[-1])


class Family(NamedTuple):
    """How a family's images are processed."""

    preprocessor: dict[str, Any]
    arguments: Callable[[list[np.ndarray]], dict[str, torch.Tensor]]
    vectors: Callable[[PreTrainedModel, dict[str, torch.Tensor]], torch.Tensor]
    types: str = "mm_token_type_ids"
    merge: int = MERGE
    images: tuple[tuple[int, int], ...] = IMAGES


QWEN = Family(PREPROCESSOR, qwen_arguments, qwen_vectors)
# Sides that the processor leaves as they are.
GEMMA4_FAMILY = Family(
    GEMMA4_IMAGES,
    gemma4_arguments,
    gemma_vectors,
    merge=3,
    images=((6, 18), (12, 9), (9, 9)),
)
FAMILIES = {
    "gemma4": GEMMA4_FAMILY,
    "gemma4_moe": GEMMA4_FAMILY,
    "gemma3": Family(
        GEMMA3_IMAGES, gemma3_arguments, gemma_vectors, "token_type_ids", 2, ((6, 6),) * 3
    ),
}


def randomise_tower(model: PreTrainedModel) -> None:
    """Give the tower's matrices and tables larger values than initial ones, which are constants in
    Gemma's, and so small in all that an image's tokens would hardly differ."""
    # Gemma 4's scores are not scaled down: larger values would add more rounding than variety.
    size = 0.1 if type(model) is Gemma4ForConditionalGeneration else 0.15
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and any(part in name for part in _OF_TOWERS):
            weight.data = size * torch.randn_like(weight)


@torch.no_grad()
def continued(
    model: PreTrainedModel, family: Family, prompt: list[int], images: list[np.ndarray]
) -> tuple[list[int], torch.Tensor]:
    tokens, logits, given = torch.tensor(prompt), [], family.arguments(images)
    for _ in range(GREEDY_TOKENS):
        kinds = (tokens == IMAGE).int()
        last = model(tokens[None], **{family.types: kinds[None]}, use_cache=False, **given)
        logits.append(last.logits[0, -1].float())
        tokens = torch.cat([tokens, logits[-1].argmax()[None]])
    return tokens[len(prompt) :].tolist(), torch.stack(logits)


@torch.no_grad()
def make(folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> None:
    family = FAMILIES.get(folder.name, QWEN)
    torch.manual_seed(seed)
    model = kind(config).eval().float()
    randomise(model)
    randomise_tower(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max", "std_bias", "std_scale")):
            sign = -1 if name.endswith("min") else 1
            buffer.copy_(sign * torch.empty_like(buffer).uniform_(0.5, 1.5))
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(family.preprocessor, indent=2) + "\n"
    )
    random = np.random.default_rng(seed)
    images = [
        random.integers(0, 256, (PATCH * rows, PATCH * columns, 3), np.uint8)
        for rows, columns in family.images
    ]
    saved: dict[str, np.ndarray] = {}
    for number, pixels in enumerate(images):
        saved[f"pixels_{number}"] = pixels
        saved[f"vectors_{number}"] = family.vectors(model, family.arguments([pixels])).numpy()
    answer: list[int] = []
    for name, parts in CHATS.items():
        prompt, used, texts = [], [], np.random.default_rng(seed + 100)  # chats begin alike
        is_text = True
        for part in parts:
            if part == "answer":
                prompt += answer
            elif is_text:
                prompt += texts.integers(1, IMAGE, part).tolist()
            else:
                height, width, _ = images[part].shape
                count = height * width // (PATCH * family.merge) ** 2
                prompt += [START, *[IMAGE] * count, END]
                used.append(part)
            is_text = part == "answer" or not is_text
        greedy, logits = continued(model, family, prompt, [images[number] for number in used])
        answer = greedy if name == "single" else answer
        saved[f"{name}_prompt"] = np.array(prompt, np.int32)
        saved[f"{name}_images"] = np.array(used, np.int32)
        saved[f"{name}_greedy"] = np.array(greedy, np.int32)
        saved[f"{name}_logits"] = logits.numpy()
    np.savez_compressed(folder / "golden.npz", **saved)


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or MODELS
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        if name in names:
            make(root / name, kind, config, seed)


if __name__ == "__main__":
    main()
