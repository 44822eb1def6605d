"""Kernels compared with the XLA reference, on the device, within the steps that an engine runs.

Each call of a model's kernels is replaced by one that also computes the reference from the same
inputs, and reports their difference to the host. So kernels are compared at the shapes of serving,
with real page tables and states, where other tests have problems made up for them.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import NULL_PAGE
from sgl_jax.kernels.attention.cache_dtype import as_float32
from sgl_jax.kernels.expert_dispatch.lines import ExpertDispatch
from sgl_jax.kernels.gated_delta.batch import NO_SLOT, StateBatch
from sgl_jax.layers.kernels import Kernels, calls_of, kernels_from, kernels_of

# Largest difference allowed, relative to the largest number of the reference. Float32 products of a
# TPU are sums of bfloat16 products, in another order.
_TOLERANCES = MappingProxyType({jnp.dtype(jnp.float32): 5e-3})
_TOLERANCE = 3e-2  # of 16-bit results


class _Pair(NamedTuple):
    """A result of a kernel and of the reference."""

    got: jax.Array
    expected: jax.Array
    is_used: jax.Array | None = None  # bool, over the first axis; None: all numbers count
    is_mean: bool = False  # compare sums of magnitudes instead of the largest


@dataclass
class KernelError:
    """The comparisons of one kernel so far.

    Attributes:
        is_reference: True if the engine uses the reference, so that only non-finite numbers count.
        error: largest error, relative to the largest number of the reference.
        num_compared: comparisons with at least one number.
        num_not_finite: comparisons with a number that is finite only in the reference.
    """

    is_reference: bool
    tolerance: float
    error: float = 0.0
    num_compared: int = 0
    num_not_finite: int = 0

    @property
    def has_failed(self) -> bool:
        return self.num_not_finite > 0 or not self.error <= self.tolerance


class KernelErrors:
    """Collects the errors of kernels; the device's callbacks come from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[str, KernelError] = {}

    @property
    def by_kernel(self) -> Mapping[str, KernelError]:
        """Return the errors of all kernels that were traced, after those under way have arrived."""
        jax.effects_barrier()
        with self._lock:
            return dict(self._errors)

    def compared(self, kernels: Kernels, only: str | None = None) -> Kernels:
        """Return `kernels` that compare themselves with the reference; with `only`, that kernel and
        references of all others."""
        references = calls_of(kernels_of("gpu", "xla"))
        calls = {
            name: self._comparing(name, call, references[name])
            if only in (None, name)
            else references[name]
            for name, call in calls_of(kernels).items()
        }
        return kernels_from(calls)

    def _comparing(
        self, name: str, call: Callable[..., Any], reference: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            is_reference = call is reference
            pairs = _pairs(name, reference, args, kwargs, found, is_reference)
            tolerance = min(_TOLERANCES.get(pair.got.dtype, _TOLERANCE) for pair in pairs)
            with self._lock:
                self._errors.setdefault(name, KernelError(is_reference, tolerance))
            for pair in pairs:
                jax.debug.callback(partial(self._add, name), *_measured(pair))
            return found

        return run

    def _add(self, name: str, error: Any, is_not_finite: Any, is_compared: Any) -> None:
        with self._lock:
            own = self._errors[name]
            own.error = max(own.error, float(error))
            own.num_not_finite += bool(is_not_finite)
            own.num_compared += bool(is_compared)


def _measured(pair: _Pair) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the relative error, whether a number is not finite, and whether any was compared."""
    got, expected = as_float32(pair.got), as_float32(pair.expected)
    counts = jnp.isfinite(expected)
    if pair.is_used is not None:
        counts &= pair.is_used.reshape(-1, *(1,) * (got.ndim - 1))
    is_finite = jnp.isfinite(got)
    apart = jnp.where(counts & is_finite, jnp.abs(got - expected), 0)
    size = jnp.where(counts, jnp.abs(expected), 0)
    reduce = jnp.sum if pair.is_mean else jnp.max
    scale = reduce(size)
    error = reduce(apart) / jnp.where(scale > 0, scale, 1)
    return error, jnp.any(counts & ~is_finite), jnp.any(counts)


def _pairs(
    name: str,
    reference: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Any,
    is_reference: bool,
) -> list[_Pair]:
    """Compute the reference, and pair the results that count. A pool is cut to the layer's part
    first, since the reference would copy it."""
    positions, pairs = _CHECKS[name]
    given = list(args)
    layer = None
    if positions is not None:
        pool, layer = (args[position] for position in positions)
        given[positions[0]] = lax.dynamic_slice_in_dim(pool, layer, 1)
        given[positions[1]] = jnp.int32(0)
        found = found[0], lax.dynamic_index_in_dim(found[1], layer, keepdims=False)
    if name == "expert_dispatch.gather":
        given[1] = _with_choices(args[1])
    if is_reference:
        return pairs(args, found, found)
    with jax.default_matmul_precision("highest"):
        expected = reference(*given, **kwargs)
    if positions is not None:
        expected = expected[0], expected[1][0]
    return pairs(args, found, expected)


def _all(args: Any, got: Any, expected: Any) -> list[_Pair]:
    return [
        _Pair(*own) for own in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    ]


def _attention(args: Any, got: Any, expected: Any) -> list[_Pair]:
    batch, pages = args[5], jnp.arange(len(got[1]))
    return [_Pair(got[0], expected[0], batch.valid), _Pair(got[1], expected[1], pages != NULL_PAGE)]


def _states(args: Any, got: Any, expected: Any) -> list[_Pair]:
    batch = next(own for own in args if isinstance(own, StateBatch))
    is_decode = jnp.arange(len(batch.q_lens)) < batch.num_decode
    ahead = jnp.arange(1 + batch.max_draft_tokens)
    of_rows = jnp.where(
        is_decode[:, None] & (ahead < batch.q_lens[:, None]),
        batch.slots_out[:, None] + ahead,
        NO_SLOT,
    )
    is_chunk = jnp.arange(len(batch.chunk_rows)) < batch.num_chunks
    of_chunks = [
        jnp.where(is_chunk, slots, NO_SLOT)
        for slots in (batch.chunk_targets, batch.chunk_snapshots)
    ]
    slots = jnp.concatenate([of_rows.reshape(-1), *of_chunks])
    own, right = (states[jnp.maximum(slots, 0)] for states in (got[1], expected[1]))
    return [_Pair(got[0], expected[0], batch.valid), _Pair(own, right, slots != NO_SLOT)]


def _groups(args: Any, got: Any, expected: Any) -> list[_Pair]:
    return [_Pair(got, expected, jnp.arange(len(got)) < jnp.sum(args[3]))]


def _used_lines(args: Any, got: Any, expected: Any) -> list[_Pair]:
    lines: ExpertDispatch = args[-1]
    return [_Pair(got, expected, jnp.arange(len(got)) < lines.num_used)]


def _choice(args: Any, got: Any, expected: Any) -> list[_Pair]:
    """Compare each expert's share of each token. Two experts that are almost equally probable may
    change places, which changes the sum little."""
    num_experts = args[1].matrices.shape[2]

    def shares(weights: jax.Array, experts: jax.Array) -> jax.Array:
        tokens = jnp.arange(weights.shape[1])
        return jnp.zeros((len(tokens), num_experts + 1)).at[tokens, experts].add(weights)

    is_token = args[3]
    own, right = (shares(*found[1:]) for found in (got, expected))
    return [_Pair(got[0], expected[0], is_token), _Pair(own, right, is_token, is_mean=True)]


def _sorted(args: Any, got: ExpertDispatch, expected: ExpertDispatch) -> list[_Pair]:
    """Compare the experts whose lines the places are among, and that no place is used twice. The
    order of an expert's lines is free."""
    ends = jnp.cumsum(expected.group_sizes)

    def facts(own: ExpertDispatch) -> tuple[jax.Array, ...]:
        is_used = (own.places >= 0) & (own.places < expected.num_used)
        used = jnp.where(is_used, own.places, expected.num_used)
        expert = jnp.searchsorted(ends, used, side="right")
        return expert, jnp.sort(used, axis=None), own.group_sizes, own.num_used[None]

    # Whole numbers count as right or wrong.
    wrong = [a != b for a, b in zip(facts(got), facts(expected), strict=True)]
    return [_Pair(own.astype(jnp.float32), jnp.zeros(own.shape)) for own in wrong]


def _with_choices(lines: ExpertDispatch) -> ExpertDispatch:
    if lines.choices is not None:
        return lines
    numbers = jnp.arange(lines.places.size, dtype=jnp.int32)
    places = lines.places.reshape(-1)
    places = jnp.where((places >= 0) & (places < lines.num_used), places, lines.num_lines)
    choices = jnp.zeros_like(numbers).at[places].set(numbers, mode="drop")
    return lines._replace(choices=choices)


_Pairs = Callable[[Any, Any, Any], list[_Pair]]
# The positions of a pool and its layer among a call's arguments, and the results that count.
_CHECKS: Mapping[str, tuple[tuple[int, int] | None, _Pairs]] = MappingProxyType(
    {
        "attend": ((3, 4), _attention),
        "attend_latents": ((3, 4), _attention),
        "qkv_heads": (None, _all),
        "multiply_quantized": (None, _all),
        "multiply_groups": (None, _groups),
        "gated_delta": ((1, 2), _states),
        "causal_conv": ((2, 3), _states),
        "state_space": ((1, 2), _states),
        "expert_dispatch.choose": (None, _choice),
        "expert_dispatch.sort": (None, _sorted),
        "expert_dispatch.gather": (None, _used_lines),
        "expert_dispatch.gate": (None, _used_lines),
        "expert_dispatch.add": (None, _all),
    }
)
