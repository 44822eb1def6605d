"""A model's declaration for a mesh: its graph, and the sharding and layout of its parameters.

Needs no weights and no device, so that it also works for meshes of chips that do not exist.
"""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from sgl_jax.layers.layer_weights import is_separated, shape_of_layer
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.layers.parameter import Declaration, ParamTree, Path, declarations
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.decoder import CausalLM
from sgl_jax.models.registry import build_model


class PlacedModel(NamedTuple):
    """A model's declaration on a mesh, before it has weights."""

    model: CausalLM
    declared: dict[Path, Declaration]  # by parameter; the arrays have shardings and layouts
    separates_layers: bool  # whether layers have separate matrices, see `layer_weights`

    @property
    def graphdef(self) -> Any:
        """Return the graph; `nnx.merge(graphdef, params)` is the model."""
        return nnx.graphdef(self.model)

    @property
    def float_matrices(self) -> dict[str, int]:
        """Return the bytes of each matrix of floats by its name in files, "*" for any layer."""
        found: Counter[str] = Counter()
        for own in self.declared.values():
            if own.source and own.initial == "normal" and own.array.ndim - bool(own.layers) > 1:
                name = next(iter(own.source.tensors())).name.removesuffix(".weight")
                size = own.array.size * own.array.dtype.itemsize
                found[re.sub(r"\.\d+(?=\.)", ".*", name)] += size
        return dict(found)

    @property
    def params(self) -> ParamTree:
        """Return a jax.ShapeDtypeStruct of each array of a loaded model, with its sharding."""
        return unflatten_mapping(
            {path: self._arrays(path, own.array) for path, own in self.declared.items()}
        )

    def _arrays(self, path: Path, array: jax.ShapeDtypeStruct) -> Any:
        if not (self.separates_layers and is_separated(path, array.ndim)):
            return array
        return (shape_of_layer(array),) * array.shape[0]


def place_model(config: ModelConfig, mesh: Mesh, options: BuildOptions) -> PlacedModel:
    """Declare the model for the mesh ('data', 'tensor'), with its sizes added to `options`.

    Raises ValueError if the mesh does not fit the model.
    """
    options = options._replace(tp_size=mesh.shape[TENSOR_AXIS], dp_size=mesh.shape[DATA_AXIS])
    model = build_model(config, options)
    declared = {}
    for path, own in declarations(model).items():
        widens = options.widens_int4 and own.array.dtype == jnp.int4
        dtype = jnp.dtype(jnp.int8) if widens else own.array.dtype
        sharding = NamedSharding(mesh, own.spec)
        layout = None
        is_in_loop = bool(own.layers) and own.array.ndim > 2
        if (own.is_kernel_operand or is_in_loop) and not options.separates_layers:
            # Kernels and products in loops over steps read rows of memory. By default, XLA on a TPU
            # chooses the order of axes that needs the least padding, and would copy the array in
            # each launch.
            layout = Layout(tuple(range(own.array.ndim)))
        array = own.array.update(dtype=dtype, sharding=Format(layout, sharding))
        declared[path] = own._replace(array=array)
    return PlacedModel(model, declared, options.separates_layers)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of one device's part of a tree of sharded arrays or shapes, unpadded."""
    bits: int = sum(
        num_bits(leaf.dtype) * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
    return bits // 8


def num_bits(dtype: jnp.dtype) -> int:
    """Return the bits of an element in TPU memory; numpy stores 4-bit elements in a byte each."""
    return 4 if dtype == jnp.int4 else 8 * int(dtype.itemsize)
