"""The record of a quantization scheme: the formats of weights and activations."""

from typing import Literal, NamedTuple

WeightFormat = Literal["int8", "fp8", "int4", "mxfp4"]
ActivationFormat = Literal["int8", "fp8"]

MXFP4_GROUP = 32  # inputs that share a scale (OCP Microscaling Formats specification, version 1.0)
# Largest magnitudes that quantizing a float produces. int8 and int4 do not use their minimum (the
# magnitude is one larger), so that a number and its negative are rounded alike.
GREATEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp4": 6.0}


class Scheme(NamedTuple):
    """A quantized element of the matrix is (value - zero point) * scale.

    There is a scale for each output, or for each output and group of inputs. Quantized activations
    have a scale for each token.
    """

    weight: WeightFormat
    group_size: int | None = None  # inputs that share a scale; None: all
    has_zero_points: bool = False
    has_input_order: bool = False  # inputs of a group are not adjacent, see `QuantizedMatrix`
    activation: ActivationFormat | None = None  # None: not quantized
    has_input_scale: bool = False  # one activation scale from the checkpoint for all tokens

    @property
    def name(self) -> str:
        """Return a description such as "int4 in groups of 128, with zero points"."""
        in_groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        parts = [self.weight + in_groups]
        parts += ["with zero points"] * self.has_zero_points
        parts += ["in activation order"] * self.has_input_order
        kind = "static" if self.has_input_scale else "dynamic"
        parts += [f"{kind} {self.activation} activations"] * (self.activation is not None)
        return ", ".join(parts)
