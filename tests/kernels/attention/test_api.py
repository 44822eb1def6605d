"""Who answers the attention call, by backend."""

import pytest

from sgl_jax.kernels.attention import tpu, xla
from sgl_jax.kernels.attention.api import attention_implementation


def test_the_kernel_and_xla_are_what_they_are_called():
    assert attention_implementation("pallas") is tpu.ragged_paged_attention
    assert attention_implementation("xla") is xla.ragged_paged_attention


def test_the_kernel_can_be_simulated():
    chosen = attention_implementation("pallas", simulate=True)
    assert chosen.__wrapped__ is tpu.ragged_paged_attention  # type: ignore[attr-defined]


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"pallas, xla, got 'cuda'"):
        attention_implementation("cuda")
