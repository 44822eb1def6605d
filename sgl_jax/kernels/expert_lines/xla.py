"""Lines of experts in XLA, for every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.expert_lines.lines import ExpertLines, Gated, Router
from sgl_jax.kernels.rms_norm import rms_normalised


def xla_choose(
    x: jax.Array, router: Router, layer: jax.Array, is_token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `interface.ChooseExperts`."""
    rule = router.rule
    normalised = rms_normalised(x, router.norm, rule.eps, rule.from_one)
    logits = normalised @ lax.dynamic_index_in_dim(router.matrices, layer, keepdims=False)
    if router.bias is not None:
        logits += router.bias
    logits = logits.astype(jnp.float32)
    if rule.norm_topk_prob:  # the other experts' part of the softmax cancels
        chosen, experts = lax.top_k(logits, rule.top_k)
        weights = jax.nn.softmax(chosen.T, axis=0)
    else:
        chosen, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), rule.top_k)
        weights = chosen.T
    return normalised, weights, jnp.where(is_token, experts.T, logits.shape[1])


def xla_sort(experts: jax.Array, first: jax.Array, num_experts: int) -> ExpertLines:
    """See `interface.SortLines`.

    By two sorts: `xla_gather` needs the lines in order.
    """
    num_tokens, own = experts.shape[1], experts - first
    keys = jnp.where((own >= 0) & (own < num_experts), own, num_experts).reshape(-1)
    order = jnp.argsort(keys)
    sizes = jnp.sum(keys == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return ExpertLines(
        tokens=order % num_tokens,
        places=jnp.argsort(order).reshape(experts.shape),
        group_sizes=sizes,
        num_used=jnp.sum(sizes),
    )


def xla_gather(x: jax.Array, lines: ExpertLines) -> jax.Array:
    """See `interface.GatherLines`."""
    assert lines.tokens is not None
    return x[lines.tokens]


def xla_gate(gated: Gated, gate: jax.Array, up: jax.Array, lines: ExpertLines) -> jax.Array:
    """See `interface.GateLines`."""
    del lines
    return gated(gate, up)


def xla_add(results: jax.Array, weights: jax.Array, lines: ExpertLines) -> jax.Array:
    """See `interface.AddLines`.

    A gather for each of the top_k: XLA for TPU adds whole [T, width] in half of the time that it
    takes for a sum over an axis of [T, top_k, width].
    """
    total = jnp.zeros((weights.shape[1], results.shape[1]), jnp.float32)
    last = jnp.minimum(lines.num_used, len(results))
    for place, weight in zip(lines.places, weights, strict=True):
        is_here = (place >= 0) & (place < last)
        own = results.at[place].get(mode="clip").astype(jnp.float32)
        total += jnp.where(is_here[:, None], own, 0) * weight[:, None]
    return total.astype(results.dtype)
