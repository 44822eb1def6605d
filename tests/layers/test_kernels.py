"""The kernels of each platform and backend."""

import jax
import pytest

from sgl_jax.kernels.attention import tpu as attention
from sgl_jax.kernels.expert_dispatch import tpu as experts
from sgl_jax.kernels.grouped_matmul.interface import ragged_grouped_matmul
from sgl_jax.kernels.grouped_matmul.tpu import tpu_grouped_matmul
from sgl_jax.kernels.quantized_matmul.xla import xla_quantized_matmul
from sgl_jax.layers.kernels import Kernels, kernels_of


def test_a_tpu_has_its_kernels_and_a_cpu_simulates_them():
    kernels, simulated = kernels_of("tpu", "pallas"), kernels_of("cpu", "pallas")
    assert kernels.attend is attention.ragged_paged_attention
    assert kernels.expert_dispatch.sort is experts.tpu_sort
    assert kernels.multiply_groups is tpu_grouped_matmul
    for own, wrapped in zip(jax.tree.leaves(kernels), jax.tree.leaves(simulated), strict=True):
        assert wrapped.__wrapped__ is own


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_backend_xla_has_no_kernel(platform):
    assert kernels_of("cpu", "xla") == Kernels()
    products = {
        "multiply_quantized": xla_quantized_matmul,
        "multiply_groups": ragged_grouped_matmul,
    }
    assert kernels_of(platform, "xla") == Kernels(**products)
