"""Queries and keys normalised and rotated on TPU, in the order that attention reads.

XLA takes a dozen operations for this, each of which costs at least about 2,000 cycles,
and more in a chunk of prompt tokens. Here it is one Pallas kernel, which reads the product of Q, K
and V once and writes each of them once.

In the product, a token's heads are side by side in lanes: for each KV head its queries, its key and
its value. It may have no values, which are then made of keys before their norm and rotation, or
neither, for a layer that reads another layer's cache. K and V are returned in the same layout,
which the cache's write reads. The queries of a token are returned as a matrix [q_heads, head_dim]:
each head's queries are first stored to vector memory with a stride of one matrix, in float32, since
rows of fewer than 32 bits cannot be stored with a stride.

Grid: one step for each block of tokens. Everything is computed in float32 and rounded once.

Buffers, with R tokens at a time, S the query heads of a token padded to whole registers:
    qkv       [block, kv_heads * (group + parts) * D]   copied by the grid, as are all but by_token
    cos, sin  float32 [block, D / 2]
    q         [block, q_heads, D]
    k, v      [block, kv_heads * D]
    by_token  float32 [D / 128, R * S, 128]
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.pallas_tpu import bfloat16_parts
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

# The kernel's names in compiled programs.
NORMALISED_NAME, PLAIN_NAME = "qkv_heads_normalised", "qkv_heads"

TOKENS_AT_ONCE = 64
BLOCK_BYTES = 3 << 19  # of the product; vector memory holds two blocks, and two of the results
MAX_BLOCK = 256


class HeadNorm(NamedTuple):
    """Root mean square normalisation of each head."""

    weight: Any  # [head_dim]; [1, head_dim] in the kernel
    eps: float
    from_one: bool = False  # if True, the factor is 1 + weight


class _Shape(NamedTuple):
    """The layout of a token's product."""

    kv_heads: int
    group: int
    head_dim: int
    kv_parts: int  # heads next to a KV head's queries

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def columns(self, kv_head: int, index: int) -> slice:
        """Return the columns of a KV head's query `index`; its key and value follow its queries."""
        first = (kv_head * (self.group + self.kv_parts) + index) * self.head_dim
        return slice(first, first + self.head_dim)


