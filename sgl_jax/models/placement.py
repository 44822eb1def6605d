"""A model's declaration for a mesh: its graph, and where each of its parameters lies.

Needs no weights and touches no device, so that it also serves meshes of chips that are not there.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.api import attention_implementation
from sgl_jax.kernels.grouped_matmul.interface import grouped_matmul_implementation
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.layers.parameter import ParamTree, parameter_shapes, partition_specs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.registry import BuildOptions, build_model

WEIGHT_SHARDINGS = ("replicated", "data")


class PlacedModel(NamedTuple):
    """A model before it has weights."""

    graphdef: Any  # `nnx.merge(graphdef, params)` is the model
    params: ParamTree  # jax.ShapeDtypeStruct of each parameter, its sharding included


def place_model(
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    weight_sharding: str = "replicated",
    attention_backend: str = "auto",
    has_kv_scales: bool = False,
) -> PlacedModel:
    """Declare the model of `config` for the mesh ('data', 'tensor').

    Args:
        config: of the model.
        mesh: its devices' platform chooses the kernels.
        dtype: of all parameters.
        weight_sharding: "replicated" gives each data-parallel rank all of its layers' weights;
            "data" splits them over the ranks and gathers each layer's when it runs.
        attention_backend: see `kernels.attention.api`; a CPU that is to simulate
            the TPU's attention simulates its grouped product, too.
        has_kv_scales: whether K and V are scaled for the cache; the scales are parameters.

    Raises:
        ValueError: an option is unknown, or the mesh does not fit the model.
    """
    if weight_sharding not in WEIGHT_SHARDINGS:
        known = ", ".join(WEIGHT_SHARDINGS)
        raise ValueError(f"weight_sharding must be one of {known}, got {weight_sharding!r}")
    platform = mesh.devices.flat[0].platform
    options = BuildOptions(
        dtype=dtype,
        tp_size=mesh.shape[TENSOR_AXIS],
        data_shards=mesh.shape[DATA_AXIS] if weight_sharding == "data" else 1,
        attend=attention_implementation(attention_backend, platform),
        multiply_groups=grouped_matmul_implementation(
            platform, simulate=attention_backend == "pallas"
        ),
        has_kv_scales=has_kv_scales,
    )
    model = build_model(config, options)

    def place(spec: P, declared: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(declared.shape, declared.dtype, sharding=sharding)

    params = jax.tree.map(
        place,
        partition_specs(model),
        parameter_shapes(model),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    return PlacedModel(nnx.graphdef(model), params)
