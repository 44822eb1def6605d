"""Scales of an 8-bit cache: each head has its own, and the result is that of K and V unscaled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.xla import ragged_paged_attention
from sgl_jax.layers import attention as attention_module
from sgl_jax.layers.attention import Attention
from sgl_jax.layers.head_sources import FusedHeads, Heads
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.rotary import rotation
from sgl_jax.layers.sources import Tensor
from sgl_jax.models.rope_config import RopeConfig
from tests.layers.modules import declared_shapes, declared_specs
from tests.support.long import long

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 16, 4, 2, 8, 12
CACHE_SPEC = P(None, None, "tensor", None, None)
SCALES = {"k": np.float32([0.125, 4.0]), "v": np.float32([2.0, 0.25])}


def attend(scales=None, *, cache_dtype=jnp.float32, tp=1, v_times=1.0):
    """Attention of one row of TOKENS, all in one page.

    Returns:
        its result [TOKENS, HIDDEN], and the cache's K and V, [2, KV_HEADS, TOKENS, HEAD_DIM].
    """
    heads = Heads(HEADS, KV_HEADS, KV_HEADS, HEAD_DIM)
    width = HEADS * HEAD_DIM
    module = Attention(
        heads,
        Linear(FusedHeads(("q", "k", "v"), (HIDDEN,), heads), jnp.float32, "outputs"),
        Linear(Tensor("o", (width, HIDDEN)), jnp.float32, "inputs"),
        attend=ragged_paged_attention,
        scores=ScoreOptions(HEAD_DIM**-0.5),
        has_kv_scales=scales is not None,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    shapes = declared_shapes(module)
    qkv, output = (
        rng.normal(size=shapes[name]["weight"].shape).astype(np.float32)
        for name in ("qkv", "output")
    )
    qkv.reshape(HIDDEN, KV_HEADS, -1, HEAD_DIM)[:, :, -1] *= v_times
    params = {"qkv": {"weight": qkv}, "output": {"weight": output}}
    if scales is not None:
        params["kv_scales"] = scales
    graphdef = nnx.graphdef(module)

    def forward(params, x, cache):
        row = jnp.zeros(1, jnp.int32)
        batch = AttentionBatch.build(row[None] + 1, row, row + TOKENS, jnp.int32(0), TOKENS)
        by = rotation(batch.positions, RopeConfig(100.0).inverse_frequencies(HEAD_DIM))
        return nnx.merge(graphdef, params)(x, by, batch, cache, jnp.int32(0))

    run = jax.shard_map(
        forward,
        mesh=Mesh(np.array(jax.devices()[:tp]).reshape(1, tp), ("data", "tensor")),
        in_specs=(declared_specs(module), P(), CACHE_SPEC),
        out_specs=(P(), CACHE_SPEC),
        check_vma=False,
    )
    cache = jnp.zeros((1, 2, 2 * KV_HEADS, TOKENS, HEAD_DIM), cache_dtype)
    out, cache = jax.jit(run)(params, x, cache)
    # Each chip's heads are its K heads, then its V heads.
    by_chip = np.asarray(cache[0, 1], np.float32).reshape(tp, 2, -1, TOKENS, HEAD_DIM)
    return np.asarray(out), by_chip.swapaxes(0, 1).reshape(2, KV_HEADS, TOKENS, HEAD_DIM)


def assert_close(actual, expected, rtol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("tp", [1, 2])
def test_scales_change_what_is_cached_and_not_the_result(tp):
    plain_out, plain = attend()
    out, cached = attend(SCALES, tp=tp)
    assert_close(out, plain_out)
    for kind, scales in enumerate((SCALES["k"], SCALES["v"])):
        for head in range(KV_HEADS):
            assert_close(cached[kind, head] * scales[head], plain[kind, head])


@pytest.mark.parametrize("wrong_call", [0, 1], ids=["queries", "result"])
def test_the_scale_of_another_head_is_noticed(wrong_call, monkeypatch):
    expected, _ = attend()
    times, calls = attention_module._times, itertools.count()

    def of_another_head(x, scales):
        return times(x, scales[::-1] if next(calls) == wrong_call else scales)

    monkeypatch.setattr(attention_module, "_times", of_another_head)
    with pytest.raises(AssertionError):
        assert_close(attend(SCALES)[0], expected, rtol=0.1)


@pytest.mark.parametrize("v_times", [0.0001, *long(100.0)])
def test_a_scale_brings_values_into_the_range_of_8_bits(v_times):
    expected, _ = attend(v_times=v_times)

    def error(scale):
        scales = {"k": np.ones(KV_HEADS, np.float32), "v": np.full(KV_HEADS, scale, np.float32)}
        out, _ = attend(scales, cache_dtype=jnp.int8, v_times=v_times)
        return np.abs(out - expected).max() / np.abs(expected).max()

    assert error(scale=np.exp2(np.round(np.log2(v_times)))) < 0.1
    assert error(scale=1.0) > 0.3
