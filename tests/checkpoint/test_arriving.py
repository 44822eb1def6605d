"""Weights from arrays are bit for bit the weights of the same tensors in files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save

from sgl_jax.checkpoint.array_tensors import read_safetensors
from sgl_jax.checkpoint.arriving import ArrivingWeights
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.finite import is_finite, sample_of
from sgl_jax.checkpoint.hf_loading import aligned
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.checkpoint.trainer_weights import as_checkpoint_tensors
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import PlacedModel, place_model
from tests.checkpoint.test_loading import GOLDEN, assert_same
from tests.support.long import long

FAMILIES = ["qwen3", "qwen3_moe_mixed", "qwen3_next", "quantized/ct_int8_mixed"]
OTHERS = ["llama", "qwen2", "gemma3", "gpt_oss_mxfp4", "deepseek_v3", "qwen3_5_moe", "mistral"]


def mesh_of(first: int, *shape: int) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("data", "tensor"))


def placed_on(folder: Path, mesh: Mesh, quantization: str = "none") -> PlacedModel:
    config = ModelConfig.from_path(folder).quantized(quantization)
    separates = mesh.devices.size == 1
    return place_model(config, mesh, BuildOptions(jnp.float32, separates_layers=separates))


def tensors_of(folder: Path) -> dict[str, Any]:
    with TensorFiles(folder) as files:
        return {name: files.read(name, ()) for name in files.shapes}


def made(placed: PlacedModel, *updates: dict[str, Any]) -> dict[Any, Any]:
    arriving = ArrivingWeights(placed, check_all=False)
    params = {}
    for tensors in updates:
        arriving.add(tensors)
        params |= {path: arriving.make(path) for path in arriving.ready()}
    arriving.check_complete()
    return params


def flat(params: dict[Any, Any]) -> dict[Any, Any]:
    """Give each layer of a tuple its own entry."""
    leaves = {path: own if isinstance(own, tuple) else (own,) for path, own in params.items()}
    return {(*path, i): each for path, own in leaves.items() for i, each in enumerate(own)}


@pytest.mark.parametrize("family", [*FAMILIES, *long(*OTHERS)])
def test_tensors_in_any_order_and_bucket_make_the_parameters_of_the_files(family: str) -> None:
    placed = placed_on(GOLDEN / family, mesh_of(0, 1, 1))
    tensors = tensors_of(GOLDEN / family)
    names = sorted(tensors, reverse=True)
    half = len(names) // 2
    buckets = [{name: tensors[name] for name in own} for own in (names[:half], names[half:])]
    expected = flatten_mapping(load_params(placed, GOLDEN / family, detect_format(GOLDEN / family)))
    assert_same(flat(made(placed, *buckets)), flat(expected))


def test_floats_are_quantized_as_at_load() -> None:
    folder = GOLDEN / "qwen3"
    placed = placed_on(folder, mesh_of(0, 1, 1), "int8")
    expected = flatten_mapping(load_params(placed, folder, "safetensors"))
    assert_same(flat(made(placed, tensors_of(folder))), flat(expected))


def test_a_large_tensor_may_arrive_in_pieces_of_rows() -> None:
    placed = placed_on(GOLDEN / "qwen3", mesh_of(0, 1, 1))
    tensors = tensors_of(GOLDEN / "qwen3")
    expected = made(placed, dict(tensors))
    name = "model.embed_tokens.weight"
    table = tensors.pop(name)
    cut = -(-len(table) // 3)
    pieces = [{f"{name}#{first}": table[first : first + cut]} for first in (cut, 0, 2 * cut)]
    assert_same(flat(made(placed, tensors, *pieces)), flat(expected))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is missing"):
        made(placed, tensors, *pieces[1:])
    with pytest.raises(CheckpointError, match="is unexpected"):
        made(placed, {"own#0": table})


def test_a_parameter_is_listed_in_one_of_its_forms() -> None:
    """So all listed tensors are needed."""
    placed = placed_on(GOLDEN / "qwen3_moe", mesh_of(0, 1, 1))
    shapes = ArrivingWeights(placed, check_all=False).expected_shapes
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    made(placed, tensors)
    for name in tensors:
        arriving = ArrivingWeights(placed, check_all=False)
        arriving.add({own: array for own, array in tensors.items() if own != name})
        assert arriving.missing(), name


def test_all_tensors_are_missing_until_one_has_arrived() -> None:
    """Neither a spare tensor nor a piece of one is a start."""
    placed, tensors = placed_on(GOLDEN / "qwen2", mesh_of(0, 1, 1)), tensors_of(GOLDEN / "qwen2")
    table = tensors["model.embed_tokens.weight"]
    for update in ({}, {"lm_head.weight": table}, {"model.embed_tokens.weight#0": table[:1]}):
        arriving = ArrivingWeights(placed, check_all=False)
        arriving.add(update)
        assert arriving.missing() == tensors.keys()
        with pytest.raises(CheckpointError, match="is missing"):
            arriving.check_complete()
    arriving.add({"model.norm.weight": tensors["model.norm.weight"]})
    assert arriving.missing() == tensors.keys() - {"model.norm.weight"}


def test_pieces_of_a_tensor_that_nothing_needs_are_dropped() -> None:
    """As it is if it arrives whole."""
    placed, tensors = placed_on(GOLDEN / "qwen2", mesh_of(0, 1, 1)), tensors_of(GOLDEN / "qwen2")
    head = tensors["model.embed_tokens.weight"]
    whole = made(placed, tensors | {"lm_head.weight": head})
    assert_same(flat(made(placed, tensors | {"lm_head.weight#0": head})), flat(whole))


@pytest.mark.parametrize("engine", [(0, 1, 2), (2, 1, 2), (0, 2, 2)])
def test_arrays_of_another_mesh_arrive_unchanged_and_as_copies(engine: tuple[int, ...]) -> None:
    """Donation of the trainer's arrays deletes none of the engine's."""
    folder = GOLDEN / "qwen3"
    trainer = mesh_of(0, 2, 1) if engine == (2, 1, 2) else mesh_of(0, 2, 2)
    arrays = {}
    for name, tensor in tensors_of(folder).items():
        spec = P("data", "tensor") if tensor.ndim == 2 else P("data")
        arrays[name] = jax.device_put(tensor, NamedSharding(trainer, spec))
    placed = placed_on(folder, mesh_of(*engine))
    params = made(placed, arrays)
    for array in arrays.values():
        array.delete()
    expected = flatten_mapping(load_params(placed, folder, "safetensors"))
    assert_same(flat(params), flat(expected))
    assert all(params[path].sharding == own.array.sharding for path, own in placed.declared.items())


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("offset", [0, 4])  # from memory that a CPU device takes as it is
def test_arrays_of_the_host_are_copied(offset: int, order: Any) -> None:
    """Their owner may write to them after the update."""
    placed, expected = placed_on(GOLDEN / "qwen3", mesh_of(0, 1, 1)), tensors_of(GOLDEN / "qwen3")
    held = {}
    for name, tensor in expected.items():
        memory = aligned([tensor.nbytes + offset], np.uint8)
        held[name] = memory[offset:].view(tensor.dtype).reshape(tensor.shape, order=order)
        held[name][...] = tensor
    params = jax.block_until_ready(made(placed, held))
    for tensor in held.values():
        tensor[...] = 0
    assert_same(flat(params), flat(made(placed, expected)))


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        ((768, 8, 128), (slice(None), 5)),  # a head
        ((4, 512, 8, 64), (2, slice(None), 3)),  # a head of a layer
        ((256, 512, 64), (1,)),  # an expert
        ((3, 1024, 256), (1,)),  # a layer
        ((2**19,), ()),
    ],
)
def test_a_sample_has_a_part_of_each_head_expert_and_layer(
    shape: tuple[int, ...], where: tuple[Any, ...]
) -> None:
    array = np.zeros(shape, np.float32)
    array[where] = np.nan
    assert not is_finite(sample_of(array))


def as_tunix(name: str, tensor: Any) -> tuple[str, Any]:
    """Return a tensor of the qwen3 models as tunix holds it, by its Qwen3 model."""
    *_, module, _ = name.split(".")
    layer = f"layers.{name.split('.')[2]}." if ".layers." in name else ""
    if module in ("q_proj", "k_proj", "v_proj"):
        return f"{layer}attn.{module}.w", tensor.T.reshape(tensor.shape[1], -1, 32)
    if module == "o_proj":
        return f"{layer}attn.o_proj.w", tensor.T.reshape(-1, 32, tensor.shape[0])
    if module in ("q_norm", "k_norm"):
        return f"{layer}attn.{module}.w", tensor
    if module.endswith("_layernorm"):
        return f"{layer}{module}.w", tensor
    if module == "gate":
        return f"{layer}mlp.router.kernel", tensor.T
    if module.endswith("_proj"):
        return f"{layer}mlp.{module}.kernel", tensor.T
    top = {"norm": "final_norm.w", "embed_tokens": "embedder.input_embedding"}
    return (top[module], tensor) if module in top else ("lm_head.w", tensor.T)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_trainers_names_and_shapes_are_those_of_a_checkpoint(family: str) -> None:
    tensors = tensors_of(GOLDEN / family)
    experts: dict[str, list[Any]] = {}
    held = {}
    for name in sorted(tensors):
        if ".experts." in name:
            layer, (_, own, _) = name.split(".")[2], name.split(".experts.")[1].split(".")
            experts.setdefault(f"layers.{layer}.mlp.{own}", []).append(tensors[name].T)
        else:
            own, array = as_tunix(name, tensors[name])
            held[own] = jnp.asarray(array)
    held |= {name: jnp.stack(own) for name, own in experts.items()}
    found = dict(each for own in held for each in as_checkpoint_tensors(own, held[own]))
    placed = placed_on(GOLDEN / family, mesh_of(0, 1, 1))
    assert_same(flat(made(placed, found)), flat(made(placed, tensors)))


def test_what_cannot_be_taken_is_named() -> None:
    folder = GOLDEN / "qwen3"
    placed, tensors = placed_on(folder, mesh_of(0, 1, 1)), tensors_of(folder)
    norm = tensors["model.norm.weight"]
    wrong = {
        "shape [63] instead of [64]": {"model.norm.weight": norm[:-1]},
        "has type F8_E4M3": {"model.norm.weight": norm.astype(jnp.float8_e4m3fn)},
        "has type complex64": {"model.norm.weight": norm.astype(np.complex64)},
        "own.weight is unexpected": {"own.weight": norm},
        "no finite numbers": tensors | {"model.norm.weight": norm * np.nan},
        "model.norm.weight is missing": {
            name: own for name, own in tensors.items() if name != "model.norm.weight"
        },
    }
    for why, update in wrong.items():
        with pytest.raises(CheckpointError) as error:
            made(placed, update)
        assert why in str(error.value)
    with pytest.raises(CheckpointError, match="arrived twice"):
        made(placed, {"model.norm.weight": norm}, {"model.norm.weight": norm})
    gone = jnp.ones(64)
    gone.delete()
    with pytest.raises(CheckpointError, match="deleted or donated"):
        made(placed, tensors | {"model.norm.weight": gone})


def test_a_body_of_safetensors_is_read_without_a_copy() -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, jnp.bfloat16)}
    found = read_safetensors(save(tensors))
    assert_same(found, tensors)
    assert found["b"].dtype == jnp.bfloat16
    for body in (b"", b"\x80\x04K\x01.", save(tensors)[:-1]):
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            read_safetensors(body)
