"""The weights and the config of a GGUF file are those of the folder that it was made from."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping
from gguf import GGMLQuantizationType
from jax.sharding import Mesh

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.engine.offline import Engine
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model
from sgl_jax.planner.arguments import read_config
from tests.checkpoint.gguf.gguf_files import golden_copy, write_gguf

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(file):
    return Path(model_folder(str(file)))


def load(folder, *, dp=1, tp=1, quantization="none", **options):
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "tensor"))
    config = ModelConfig.from_path(folder).quantized(quantization)
    placed = place_model(config, mesh, BuildOptions(jnp.float32))
    return flatten_mapping(load_params(placed, folder, detect_format(folder), **options))


def assert_same(actual, expected, family):
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        # A norm plus 1, minus 1.
        tolerance = 1e-7 if family == "gemma3" and array.ndim <= 2 else 0
        np.testing.assert_allclose(actual[path], array, rtol=0, atol=tolerance, err_msg=str(path))


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "Q8_0") for family in FAMILIES), *(("llama", kind) for kind in KINDS)],
)
def test_a_file_is_loaded_like_the_folder_with_its_numbers(tmp_path, family, kind):
    kind = GGMLQuantizationType[kind]
    folder = folder_of(write_gguf(family, tmp_path / "m.gguf", kind))
    wanted = golden_copy(family, tmp_path / "wanted", kind, {"eos_token_id": [249]})
    assert ModelConfig.from_path(folder) == ModelConfig.from_path(wanted)
    assert_same(load(folder), load(wanted), family)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_each_chip_reads_its_part(tmp_path, family):
    kind = GGMLQuantizationType.Q8_0
    folder = folder_of(write_gguf(family, tmp_path / "m.gguf", kind))
    wanted = golden_copy(family, tmp_path / "wanted", kind)
    assert_same(load(folder, dp=2, tp=2), load(wanted, dp=2, tp=2), family)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_file_is_quantized_at_load_like_a_folder(tmp_path, scheme):
    kind = GGMLQuantizationType.Q8_0
    folder = folder_of(write_gguf("qwen3", tmp_path / "m.gguf", kind))
    wanted = golden_copy("qwen3", tmp_path / "wanted", kind)
    assert_same(load(folder, quantization=scheme), load(wanted, quantization=scheme), "qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_tensor_is_the_part_of_the_whole(tmp_path, kind):
    rng = np.random.default_rng(3)
    folder = folder_of(write_gguf("llama", tmp_path / "m.gguf", GGMLQuantizationType[kind]))
    with TensorFiles(folder) as files:
        for name in (
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
        ):
            whole = files.read(name, ())
            assert whole.shape == files.shapes[name]
            assert whole.nbytes == files.nbytes(name)
            for _ in range(30):
                index = tuple(random_slice(rng, size) for size in whole.shape)
                np.testing.assert_array_equal(files.read(name, index), whole[index])


def random_slice(rng, size):
    start, stop = sorted(int(own) for own in rng.choice(size + 1, 2, replace=False))
    return slice(start, stop, int(rng.integers(1, 4)))


@pytest.mark.long
def test_an_engine_says_the_same_from_a_file_and_from_a_folder(tmp_path):
    file = write_gguf("qwen3", tmp_path / "tiny.gguf")
    folder = golden_copy("qwen3", tmp_path / "wanted")
    said = []
    for path, load_format in ((file, "gguf"), (folder, "auto")):
        settings = {"load_format": load_format, "device": "cpu", "context_length": 64}
        with Engine(str(path), warmup="none", **settings) as engine:
            greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            (result,) = engine.generate(input_ids=[[3, 1, 4, 1, 5]], sampling_params=greedy)
            said.append(result.output_ids)
    assert said[0] == said[1]


def test_a_file_is_converted_to_orbax(tmp_path):
    file = write_gguf("llama", tmp_path / "m.gguf")
    convert(file, tmp_path / "orbax", "float32")
    assert detect_format(tmp_path / "orbax") == "orbax"
    assert_same(load(tmp_path / "orbax"), load(folder_of(file)), "llama")


def test_the_planner_reads_the_config_of_a_file(tmp_path):
    file = write_gguf("gemma3", tmp_path / "m.gguf")
    config = read_config(str(file))
    assert [spec.sliding_window for spec in config.layers] == [10, 10, None, 10, 10, None, 10, 10]


def test_biases_of_llamas_queries_are_in_the_order_of_their_rows(tmp_path):
    rows = np.arange(64, dtype=np.float32)
    stored = rows.reshape(4, 2, 8).swapaxes(1, 2).ravel()
    file = write_gguf("llama", tmp_path / "m.gguf", tensors={"blk.0.attn_q.bias": stored})
    with TensorFiles(folder_of(file)) as files:
        name = "model.layers.0.self_attn.q_proj.bias"
        np.testing.assert_array_equal(files.read(name, ()), rows)
        np.testing.assert_array_equal(files.read(name, (slice(5, 20),)), rows[5:20])


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            {"blk.0.ffn_up.weight": np.zeros((32, 64), np.float32)},
            r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[32, 64\] instead of \[96, 64\]",
        ),
        ({"blk.1.ffn_up.weight": None}, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"blk.0.odd.weight": np.zeros(8, np.float32)}, r"blk\.0\.odd\.weight is unexpected"),
        (
            {"output_norm.weight": np.full(64, np.nan, np.float32)},
            r"'model\.norm\.weight' in '.*' holds values that are no finite numbers",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, tensors, problem):
    folder = folder_of(write_gguf("qwen3", tmp_path / "m.gguf", tensors=tensors))
    with pytest.raises(CheckpointError, match=problem) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_another_folder_is_not_loaded_as_gguf(tmp_path):
    folder = golden_copy("qwen3", tmp_path / "wanted")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(ModelConfig.from_path(folder), mesh, BuildOptions(jnp.float32))
    with pytest.raises(CheckpointError, match="is not a folder of a GGUF file"):
        load_params(placed, folder, "gguf")
