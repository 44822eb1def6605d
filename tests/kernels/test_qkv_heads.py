"""The TPU's kernel that normalises and rotates heads, simulated on the CPU, against float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels import qkv_heads as module
from tests.kernels.simulation import EAGER, LAZY, MODES, TOLERANCE, simulate
from tests.support.long import long, long_but

EPS = 1e-6


class Case(NamedTuple):
    """Sizes of one chip's product."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int = 128
    dtype: Any = jnp.float32
    normalised: tuple[bool, ...] = (True, True, False)  # queries, keys, values
    from_one: bool = False
    kv_parts: int = 2  # 1: keys are values, too; 0: queries alone

    @property
    def width(self):
        return self.kv_heads * (self.group + self.kv_parts) * self.head_dim


CASES = {
    "one KV head": Case(8, 1, 8),
    "bfloat16": Case(48, 2, 4, dtype=jnp.bfloat16),
    "only rotated": Case(16, 1, 4, normalised=(False, False, False)),
    "keys alone normalised": Case(16, 1, 4, normalised=(False, True, False)),
    "three heads of 256": Case(24, 1, 3, head_dim=256),
    "more than 8 queries a token": Case(32, 3, 4, dtype=jnp.bfloat16),
    "weights counted from one": Case(16, 1, 4, dtype=jnp.bfloat16, from_one=True),
    "one token": Case(1, 1, 2),
    "values normalised": Case(16, 2, 2, dtype=jnp.bfloat16, normalised=(True, True, True)),
    "keys as values": Case(16, 2, 2, head_dim=256, normalised=(True, True, True), kv_parts=1),
    "queries alone": Case(16, 1, 4, normalised=(True, False, False), kv_parts=0),
    "an odd number of tokens": Case(7, 2, 1, dtype=jnp.bfloat16),
}


def build(case):
    """Product, cosines and sines, weights of queries, keys and values."""
    rng = np.random.default_rng(case.tokens)
    angles = rng.uniform(0, 6, (case.tokens, case.head_dim // 2))
    weights = [
        rng.normal(size=case.head_dim).astype(case.dtype) if own else None
        for own in case.normalised
    ]
    qkv = rng.normal(size=(case.tokens, case.width)).astype(case.dtype)
    return qkv, np.float32(np.cos(angles)), np.float32(np.sin(angles)), *weights


def run(case, interpret):
    @jax.jit
    def kernel(qkv, cos, sin, *weights):
        norms = [
            None if weight is None else module.HeadNorm(weight, EPS, case.from_one)
            for weight in weights
        ]
        sizes = {"group": case.group, "head_dim": case.head_dim, "num_kv_parts": case.kv_parts}
        with force_tpu_interpret_mode(interpret):
            return module.rotated_heads(qkv, cos, sin, *norms, **sizes)

    return simulate(kernel, *build(case))


def expected(qkv, cos, sin, q_weight, k_weight, v_weight, case):
    heads = np.float64(qkv).reshape(case.tokens, case.kv_heads, -1, case.head_dim)
    cos, sin = (np.float64(x)[:, None] for x in (cos, sin))

    def normed(x, weight):
        x = x.reshape(case.tokens, -1, case.head_dim)
        if weight is not None:
            x = (
                x
                / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
                * (np.float64(weight) + case.from_one)
            )
        return x

    def turned(x, weight):
        first, second = np.split(normed(x, weight), 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q = turned(heads[:, :, : case.group], q_weight)
    if case.kv_parts == 0:
        return (q,)
    k, v = turned(heads[:, :, case.group], k_weight), normed(heads[:, :, -1], v_weight)
    return q, k.reshape(case.tokens, -1), v.reshape(case.tokens, -1)


def check(case, interpret):
    found, want = run(case, interpret), expected(*build(case), case)
    for own, wanted in zip(found, want, strict=True):
        assert own.dtype == case.dtype
        # Rounded once: what is allowed of a number of 1 is allowed of all, in proportion.
        allowed = TOLERANCE[jnp.dtype(case.dtype)]
        np.testing.assert_allclose(np.float64(own), wanted, rtol=allowed, atol=allowed)


# By default in one mode each: the kernel has no DMAs of its own.
BY_DEFAULT = (
    *("bfloat16", "three heads of 256", "weights counted from one"),
    *("keys as values", "queries alone", "an odd number of tokens"),
)


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@pytest.mark.parametrize("name", long_but(CASES, *BY_DEFAULT))
def test_heads_are_those_of_float64(name, mode):
    check(CASES[name], MODES[mode])


@pytest.mark.parametrize("num_tokens", [40, *long(11)])
@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
def test_blocks_of_which_the_last_is_not_full(mode, num_tokens, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK", 16)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 8)
    check(Case(num_tokens, 1, 3), MODES[mode])


def test_values_are_not_touched():
    case = CASES["bfloat16"]
    _, _, v = run(case, LAZY)
    heads = build(case)[0].reshape(case.tokens, case.kv_heads, -1, case.head_dim)
    np.testing.assert_array_equal(v, heads[:, :, -1].reshape(v.shape))


def test_a_block_is_of_whole_turns_and_no_larger_than_it_may_be():
    assert module.block_tokens(5, 2560) == 5
    assert module.block_tokens(128, 2560) == 128
    assert module.block_tokens(100, 2560) == 128
    assert module.block_tokens(161, 12288) == module.TOKENS_AT_ONCE * 2
    assert module.block_tokens(2048, 2560) == module.MAX_BLOCK
    wide = module.block_tokens(2048, 12288)
    assert wide * 12288 <= module.BLOCK_BYTES
    assert wide % module.TOKENS_AT_ONCE == 0
    assert module.block_tokens(2048, 1 << 20) == module.TOKENS_AT_ONCE


def turn_the_other_way(monkeypatch):
    rotated = module._rotated
    monkeypatch.setattr(module, "_rotated", lambda head, cos, sin: rotated(head, cos, -sin))


def leave_heads_as_they_are(monkeypatch):
    monkeypatch.setattr(module, "_normalised", lambda head, norm: head.astype(jnp.float32))


def mistake_one_head_for_another(monkeypatch):
    spread = module._spread
    monkeypatch.setattr(module, "_spread", lambda where, head, *rest: spread(where, 0, *rest))


def add_up_too_few_digits(monkeypatch):
    """As if a square were one number of 8 bits."""
    monkeypatch.setattr(module, "bfloat16_parts", lambda x, count: [x.astype(jnp.bfloat16)])


FAULTS = (
    turn_the_other_way,
    leave_heads_as_they_are,
    mistake_one_head_for_another,
    add_up_too_few_digits,
)


@pytest.mark.parametrize("fault", long_but(FAULTS, FAULTS[0]))
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(CASES["one KV head"], EAGER)
