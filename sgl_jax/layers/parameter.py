"""Parameters as they are declared: a shape, a dtype, and how they are split over the mesh.

Modules hold abstract arrays until a checkpoint fills them, so building a model costs nothing.
Inside the step a module sees one chip's shard and takes its sizes from the shapes it sees; nothing
here knows a concrete mesh.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sgl_jax.layers.mesh_axes import DATA_AXIS

# A tree of parameters, or of what belongs to each (specs, shardings): nested dictionaries.
ParamTree = dict[str, Any]


def parameter(shape: tuple[int, ...], dtype: DTypeLike, *axes: str | None) -> nnx.Param[Any]:
    """Declare a parameter of the whole model's shape; `axes` name the mesh axis of each dim."""
    spec = P(*axes, *[None] * (len(shape) - len(axes)))
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)


def parameter_shapes(module: nnx.Module) -> ParamTree:
    """Shape and dtype (`jax.ShapeDtypeStruct`) of each parameter of the whole model."""
    return nnx.to_pure_dict(nnx.state(module))


def partition_specs(module: nnx.Module) -> ParamTree:
    """The PartitionSpec of each parameter, as a tree like `parameter_shapes`."""
    specs = nnx.map_state(lambda _, param: param.spec, nnx.state(module))
    return nnx.to_pure_dict(specs)


def stack_layers(layer: nnx.Module, num_layers: int, data_shards: int) -> None:
    """Turn a layer's declarations, in place, into those of `num_layers` stacked on a new axis 0.

    With `data_shards` above 1 each parameter is also split over 'data', along its first axis that
    is whole and divides; a parameter without such an axis stays replicated.
    """
    for _, param in nnx.to_flat_state(nnx.state(layer)):
        declared = param.get_value()
        axes = list(param.spec)
        if data_shards > 1:
            for dim, size in enumerate(declared.shape):
                if axes[dim] is None and size % data_shards == 0:
                    axes[dim] = DATA_AXIS
                    break
        shape = (num_layers, *declared.shape)
        param.set_value(jax.ShapeDtypeStruct(shape, declared.dtype))
        param.set_metadata(spec=P(None, *axes))
