"""The record of a quantization scheme: the formats of weights and activations."""

from typing import Literal, NamedTuple

WeightFormat = Literal["int8", "fp8", "int4", "mxfp4"]
ActivationFormat = Literal["int8", "fp8"]

MXFP4_GROUP = 32  # inputs that share a scale (OCP Microscaling Formats specification, version 1.0)
# The greatest magnitudes that quantizing a float gives; the least number of int8 and int4, one
# further from 0, is left out, so that a number and its negative are rounded alike.
GREATEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp4": 6.0}


class Scheme(NamedTuple):
    """A number of the matrix is (value - zero point) * scale.

    Scales are for each output, and for groups of inputs if there are any. Activations that are
    quantized have a scale for each token.
    """

    weight: WeightFormat
    group_size: int | None = None  # inputs that share a scale; None: all
    has_zero_points: bool = False
    has_input_order: bool = False  # inputs of a group are no neighbours, see `QuantizedMatrix`
    activation: ActivationFormat | None = None  # None: not quantized
    has_input_scale: bool = False  # the checkpoint's scale of activations, one for all tokens

    @property
    def name(self) -> str:
        """For people: "int4 in groups of 128, with zero points"."""
        in_groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        parts = [self.weight + in_groups]
        parts += ["with zero points"] * self.has_zero_points
        parts += ["in activation order"] * self.has_input_order
        kind = "static" if self.has_input_scale else "dynamic"
        parts += [f"{kind} {self.activation} activations"] * (self.activation is not None)
        return ", ".join(parts)
