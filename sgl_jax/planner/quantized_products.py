"""The quantized matrices of a model on one device."""

from typing import NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec as P

from sgl_jax.core.layer_configs import Scheme, WeightFormat
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.quantized_matrix import QuantizedExperts, QuantizedMatrix
from sgl_jax.models.placement import PlacedModel, num_bits


class QuantizedProduct(NamedTuple):
    """Matrices of equal shape on one device."""

    scheme: Scheme
    num_layers: int
    inputs: int
    groups: int
    outputs: int
    num_bytes: int  # per layer


def quantized_products(placed: PlacedModel, tp_size: int) -> tuple[QuantizedProduct, ...]:
    """Return all quantized matrices of a model, except experts."""
    products = []
    for path, node in nnx.iter_graph(placed.model):
        if isinstance(node, QuantizedMatrix):
            names = tuple(map(str, path))
            values, scales = (placed.declared[*names, part] for part in ("values", "scales"))
            num_layers, inputs, outputs = _on_device(values.array.shape, values.spec, tp_size)
            groups = _on_device(scales.array.shape, scales.spec, tp_size)[1]
            value_bits, scale_bits = (num_bits(part.array.dtype) for part in (values, scales))
            size = outputs * (inputs * value_bits + groups * scale_bits) // 8
            products.append(
                QuantizedProduct(node.scheme, num_layers, inputs, groups, outputs, size)
            )
    return tuple(products)


def _on_device(shape: tuple[int, ...], spec: P, tp_size: int) -> tuple[int, ...]:
    """Return one chip's shape of a rank's array, before ranks share it."""
    return tuple(
        size // tp_size if axes == TENSOR_AXIS else size
        for size, axes in zip(shape, spec, strict=True)
    )


def expert_weight(placed: PlacedModel) -> WeightFormat | None:
    """Return the format of quantized experts; None if experts are floats, or there are none."""
    nodes = (node for _, node in nnx.iter_graph(placed.model))
    return next((own.weight for own in nodes if isinstance(own, QuantizedExperts)), None)
