"""Activations are quantized in tiles of 8-bit numbers, whatever a model's sizes."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.quantized_matmul.tpu import activation_rows, quantized_activations
from tests.support.long import long
from tests.tpu.compiling import compile_on, generations, struct

TILE = 32  # rows of a tile of 8-bit numbers


def test_a_block_has_whole_tiles_or_all_tokens() -> None:
    for inputs in range(128, 32_768, 128):
        for num_tokens in (1, 8, 40, 256, 600, 2048):
            rows = activation_rows(num_tokens, inputs)
            assert rows == num_tokens or rows % TILE == 0


@pytest.mark.parametrize("chip", generations("v6e", "tpu7x"))
@pytest.mark.parametrize("activation", ["int8", "fp8"])
@pytest.mark.parametrize("inputs", [12_800, *long(5120, 25_600)])
def test_the_widths_of_qwen3_32b_compile(tpu_mesh, chip, activation, inputs) -> None:
    """Whole, and its MLP over two chips: 12,800 numbers fit 80 times into a block, not 64 or 96."""
    compile_on(
        tpu_mesh(chip),
        lambda x: quantized_activations(x, activation, None),
        struct(jnp.bfloat16, 2048, inputs),
    )
