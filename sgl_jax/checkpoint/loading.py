"""From a model folder to parameters in their places on the mesh: the entry of this room."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sgl_jax.checkpoint.dummy import dummy_params
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.hf_loading import load_safetensors
from sgl_jax.checkpoint.orbax_format import PARAMS_FOLDER, load_orbax
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.layers.layer_weights import separate_matrices
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.layers.parameter import ParamTree, parameter_shapes, partition_specs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.registry import BuildOptions, build_model

LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
WEIGHT_SHARDINGS = ("replicated", "data")


def load_model(
    model_path: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    weight_sharding: str = "replicated",
    seed: int = 0,
    attention_backend: str = "auto",
) -> tuple[Any, ParamTree]:
    """Build the model for `mesh` and fill it from `model_path`.

    Args:
        model_path: model folder; not read when `load_format` is "dummy".
        config: its config.
        mesh: axes 'data' and 'tensor'.
        dtype: of all parameters, whatever the checkpoint holds.
        load_format: one of `LOAD_FORMATS`; "auto" looks at what the folder holds.
        weight_sharding: "replicated" gives each data-parallel rank all of its layers' weights;
            "data" splits them over the ranks and gathers each layer's when it runs.
        seed: of dummy weights.
        attention_backend: see `kernels.ragged_paged_attention.interface`.

    Returns:
        graphdef: `nnx.merge(graphdef, params)` is the model.
        params: nested dictionaries of arrays, each placed as its PartitionSpec says
            (`array.sharding.spec`); on a CPU, matrices of layers are tuples of arrays (see
            `layers.layer_weights`).

    Raises:
        CheckpointError: the folder's weights are not those of `config`.
        ValueError: an option is unknown, or the mesh does not fit the model.
    """
    graphdef, params = load_stacked(
        model_path, config, mesh, dtype, load_format, weight_sharding, seed, attention_backend
    )
    if weight_sharding == "replicated" and mesh.devices.flat[0].platform == "cpu":
        separate_matrices(params["layers"])
    return graphdef, params


def load_stacked(
    model_path: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    weight_sharding: str = "replicated",
    seed: int = 0,
    attention_backend: str = "auto",
) -> tuple[Any, ParamTree]:
    """As `load_model`, with every layer weight stacked on axis 0 whatever the platform."""
    _require("load_format", load_format, LOAD_FORMATS)
    _require("weight_sharding", weight_sharding, WEIGHT_SHARDINGS)
    tp_size = mesh.shape[TENSOR_AXIS]
    options = BuildOptions(
        dtype=dtype,
        tp_size=tp_size,
        data_shards=mesh.shape[DATA_AXIS] if weight_sharding == "data" else 1,
        attention_backend=attention_backend,
    )
    model = build_model(config, options)
    shapes = parameter_shapes(model)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_specs(model),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    folder = Path(model_path)
    if load_format == "auto":
        load_format = _detect_format(folder)
    if load_format == "dummy":
        params = dummy_params(shapes, shardings, config.initializer_range, seed)
    elif load_format == "orbax":
        stored = parameter_shapes(build_model(config, BuildOptions(dtype=dtype)))
        params = load_orbax(folder, stored, shapes, shardings)
    else:
        kv_heads = replicated_kv_heads(config.num_heads, config.num_kv_heads, tp_size)
        params = load_safetensors(folder, config, shapes, shardings, kv_heads)
    return nnx.graphdef(model), params


def _require(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _detect_format(folder: Path) -> str:
    if (folder / PARAMS_FOLDER).is_dir():
        return "orbax"
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    raise CheckpointError(
        f"{str(folder)!r} holds neither *.safetensors nor {PARAMS_FOLDER}; for random weights "
        f"ask for load_format 'dummy'"
    )
