"""Families whose quantized checkpoints have other names and layouts than Qwen's and Llama's."""

import json
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoint.quantized_folder import read_tensors
from tests.checkpoint.test_quantized_loading import load
from tests.models.golden_server import GOLDEN
from tests.support.long import long_but

FP8 = ml_dtypes.float8_e4m3fn
BLOCK = 8


class Layout(NamedTuple):
    """A golden folder, and how a published checkpoint of its family is quantized."""

    family: str
    config: dict
    quantized: str  # a pattern of names of the matrices
    scales: str  # per "block", "output" or "matrix"
    suffixes: tuple[str, ...] = ("weight_scale_inv",)  # of the scales of matrices and of inputs
    splits_experts: bool = False  # a tensor for each expert's matrix, unlike the golden folder
    by_input: bool = False  # all experts' matrices as [experts, in, out], unlike the golden folder


def fp8(block, **fields):
    return {"quant_method": "fp8", "weight_block_size": block and [block, block]} | fields


def compressed(**fields):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    } | fields


LAYOUTS = [
    Layout(
        "minimax_m2",
        fp8(
            BLOCK,
            activation_scheme="dynamic",
            modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
        ),
        r"_proj\.weight|experts\.\d+\.w\d\.weight",
        "block",
    ),
    Layout(
        "llama4",
        compressed(ignore=["re:.*lm_head", "re:.*self_attn", "re:.*router"]),
        r"feed_forward.*_proj\.weight",
        "output",
        ("weight_scale",),
        splits_experts=True,
    ),
    Layout("phi3", compressed(ignore=["lm_head"]), r"_proj\.weight", "output", ("weight_scale",)),
    Layout(
        "qwen3_vl_moe",
        fp8(
            BLOCK // 2,
            activation_scheme="dynamic",
            modules_to_not_convert=["lm_head", "model.visual", "mlp.gate"],
        ),
        r"language_model.*(_proj\.weight|experts\.\w+_proj)",
        "block",
        by_input=True,
    ),
    Layout(
        "mistral3",
        fp8(
            None,
            activation_scheme="static",
            modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        ),
        r"layers.*_proj\.weight",
        "matrix",
        ("weight_scale_inv", "activation_scale"),
    ),
    Layout(
        "mistral4",
        fp8(None, activation_scheme="static", modules_to_not_convert=["lm_head"]),
        r"_proj(_with_mqa)?\.weight|experts\.\w+_proj",
        "matrix",
        ("weight_scale_inv", "activation_scale"),
    ),
]


def rounded(matrix, scales, block):
    """Values [..., out, in] in fp8, their scales, and the numbers that both are."""
    *outer, outputs, inputs = matrix.shape
    rows, columns = {"block": (block, block), "output": (1, inputs), "matrix": (outputs, inputs)}[
        scales
    ]
    blocks = matrix.reshape(*outer, outputs // rows, rows, inputs // columns, columns)
    factors = np.abs(blocks).max(axis=(-3, -1), keepdims=True) / 448
    values = (blocks / factors).astype(FP8)
    numbers = (values.astype(np.float32) * factors).reshape(matrix.shape)
    stored = factors.reshape(*outer, outputs // rows, inputs // columns)
    return values.reshape(matrix.shape), stored, numbers


def named(name, suffix):
    if name.endswith("weight"):
        return name.removesuffix("weight") + suffix
    return f"{name}_{suffix.removeprefix('weight_')}"


def by_expert(tensors):
    """A tensor for each matrix of each expert, in place of all experts' [experts, in, out]."""
    split = {}
    for name, tensor in tensors.items():
        own = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if own is None:
            split[name] = tensor
            continue
        parts = zip(("gate", "up"), np.split(tensor, 2, axis=2), strict=True)
        for kind, part in parts if own[2] == "gate_up" else [("down", tensor)]:
            for expert, matrix in enumerate(part):
                split[f"{own[1]}.{expert}.{kind}_proj.weight"] = matrix.T
    return split


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    return load(folder)


def numbers(params, path):
    """A quantized parameter as floats."""
    values, scales = (np.asarray(params[*path, own], np.float32) for own in ("values", "scales"))
    axis = -2 if values.ndim == 3 or path[-2] == "down" else -1
    if axis == -1:
        scales = scales.swapaxes(-2, -1)
    return values * scales.repeat(values.shape[axis] // scales.shape[axis], axis)


LAYOUT = {layout.family: layout for layout in LAYOUTS}


@pytest.mark.parametrize(
    "family", long_but(LAYOUT, "minimax_m2", "qwen3_vl_moe", "mistral3", "mistral4")
)
def test_a_published_layout_is_read(family, tmp_path):
    layout = LAYOUT[family]
    tensors = read_tensors(GOLDEN / layout.family)
    config = json.loads((GOLDEN / layout.family / "config.json").read_text())
    if layout.splits_experts:
        tensors = by_expert(tensors)
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        stored[name] = floats[name] = tensor
        if not re.search(f"({layout.quantized})$", name):
            continue
        block = (layout.config.get("weight_block_size") or [0])[0]
        values, scales, floats[name] = rounded(tensor, layout.scales, block)
        if layout.by_input and tensor.ndim == 3:
            values, scales = values.swapaxes(1, 2), scales.swapaxes(1, 2)
        if layout.scales == "matrix" and tensor.ndim == 2:
            scales = scales.reshape(())
        stored[name] = values
        stored |= {named(name, suffix): scales for suffix in layout.suffixes[:1]}
        inputs = np.full(tensor.shape[:-2], 0.5, np.float32)
        stored |= {named(name, suffix): inputs for suffix in layout.suffixes[1:]}
    expected = write(tmp_path / "floats", config, floats)
    params = write(tmp_path / "own", config | {"quantization_config": layout.config}, stored)
    quantized = expected.keys() - params.keys()
    assert quantized
    for path in quantized:
        np.testing.assert_allclose(numbers(params, path), expected[path], rtol=1e-6, err_msg=path)
    for path in expected.keys() & params.keys():  # floats, also of latents' projections
        np.testing.assert_allclose(params[path], expected[path], rtol=1e-6, err_msg=path)
    of_inputs = [params[path] for path in params if path[-1] == "input_scale"]
    assert bool(of_inputs) == (len(layout.suffixes) > 1)
    assert all((own == 0.5).all() for own in of_inputs)
