#!/usr/bin/env python
"""Static costs of products with quantized matrices, by the compiler's schedules.

    python -m benchmarks.kernels.quantized_cost [--chips v5e v6e v5p tpu7x]

Needs no TPU: its compiler schedules each kernel (see `schedule.py`). The first table has the
kernels' times by their bundles, the matrix unit's limit for bfloat16, and the transfer time of the
bytes; a turn is one tile of tokens with one block of the matrix. The second table has, for 2**20
values of a matrix, the bundles that multiply a token and those that convert, and the bundles that
quantize 2**10 activations.
"""

import argparse
from collections.abc import Mapping
from typing import NamedTuple, get_args

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import Kernel, compile_for, longest_loop  # isort: skip
import jax.numpy as jnp

from sgl_jax.core.layer_configs import MXFP4_GROUP, ActivationFormat, Scheme, WeightFormat
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.grouped_matmul.tpu import tpu_grouped_matmul
from sgl_jax.kernels.quantized_matmul.numbers import QuantizedArrays, value_dtype
from sgl_jax.kernels.quantized_matmul.tpu import (
    VALUES_NAME,
    activation_rows,
    choose_blocks,
    kernel_of,
    quantized_activations,
    tpu_quantized_matmul,
    value_blocks,
)
from sgl_jax.models.placement import num_bits
from sgl_jax.planner.topology import CHIPS

GROUP, LAYERS = 128, 2
EXPERTS, EXPERT_LINES, EXPERT_SHAPE = 16, 256, (360, 2880)  # outputs, inputs
MI, KI = 2**20, 2**10


class ProductBundles(NamedTuple):
    """Instructions per 2**20 values of a matrix, by format."""

    per_token: float  # product of dequantized values
    per_token_as_values: Mapping[str, float]  # product of quantized values
    activations: float  # to quantize 2**10 activations
    conversion: Mapping[str, int]  # to dequantize with scales
    unscaled: Mapping[str, int]  # to dequantize without scales (experts: the result is scaled)


class Product(NamedTuple):
    """Tokens times a matrix of some scheme."""

    tokens: int
    inputs: int
    outputs: int
    scheme: Scheme

    @property
    def groups(self) -> int:
        size = self.scheme.group_size
        return 1 if size is None else self.inputs // size

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Return the tokens, inputs and outputs of a turn."""
        if kernel_of(self.scheme, self.tokens, self.inputs, self.groups) == VALUES_NAME:
            return value_blocks(self.tokens, self.inputs, self.outputs)
        return choose_blocks(self.tokens, self.inputs, self.outputs, self.groups)

    @property
    def turns(self) -> int:
        sizes = (self.tokens, self.inputs, self.outputs)
        tokens, inputs, outputs = (
            -(-size // block) for size, block in zip(sizes, self.blocks, strict=True)
        )
        return tokens * inputs * outputs

    def kernel(self) -> Kernel:
        values = value_dtype(self.scheme.weight)
        scale = jnp.float32 if self.groups == 1 else jnp.bfloat16

        def multiply(x, values, scales, layer):
            matrices = QuantizedArrays(values, scales, None, None)
            return tpu_quantized_matmul(x, matrices, layer, self.scheme)

        shapes = [
            ((self.tokens, self.inputs), jnp.bfloat16),
            ((LAYERS, self.inputs, self.outputs), values),
            ((LAYERS, self.groups, self.outputs), scale),
            ((), jnp.int32),
        ]
        return Kernel("product", multiply, shapes, None, "turn", longest_loop, "by the grid")


def quantizing(tokens: int, inputs: int, activation: ActivationFormat) -> Kernel:
    def quantize(x):
        return quantized_activations(x, activation, None)

    shape = (tokens, inputs), jnp.bfloat16
    return Kernel("activations", quantize, [shape], None, "turn", longest_loop, "by the grid")


def experts(weight: WeightFormat | None) -> Kernel:
    """Return the product of gpt-oss's experts on one of eight chips with `EXPERT_LINES` lines.

    MXFP4 has a scale for each group, other formats for each output.
    """
    outputs, inputs = EXPERT_SHAPE
    values = jnp.bfloat16 if weight is None else value_dtype(weight)
    arrays = [((LAYERS, EXPERTS, outputs, inputs), values)]
    if weight is not None:
        groups, scale = (
            (inputs // MXFP4_GROUP, jnp.uint8) if weight == "mxfp4" else (1, jnp.float32)
        )
        arrays.append(((LAYERS, EXPERTS, groups, outputs), scale))

    def multiply(x, layer, sizes, *arrays):
        scales = arrays[1] if weight else None
        matrices = GroupMatrices(arrays[0], scales, None, weight)
        return tpu_grouped_matmul(x, matrices, layer, sizes, transposed=True)

    shapes = [((EXPERT_LINES, inputs), jnp.bfloat16), ((), jnp.int32), ((EXPERTS,), jnp.int32)]
    return Kernel("experts", multiply, [*shapes, *arrays], None, "turn", longest_loop, "")


FORMATS = get_args(ActivationFormat)
# Gate or up of a 70B's layer, one of eight chips; all of a 32B's on one of four.
PRODUCTS = {
    **{
        f"{form} x {form}": Product(2048, 8192, 3584, Scheme(form, activation=form))
        for form in FORMATS
    },
    "int4 in groups": Product(128, 5120, 6400, Scheme("int4", GROUP)),
    "int8": Product(128, 5120, 6400, Scheme("int8")),
}


def bundles(kernel: Kernel, chip: str) -> int:
    """Return the bundles of the kernel's longest loop."""
    _, compiled = compile_for(chip, lambda: kernel)
    return int(longest_loop(compiled.schedule)[0])


