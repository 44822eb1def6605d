"""From a model folder to parameters in their places on the mesh."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sgl_jax.checkpoint.dummy import dummy_params
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.layers.parameter import ParamTree, parameter_shapes, partition_specs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.registry import BuildOptions, build_model


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

    Returns:
        graphdef: `nnx.merge(graphdef, params)` is the model.
        params: nested dictionaries of arrays, placed as `partition_specs` of the model says.
    """
    model = build_model(
        config,
        BuildOptions(
            dtype=dtype,
            tp_size=mesh.shape[TENSOR_AXIS],
            data_shards=mesh.shape[DATA_AXIS] if weight_sharding == "data" else 1,
            attention_backend=attention_backend,
        ),
    )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_specs(model),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    params = dummy_params(parameter_shapes(model), shardings, config.initializer_range, seed)
    return nnx.graphdef(model), params
