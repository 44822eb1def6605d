"""Who answers the attention call, by backend and platform."""

from functools import partial

import pytest

from sgl_jax.kernels.attention import tpu, xla
from sgl_jax.kernels.attention.api import attention_implementation


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_auto_is_xla_where_there_is_no_kernel(platform):
    assert attention_implementation("auto", platform) is xla.ragged_paged_attention


def test_auto_is_the_kernel_on_a_tpu_and_xla_can_still_be_asked_for():
    assert attention_implementation("auto", "tpu") is tpu.ragged_paged_attention
    assert attention_implementation("xla", "tpu") is xla.ragged_paged_attention


def test_a_cpu_simulates_the_kernel():
    chosen = attention_implementation("pallas", "cpu")
    assert isinstance(chosen, partial)
    assert chosen.func is tpu.ragged_paged_attention
    assert chosen.keywords["interpret"]


def test_a_gpu_is_told_that_it_has_no_kernel():
    with pytest.raises(ValueError, match="on a gpu choose xla"):
        attention_implementation("pallas", "gpu")


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"auto, pallas, xla, got 'cuda'"):
        attention_implementation("cuda", "cpu")
