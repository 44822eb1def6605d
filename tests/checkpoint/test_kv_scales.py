"""KV scales, of a file and of a checkpoint: refused for another model, placed by head."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.kv_scales import ScalesByHead, read_kv_scales, write_kv_scales
from sgl_jax.checkpoint.loading import load_params
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model
from tests.checkpoint.quantized_folder import QUANTIZED, changed_copy, read_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
QWEN3 = ModelConfig.from_path(GOLDEN / "qwen3")  # two layers, two KV heads
BUILT = BuildOptions(jnp.float32, has_kv_scales=True)
SCALES = ScalesByHead(np.float32([[0.5, 1], [2, 4]]), np.float32([[8, 16], [32, 64]]))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "scales.json"
    write_kv_scales(path, SCALES, QWEN3)
    return path


def test_what_was_written_is_read(file):
    for read, written in zip(read_kv_scales(file, QWEN3), SCALES, strict=True):
        np.testing.assert_array_equal(read, written)


def test_scales_are_powers_of_two_that_leave_room_for_the_margin():
    absmax = np.array([[448.0, 449.0, 3.5, 0.0]])
    scales = ScalesByHead.fitting(absmax, absmax, margin=1.0)
    np.testing.assert_array_equal(scales.k, [[1.0, 2.0, 2.0**-7, 1.0]])
    assert (absmax * 2 / ScalesByHead.fitting(absmax, absmax, margin=2.0).v <= 448).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["model"].update(num_layers=3), "are for model .*'num_layers': 3"),
        (lambda content: content.update(kv_cache_dtype="int8"), "for kv_cache_dtype int8"),
        (lambda content: content.pop("k"), "is no file of KV scales"),
        (lambda content: content.update(v=[[1, 2]]), "one for each layer and KV head"),
        (lambda content: content.update(v=[[1, 2], [3]]), "is no file of KV scales"),
        (lambda content: content.update(v=[[1, 2], [3, 0]]), "must be above 0"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused_before_weights_are_read(
    change, words, file, tmp_path
):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(QWEN3, mesh, BUILT)
    with pytest.raises(CheckpointError, match=words):
        load_params(placed, tmp_path / "nowhere", "safetensors", kv_cache_scales=file)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read KV scales: .*nowhere"):
        read_kv_scales(tmp_path / "nowhere", QWEN3)
    (tmp_path / "text").write_text("scales")
    with pytest.raises(CheckpointError, match="is no file of KV scales"):
        read_kv_scales(tmp_path / "text", QWEN3)


def test_each_layer_has_its_own_scales_where_layers_are_unlike(tmp_path):
    config = ModelConfig.from_path(GOLDEN / "qwen3_moe_mixed")
    of_layers = np.exp2(np.arange(14, dtype=np.float32)).reshape(7, 2)
    write_kv_scales(tmp_path / "scales.json", ScalesByHead(of_layers, 2 * of_layers), config)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(config, mesh, BUILT)
    params = load_params(placed, "", "dummy", kv_cache_scales=tmp_path / "scales.json")
    for first, layers in (("0", [0, 2]), ("1", [1, 3]), ("4", [4, 5, 6])):
        own = params["layers"][first]["attention"]["kv_scales"]
        np.testing.assert_array_equal(own["k"], of_layers[layers])
        np.testing.assert_array_equal(own["v"], 2 * of_layers[layers])


@pytest.mark.parametrize(
    ("load_format", "tp"),
    [
        *(("safetensors", tp) for tp in (1, 2, 4)),
        ("dummy", 2),
        *(pytest.param("dummy", tp, marks=pytest.mark.long) for tp in (1, 4)),
    ],
)
def test_each_chip_has_the_scales_of_its_heads_and_of_their_copies(load_format, tp, file):
    mesh = Mesh(np.array(jax.devices()[:tp]).reshape(1, tp), ("data", "tensor"))
    placed = place_model(QWEN3, mesh, BUILT)
    params = load_params(placed, GOLDEN / "qwen3", load_format, kv_cache_scales=file)
    own = params["layers"]["0"]["attention"]["kv_scales"]
    for name, scales in SCALES._asdict().items():
        for shard in own[name].addressable_shards:
            chip = shard.device.id
            heads = [chip * 2 // tp] if tp > 1 else [0, 1]
            np.testing.assert_array_equal(shard.data, scales[:, heads])


STORED = QUANTIZED / "ct_fp8_kv_scales"


def load_quantized(folder, load_format="safetensors", **options):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
    placed = place_model(ModelConfig.from_path(folder), mesh, BUILT)
    params = load_params(placed, folder, load_format, **options)
    return params["layers"]["0"]["attention"]["kv_scales"]


def test_a_checkpoints_scales_serve_each_head_of_their_layer(tmp_path):
    tensors = read_tensors(STORED)
    convert(STORED, tmp_path / "orbax", "float32")
    for loaded in (load_quantized(STORED), load_quantized(tmp_path / "orbax", "orbax")):
        for kind in "kv":
            stored = [tensors[f"model.layers.{i}.self_attn.{kind}_scale"] for i in range(2)]
            expected = np.repeat(np.array(stored, np.float32), 2, axis=1)
            np.testing.assert_array_equal(loaded[kind], expected)


def test_scales_may_have_the_names_of_the_projections(tmp_path):
    """A checkpoint of Model Optimizer has the same parts, with these names."""
    tensors, renamed = read_tensors(STORED), {}
    for name in tensors:
        for kind in "kv":
            if name.endswith(own := f"self_attn.{kind}_scale"):
                module = name.removesuffix(own)
                renamed[f"{module}self_attn.{kind}_proj.{kind}_scale"] = tensors[name]
                renamed[name] = None
    folder = changed_copy(tmp_path / "model", "ct_fp8_kv_scales", renamed)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    loaded, expected = load_quantized(folder), load_quantized(STORED)
    for kind in "kv":
        np.testing.assert_array_equal(loaded[kind], expected[kind])


def test_a_file_of_scales_wins_over_the_checkpoints(tmp_path):
    config = ModelConfig.from_path(STORED)
    scales = ScalesByHead(np.full((2, 2), 4, np.float32), np.full((2, 2), 8, np.float32))
    write_kv_scales(tmp_path / "scales.json", scales, config)
    loaded = load_quantized(STORED, kv_cache_scales=tmp_path / "scales.json")
    np.testing.assert_array_equal(loaded["k"], scales.k)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, r"no tensor \*\.layers\.1\.self_attn\.v_scale"),
        (np.float32([0]), "v_scale must be one number above 0"),  # type: ignore[arg-type]
        (np.float32([1, 2]), "v_scale must be one number above 0"),  # type: ignore[arg-type]
        (np.float32(np.nan), "v_scale must be one number above 0"),
    ],
    ids=str,
)
def test_a_scale_of_a_checkpoint_that_is_missing_or_no_scale_is_named(stored, words, tmp_path):
    name = "model.layers.1.self_attn.v_scale"
    folder = changed_copy(tmp_path / "model", "ct_fp8_kv_scales", {name: stored})
    with pytest.raises(CheckpointError, match=words):
        load_quantized(folder)


def test_a_cache_of_another_type_leaves_the_checkpoints_scales_unread():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    built = BUILT._replace(has_kv_scales=False)
    placed = place_model(ModelConfig.from_path(STORED), mesh, built)
    params = load_params(placed, STORED, "safetensors")
    assert "kv_scales" not in params["layers"]["0"]["attention"]
