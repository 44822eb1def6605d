"""From a model folder to parameters in their places on the mesh: the entry of this room."""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sgl_jax.checkpoint.dummy import dummy_params
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.hf_loading import load_safetensors
from sgl_jax.checkpoint.kv_scales import place_kv_scales, read_kv_scales
from sgl_jax.checkpoint.orbax_format import PARAMS_FOLDER, load_orbax
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.layers.layer_weights import separate_matrices
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.parameter import ParamTree, parameter_shapes
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model
from sgl_jax.models.registry import BuildOptions, build_model

LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")


def load_model(
    model_path: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    weight_sharding: str = "replicated",
    seed: int = 0,
    attention_backend: str = "auto",
    kv_cache_scales: str | Path | None = None,
    check_all_weights: bool = False,
) -> tuple[Any, ParamTree]:
    """Build the model for `mesh` and fill it from `model_path`.

    Args:
        model_path: model folder; not read when `load_format` is "dummy".
        config: its config.
        mesh: axes 'data' and 'tensor'.
        dtype: of all parameters, whatever the checkpoint holds.
        load_format: one of `LOAD_FORMATS`; "auto" looks at what the folder holds.
        weight_sharding, attention_backend: see `models.placement.place_model`.
        seed: of dummy weights.
        kv_cache_scales: file with the scales of an 8-bit KV cache (see `kv_scales`), if any.
        check_all_weights: see `checkpoint.finite`.

    Returns:
        graphdef: `nnx.merge(graphdef, params)` is the model.
        params: nested dictionaries of arrays, each placed as its PartitionSpec says
            (`array.sharding.spec`); on a CPU that does not simulate a TPU, matrices of layers
            are tuples of arrays (see `layers.layer_weights`).

    Raises:
        CheckpointError: the folder's weights, or the scales, are not those of `config`.
        ValueError: an option is unknown, or the mesh does not fit the model.
    """
    graphdef, params = load_stacked(
        *(model_path, config, mesh, dtype, load_format, weight_sharding, seed),
        *(attention_backend, kv_cache_scales, check_all_weights),
    )
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and weight_sharding == "replicated" and attention_backend != "pallas":
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
    kv_cache_scales: str | Path | None = None,
    check_all_weights: bool = False,
) -> tuple[Any, ParamTree]:
    """As `load_model`, with every layer weight stacked on axis 0 whatever the platform."""
    if load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise ValueError(f"load_format must be one of {known}, got {load_format!r}")
    # First, for it is read in no time and may be refused.
    kv_scales = None if kv_cache_scales is None else read_kv_scales(Path(kv_cache_scales), config)
    graphdef, shapes = place_model(
        config, mesh, dtype, weight_sharding, attention_backend, kv_scales is not None
    )
    # No part of a checkpoint.
    kv_scale_shapes = shapes["layers"]["attention"].pop("kv_scales", None)
    shardings = jax.tree.map(lambda declared: declared.sharding, shapes)
    folder = Path(model_path)
    if load_format == "auto":
        load_format = _detect_format(folder)
    if load_format == "dummy":
        params = dummy_params(shapes, shardings, config.initializer_range, seed)
    elif load_format == "orbax":
        stored = parameter_shapes(build_model(config, BuildOptions(dtype=dtype)))
        params = load_orbax(
            *(folder, stored, shapes, shardings, (config.num_kv_heads, config.head_dim)),
            check_all=check_all_weights,
        )
    else:
        kv_heads = replicated_kv_heads(
            config.num_heads, config.num_kv_heads, mesh.shape[TENSOR_AXIS]
        )
        params = load_safetensors(
            folder, config, shapes, shardings, kv_heads, check_all=check_all_weights
        )
    if kv_scales is not None:
        placed = place_kv_scales(kv_scales, kv_scale_shapes)
        params["layers"]["attention"]["kv_scales"] = placed
    return graphdef, params


def _detect_format(folder: Path) -> str:
    if (folder / PARAMS_FOLDER).is_dir():
        return "orbax"
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    raise CheckpointError(
        f"{str(folder)!r} holds neither *.safetensors nor {PARAMS_FOLDER}; for random weights "
        f"ask for load_format 'dummy'"
    )
