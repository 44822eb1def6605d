"""The products over a ring, as one device has them."""

from typing import NamedTuple

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.layers.hidden_columns import activation_of, arrays_of
from sgl_jax.models.placement import PlacedModel
from sgl_jax.planner.engine_programs import num_bits


class RingProduct(NamedTuple):
    """One product of equal layers, as a device has it."""

    gathers: bool  # else it scatters
    num_layers: int
    inputs: int
    outputs: int  # of all matrices that are multiplied at once
    num_bytes: int  # of one layer's
    matrices: int = 1  # that are multiplied at once
    activation: ActivationFormat | None = None  # that is multiplied; None: floats


def ring_products(placed: PlacedModel, tp_size: int) -> tuple[RingProduct, ...]:
    """The products of a model's layers; () if they exchange by all-reduces."""
    if not placed.model.has_columns:
        return ()
    found = []
    for layer in placed.model.layers.values():
        for gathers, linears in layer.column_products():
            arrays = [one.get_value() for own in linears for one in arrays_of(own)]
            number, inputs, outputs = arrays[0].shape
            size = 0
            for own in arrays:
                is_split = gathers or own.shape[1] > 1  # or else scales, of outputs
                chips = tp_size if is_split else 1
                size += own.size // number * num_bits(own.dtype) // 8 // chips
            outputs *= len(linears)
            inner = (inputs, outputs // tp_size) if gathers else (inputs // tp_size, outputs)
            formats = len(linears), activation_of(linears[0])
            found.append(RingProduct(gathers, number, *inner, size, *formats))
    return tuple(found)
