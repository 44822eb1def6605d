"""How Q, K and V become heads: the TPU's kernel where it has whole rows of lanes, else XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sgl_jax.layers.head_sources import Heads
from sgl_jax.layers.kernels import kernels_of
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.qkv_heads import (
    pallas_qkv_heads,
    xla_qkv_heads,
)
from sgl_jax.layers.rotary import Rotation, rotation
from sgl_jax.layers.sources import Tensor
from sgl_jax.models.rope_config import RopeConfig
from tests.layers.modules import declared_shapes

TOKENS, HEADS = 12, Heads(num_q=8, num_stored_kv=2, num_kv=2, head_dim=128)


def heads_by(implementation, heads, *, normalised, from_one=False):
    """q, k and v of random numbers."""
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(TOKENS, heads.num_kv * heads.kv_width)), jnp.float32)
    norm = RMSNorm(Tensor("norm", (HEADS.head_dim,)), 1e-5, jnp.float32, from_one=from_one)
    weights = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), declared_shapes(norm))
        for _ in range(3)
    ]
    graphdef = nnx.graphdef(norm)

    @jax.jit
    def run(qkv, *weights):
        norms = [nnx.merge(graphdef, own) for own in weights] if normalised else [None] * 3
        by = rotation(jnp.arange(TOKENS) * 31, RopeConfig(1e4).inverse_frequencies(heads.head_dim))
        return implementation(qkv, heads, tuple(norms), by)

    return run(qkv, *weights)


@pytest.mark.parametrize(
    ("normalised", "from_one", "num_kv_parts"),
    [
        (True, True, 2),
        (False, False, 2),
        *(
            pytest.param(*own, marks=pytest.mark.long)
            for own in ((True, False, 2), (True, False, 1), (True, False, 0))
        ),
    ],
)
def test_the_kernel_makes_the_same_heads_as_xla(normalised, from_one, num_kv_parts):
    kernel = kernels_of("cpu", "pallas").qkv_heads
    heads = replace(HEADS, num_kv_parts=num_kv_parts)
    found, want = (
        heads_by(how, heads, normalised=normalised, from_one=from_one)
        for how in (kernel, xla_qkv_heads)
    )
    if num_kv_parts == 0:
        assert found[1:] == want[1:] == (None, None)
        found, want = found[:1], want[:1]
    for own, wanted in zip(found, want, strict=True):
        assert own.shape == wanted.shape
        np.testing.assert_allclose(own, wanted, rtol=0, atol=2e-5)


def test_heads_of_half_a_row_of_lanes_are_left_to_xla():
    heads, angles = replace(HEADS, head_dim=64), Rotation(*[jnp.ones((TOKENS, 1, 32))] * 2)
    qkv = jnp.ones((TOKENS, heads.num_kv * heads.kv_width))
    program = jax.make_jaxpr(lambda: pallas_qkv_heads(qkv, heads, (None,) * 3, angles))()
    assert "pallas_call" not in str(program)
