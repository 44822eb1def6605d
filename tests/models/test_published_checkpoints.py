"""Folders as they are published give the logits of the float64 reference (see `scripts`): with
heads, files, targets and lists of modules that config.json states wrongly or in part.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.quantized_folder import QUANTIZED, changed_copy, read_tensors
from tests.models.golden_server import GOLDEN, Chunk, Server, golden
from tests.support.long import long

TOLERANCE = 1e-3  # of the logits' range, as in `test_quantized_golden`
LAYERS, GROUP = 2, 32


def assert_logits_of(name, folder):
    """Assert the golden logits of `name` for the prompt and for the tokens after it."""
    data, server = golden(name), Server(folder)
    prompt, expected = data["prompt"], data["prompt_logits"]
    allowed = TOLERANCE * np.ptp(expected)
    (logits,) = server.step([[Chunk(0, 0, prompt)]], 0)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=allowed)
    for step, token in enumerate(data["greedy"][:-1]):
        (logits,) = server.step([[Chunk(0, len(prompt) + step, np.array([token]))]], 1)
        np.testing.assert_allclose(logits, data["greedy_logits"][[step + 1]], rtol=0, atol=allowed)


@pytest.fixture
def llama(tmp_path):
    """A writable copy of a model with a head of its own, and its tensors."""
    folder = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llama", folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_files_next_to_model_safetensors_are_not_read(llama, name):
    folder, tensors = llama
    others = {f"base_model.{own}": tensor for own, tensor in tensors.items()}
    save_file(others | {"layers.0.wq.weight": np.zeros((4, 4), np.float32)}, folder / name)
    assert_logits_of("llama", folder)


def test_without_an_index_the_shards_are_read_and_no_other_file(llama):
    folder, tensors = llama
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file(
        {"layers.0.wq.weight": np.zeros((4, 4), np.float32)}, folder / "consolidated.safetensors"
    )
    assert_logits_of("llama", folder)


def test_experts_of_a_qwen3_vl_may_have_rows_of_inputs(tmp_path):
    folder = tmp_path / "qwen3_vl_moe"
    shutil.copytree(GOLDEN / "qwen3_vl_moe", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, folder / "model.safetensors")
    assert_logits_of("qwen3_vl_moe", folder)


@pytest.mark.long
def test_the_text_model_of_a_multimodal_llama_4_is_read(tmp_path):
    folder = tmp_path / "llama4"
    shutil.copytree(GOLDEN / "llama4", folder)
    tensors = load_file(folder / "model.safetensors")
    vision = {"vision_model.class_embedding": np.zeros(8, np.float32)}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | vision, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole | {"model_type": "llama4"}))
    assert_logits_of("llama4", folder)


def scheme(targets, num_bits, layout, **fields):
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    return {"targets": targets, "weights": weights | fields, "format": layout}


def unpacked(words, axis):
    """Values 0 to 15 of int32 words along `axis`, the lowest bits first."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    values = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    return np.moveaxis(values.reshape(*words.shape[:-1], -1), -1, axis)


@pytest.mark.parametrize("order", [-1, *long(1)])
@pytest.mark.parametrize(
    "targets",
    [["re:.*down_proj"], *long([f"model.layers.{n}.mlp.down_proj" for n in range(LAYERS)])],
)
def test_a_scheme_of_named_modules_wins_over_that_of_all(tmp_path, targets, order):
    changed = {}
    tensors = read_tensors(QUANTIZED / "ct_int4_group32")
    for module in (f"model.layers.{n}.mlp.down_proj" for n in range(LAYERS)):
        values = unpacked(tensors[f"{module}.weight_packed"], 1).astype(np.int8) - 8
        changed[f"{module}.weight"] = values
        changed |= {f"{module}.{part}": None for part in ("weight_packed", "weight_shape")}
    group = {"strategy": "group", "group_size": GROUP}
    groups = [
        scheme(["Linear"], 4, "pack-quantized", **group),
        scheme(targets, 8, "int-quantized", **group),
    ][::order]
    named = {f"group_{number}": own for number, own in enumerate(groups)}
    config = {"config_groups": named, "format": "mixed-precision"}
    folder = changed_copy(tmp_path / "mixed", "ct_int4_group32", changed, config)
    assert_logits_of("quantized/ct_int4_group32", folder)


def test_of_schemes_stored_alike_the_one_of_the_names_applies(tmp_path):
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    groups = {
        "group_0": scheme(["Linear"], 8, "int-quantized") | {"input_activations": token},
        "group_1": scheme(["re:.*_proj$"], 8, "int-quantized"),
    }
    folder = changed_copy(
        tmp_path / "alike", "ct_int8_weight_only", config={"config_groups": groups}
    )
    assert_logits_of("quantized/ct_int8_weight_only", folder)


def dequantized_gptq(tensors, module):
    """The matrix [out, in] of a module of symmetric GPTQ, in float64."""
    values = unpacked(tensors[f"{module}.qweight"], 0).astype(np.float64)
    zeros = unpacked(tensors[f"{module}.qzeros"], 1).astype(np.float64) + 1
    groups = tensors[f"{module}.g_idx"]
    scales = tensors[f"{module}.scales"].astype(np.float64)
    return ((values - zeros[groups]) * scales[groups]).T


MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ATTENTION = [f"self_attn.{x}_proj" for x in "qkvo"]


@pytest.mark.parametrize(
    ("config", "floats"),
    [
        ({"modules_in_block_to_quantize": [MLP[:2], MLP[2:]]}, ATTENTION),
        ({"modules_in_block_to_quantize": [*ATTENTION, "mlp.down_proj"]}, MLP[:2]),
        ({"dynamic": {"lm_head": {}, "-:.*attn.*": {}}}, ATTENTION),
        (
            {
                "modules_in_block_to_quantize": [ATTENTION[:3], MLP],
                "dynamic": {"+:.*down_proj": {}, "-:model.layers.*(gate|up|down)_proj": {}},
            },
            ["self_attn.o_proj", *MLP[:2]],
        ),
    ],
)
def test_modules_that_gptq_leaves_out_are_floats(tmp_path, config, floats):
    tensors = read_tensors(QUANTIZED / "gptq_group32")
    changed = {}
    for module in (f"model.layers.{n}.{own}" for n in range(LAYERS) for own in floats):
        changed[f"{module}.weight"] = dequantized_gptq(tensors, module).astype(np.float32)
        parts = ("qweight", "qzeros", "scales", "g_idx")
        changed |= {f"{module}.{part}": None for part in parts}
    folder = changed_copy(tmp_path / "partial", "gptq_group32", changed, config)
    assert_logits_of("quantized/gptq_group32", folder)


def tie(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def test_a_stored_head_that_is_not_the_embeddings_makes_the_logits(llama, caplog):
    folder, tensors = llama
    assert not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tie(folder)
    assert_logits_of("llama", folder)
    assert "lm_head.weight" in caplog.text
