"""Declarations of parameters: shape, split over the mesh, source, and the part that a step reads.

Modules hold abstract arrays until a checkpoint fills them, so building a model costs nothing.
Loading, dummy weights and the planner read these declarations (`declarations`), the only list of a
model's parameters. Inside the step a module sees one chip's shard and takes its sizes from the
shard's shapes; nothing here depends on a concrete mesh.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sgl_jax.layers.mesh_axes import DATA_AXIS, MESH_AXES, MeshAxes
from sgl_jax.layers.sources import Placed, Source, Stacked
from sgl_jax.layers.tensor_keys import Shape

# A tree of parameters, or of their specs or shardings: nested dictionaries.
ParamTree = dict[str, Any]
Path = tuple[str, ...]  # path of a leaf of such a tree: ("norm", "weight")

Initial = Literal["normal", "ones", "zeros", "values", "scales", "order"]
# The part that a step reads: all, the rows of its tokens, or the experts chosen for its tokens.
Read = Literal["all", "rows", "experts"]


class Declaration(NamedTuple):
    """One parameter of the whole model, before it has values."""

    array: jax.ShapeDtypeStruct
    spec: P
    source: Source | None  # None: not part of a checkpoint
    initial: Initial  # values of a dummy
    read: Read
    layers: tuple[int, ...]  # stacked on axis 0, in this order; () if it belongs to no layer

    @property
    def is_kernel_operand(self) -> bool:
        """Return True if Pallas kernels get the whole array: parts of quantized matrices, and
        experts."""
        return self.read == "experts" or self.initial in ("values", "scales", "zeros")


def parameter(
    source: Source | Shape,
    dtype: DTypeLike,
    *axes: MeshAxes,
    initial: Initial = "normal",
    read: Read = "all",
    by_expert: bool = False,
) -> nnx.Param[Any]:
    """Declare a parameter of the whole model; `axes` name the mesh axes of each dimension.

    `source` is a shape for parameters that no checkpoint holds. With `by_expert`, the first axis
    are experts, which may be placed (`stack_layers`).
    """
    own = None if isinstance(source, tuple) else source
    shape = source if isinstance(source, tuple) else source.shape
    spec = P(*axes, *[None] * (len(shape) - len(axes)))
    array = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(
        array, spec=spec, source=own, initial=initial, read=read, layers=(), by_expert=by_expert
    )


def declarations(module: nnx.Module) -> dict[Path, Declaration]:
    return {
        tuple(map(str, path)): Declaration(
            param.get_value(), param.spec, param.source, param.initial, param.read, param.layers
        )
        for path, param in nnx.to_flat_state(nnx.state(module))
    }


def stack_layers(
    layer: nnx.Module,
    layers: Sequence[int],
    data_shards: int,
    prefix: str = "{}.",
    slots: tuple[tuple[int, ...], ...] | None = None,
) -> None:
    """Turn a layer's declarations, in place, into declarations of `layers` stacked on axis 0.

    `prefix`, formatted with a layer's number, precedes the names of its tensors. If `data_shards`
    is above 1, each parameter is also split over 'data', along its first unsplit axis that
    `data_shards` divides; a parameter without such an axis stays replicated, and experts that are
    split over 'data' are unchanged. `slots` are the experts in each layer's slots; None if in
    order.
    """
    for _, param in nnx.to_flat_state(nnx.state(layer)):
        declared = param.get_value()
        axes = list(param.spec)
        if data_shards > 1 and MESH_AXES not in axes:
            for dim, size in enumerate(declared.shape):
                if axes[dim] is None and size % data_shards == 0:
                    axes[dim] = DATA_AXIS
                    break
        source = param.source and Stacked(tuple(map(prefix.format, layers)), param.source)
        shape = (len(layers), *declared.shape)
        if slots is not None and param.by_expert:
            source = Placed(source, slots)
            shape = source.shape
        param.set_value(jax.ShapeDtypeStruct(shape, declared.dtype))
        param.set_metadata(spec=P(None, *axes), source=source, layers=tuple(layers))