def block_tokens(num_tokens: int, token_bytes: int) -> int:
    """Return the tokens of one grid step, for a product of `token_bytes` bytes a token: all of
    them, or a multiple of `TOKENS_AT_ONCE`. The last block may be larger than what is left."""
    if num_tokens <= TOKENS_AT_ONCE:
        return num_tokens
    needed, affordable = (
        own // TOKENS_AT_ONCE * TOKENS_AT_ONCE
        for own in (num_tokens + TOKENS_AT_ONCE - 1, BLOCK_BYTES // token_bytes)
    )
    return min(needed, max(TOKENS_AT_ONCE, affordable), MAX_BLOCK)


def rotated_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    v_norm: HeadNorm | None = None,
    *,
    group: int,
    head_dim: int,
    num_kv_parts: int = 2,
) -> tuple[jax.Array, ...]:
    """Split Q, K and V, normalise those with norms, and rotate queries and keys.

    Args:
        qkv: [T, kv_heads * (group + num_kv_parts) * head_dim]; for each KV head, its queries, key
            and value.
        cos, sin: float32 [T, head_dim / 2] of each token's angles.
        q_norm, k_norm, v_norm: the norms of queries, of keys and of values, or None.
        group: number of queries per KV head.
        head_dim: a multiple of 128.
        num_kv_parts: 2, or 1 if keys give values, too, or 0 if there are only queries.

    Returns:
        q [T, kv_heads * group, head_dim], k and v [T, kv_heads * head_dim], or q; in qkv's dtype.
    """
    num_tokens, width = qkv.shape
    kv_heads = width // ((group + num_kv_parts) * head_dim)
    shape = _Shape(kv_heads, group, head_dim, num_kv_parts)
    block = block_tokens(num_tokens, width * qkv.dtype.itemsize)
    at_once = min(block, TOKENS_AT_ONCE)
    stride = -(-shape.q_heads // SUBLANES) * SUBLANES

    def by_token(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, *dims), lambda i: (i, *[0] * len(dims)))

    def array(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, *dims), qkv.dtype)

    inputs = (qkv, cos, sin)
    num_kv = 2 if num_kv_parts else 0
    results = (array(shape.q_heads, head_dim), *[array(kv_heads * head_dim)] * num_kv)
    norms = (q_norm, k_norm, v_norm)
    weights = tuple(None if norm is None else norm.weight.reshape(1, -1) for norm in norms)
    whole = pl.BlockSpec((1, head_dim), lambda i: (0, 0))
    kernel = pl.pallas_call(
        partial(
            _kernel,
            shape=shape,
            norms=tuple(None if norm is None else norm._replace(weight=None) for norm in norms),
        ),
        name=PLAIN_NAME if q_norm is k_norm is v_norm is None else NORMALISED_NAME,
        out_shape=[results],
        grid=(-(-num_tokens // block),),
        in_specs=[
            tuple(by_token(*x.shape[1:]) for x in inputs),
            tuple(None if weight is None else whole for weight in weights),
        ],
        out_specs=[tuple(by_token(*x.shape[1:]) for x in results)],
        scratch_shapes=[pltpu.VMEM((head_dim // LANES, at_once * stride, LANES), jnp.float32)],
    )
    (heads,) = kernel(inputs, weights)
    return tuple(heads)


def _kernel(
    inputs: tuple[Any, ...],
    weights: tuple[Any, ...],
    results: tuple[Any, ...],
    by_token: Any,
    *,
    shape: _Shape,
    norms: tuple[HeadNorm | None, ...],
) -> None:
    (qkv, cos, sin), (q, *kv) = inputs, results
    at_once = min(qkv.shape[0], TOKENS_AT_ONCE)
    q_norm, k_norm, v_norm = (
        None if norm is None else norm._replace(weight=_factor(weight, norm.from_one))
        for weight, norm in zip(weights, norms, strict=True)
    )

    @pl.loop(0, qkv.shape[0] // at_once)
    def _(i: jax.Array) -> None:
        tokens = pl.ds(pl.multiple_of(i * at_once, at_once), at_once)
        angles = _twice(cos[tokens], 1.0), _twice(sin[tokens], -1.0)
        for head in range(shape.kv_heads):
            own = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            if kv:
                k, v = kv
                places = shape.group, shape.group + shape.kv_parts - 1
                key, value = (qkv[tokens, shape.columns(head, place)] for place in places)
                k[tokens, own] = _rotated(_normalised(key, k_norm), *angles).astype(k.dtype)
                v[tokens, own] = (
                    value if v_norm is None else _normalised(value, v_norm).astype(v.dtype)
                )
            for n in range(shape.group):
                query = _normalised(qkv[tokens, shape.columns(head, n)], q_norm)
                _spread(by_token, head * shape.group + n, at_once, _rotated(query, *angles))
        for part, lanes in enumerate(_parts(shape.head_dim)):
            queries = by_token[part].reshape(at_once, -1, LANES)[:, : shape.q_heads]
            q[tokens, :, lanes] = queries.astype(q.dtype)


def _parts(head_dim: int) -> list[slice]:
    return [slice(first, first + LANES) for first in range(0, head_dim, LANES)]


def _twice(half: jax.Array, sign: float) -> jax.Array:
    """Repeat `half` [R, D / 2] for both halves of a head, the first multiplied by `sign`."""
    return jnp.concatenate([half * sign, half], axis=1)


def _factor(weight: Any, from_one: bool) -> jax.Array:
    """Return the factor of normalised heads, float32 [1, D]."""
    wide = weight[...].astype(jnp.float32)
    return wide + 1.0 if from_one else wide


def _normalised(head: jax.Array, norm: HeadNorm | None) -> jax.Array:
    """Normalise a head of some tokens, [R, D], in float32."""
    wide = head.astype(jnp.float32)
    if norm is None:
        return wide
    # The idle matrix unit sums over the lanes, and returns the sum in all of them. It multiplies
    # bfloat16: the square of a bfloat16 is the sum of two of these, of a float32 three.
    squares = jnp.concatenate(bfloat16_parts(wide * wide, head.dtype.itemsize // 2 + 1), axis=1)
    ones = jnp.ones((squares.shape[1], wide.shape[1]), jnp.bfloat16)
    total = lax.dot(squares, ones, preferred_element_type=jnp.float32)
    return wide * lax.rsqrt(total * (1 / wide.shape[1]) + norm.eps) * norm.weight


def _rotated(head: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return head * cos + pltpu.roll(head, head.shape[1] // 2, 1) * sin


def _spread(by_token: Any, head: int, num_tokens: int, rows: jax.Array) -> None:
    """Store a query head's rows, [R, D], at their places in the tokens' matrices."""
    stride = by_token.shape[1] // num_tokens
    for part, lanes in enumerate(_parts(rows.shape[1])):
        by_token[part, pl.ds(head, num_tokens, stride)] = rows[:, lanes]