def product_row(name: str, product: Product, chip_name: str) -> str:
    chip, turn = CHIPS[chip_name], bundles(product.kernel(), chip_name)
    numbers = product.inputs * product.outputs
    weight_bytes = numbers * num_bits(value_dtype(product.scheme.weight)) // 8
    limit = 2 * product.tokens * numbers / chip.bf16_flops_per_s
    return (
        f"| {name} | {product.tokens} | {chip_name} | {turn:,} x {product.turns} "
        f"| {turn * product.turns / chip.clock_hz * 1e6:.0f} | {limit * 1e6:.0f} "
        f"| {weight_bytes / chip.hbm_bytes_per_s * 1e6:.0f} |"
    )


def constants(chip: str) -> ProductBundles:
    """Return a chip's figures, counted from schedules."""

    def a_turn(product: Product) -> float:
        _, inputs, outputs = product.blocks
        return bundles(product.kernel(), chip) / (inputs * outputs / MI)

    def in_groups(weight: WeightFormat, tokens: int) -> float:
        return a_turn(Product(tokens, 5120, 1536, Scheme(weight, GROUP)))

    long, short = in_groups("int8", 512), in_groups("int8", 128)
    per_token = (long - short) / (512 - 128)
    conversion = {
        weight: round(in_groups(weight, 128) - 128 * per_token)
        for weight in ("int8", "int4", "fp8")
    }
    floats, values = bundles(experts(None), chip), EXPERT_SHAPE[0] * EXPERT_SHAPE[1] / MI

    def in_a_visit(weight: WeightFormat) -> int:
        return max(round((bundles(experts(weight), chip) - floats) / values), 0)

    conversion["mxfp4"] = in_a_visit("mxfp4")
    unscaled = {form: in_a_visit(form) for form in FORMATS}
    as_values = {
        form: a_turn(Product(2048, 8192, 3584, Scheme(form, activation=form))) / 512
        for form in FORMATS
    }
    rows = activation_rows(512, 8192)
    activations = bundles(quantizing(512, 8192, "int8"), chip) / (rows * 8192 / KI)
    return ProductBundles(per_token, as_values, activations, conversion, unscaled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    chips = parser.parse_args().chips
    print("| matrix | tokens | chip | bundles | us | limit in bfloat16, us | its bytes, us |")
    print("|---|---|---|---|---|---|---|")
    for name, product in PRODUCTS.items():
        for chip in chips:
            print(product_row(name, product, chip), flush=True)
    print("\n| chip | per token | per token, as values | activations | conversion | unscaled |")
    print("|---|---|---|---|---|---|")
    for chip in chips:
        own = constants(chip)
        values = ", ".join(f"{form} {n:.2f}" for form, n in own.per_token_as_values.items())
        converted, unscaled = (
            ", ".join(f"{form} {n:,}" for form, n in counts.items())
            for counts in (own.conversion, own.unscaled)
        )
        print(
            f"| {chip} | {own.per_token:.2f} | {values} | {own.activations:.2f} | {converted} "
            f"| {unscaled} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
