"""A model's declaration for a mesh: its graph, and where each of its parameters lies.

Needs no weights and touches no device, so that it also serves meshes of chips that are not there.
"""

from typing import Any, NamedTuple

from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.api import attention_implementation
from sgl_jax.kernels.grouped_matmul.interface import grouped_matmul_implementation
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.layers.parameter import Declaration, ParamTree, Path, declarations
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.decoder import BuildOptions, CausalLM
from sgl_jax.models.registry import build_model

WEIGHT_SHARDINGS = ("replicated", "data")


class PlacedModel(NamedTuple):
    """A model before it has weights."""

    model: CausalLM
    declared: dict[Path, Declaration]  # of each parameter; the arrays have their shardings
    separates_layers: bool  # whether matrices of layers are to lie apart, see `layer_weights`

    @property
    def graphdef(self) -> Any:
        """`nnx.merge(graphdef, params)` is the model."""
        return nnx.graphdef(self.model)

    @property
    def params(self) -> ParamTree:
        """A jax.ShapeDtypeStruct of each parameter, its sharding included."""
        return unflatten_mapping({path: own.array for path, own in self.declared.items()})


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

    declared = {
        path: own._replace(array=own.array.update(sharding=NamedSharding(mesh, own.spec)))
        for path, own in declarations(model).items()
    }
    is_stacked = platform != "cpu" or weight_sharding == "data" or attention_backend == "pallas"
    return PlacedModel(model, declared, separates_layers=not is_stacked)
