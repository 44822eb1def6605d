"""Expert dispatch in XLA, for every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.lines import ExpertDispatch, Gated, Router, are_few
from sgl_jax.kernels.rms_norm import rms_normalised
from sgl_jax.kernels.row_blocks import matmul, row_wise

LEAST_SUM = 1e-20  # keeps the quotient of weights that all round to zero finite


def xla_choose(
    x: jax.Array, router: Router, layer: jax.Array, is_token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `interface.ChooseExperts`."""
    choice = router.choice
    normalised = rms_normalised(x, router.norm, router.eps, router.from_one)
    matrix = lax.dynamic_index_in_dim(router.matrices, layer, keepdims=False)
    logits = matmul(normalised, matrix, jnp.float32)
    if router.bias is not None:
        logits += router.bias.astype(jnp.float32)

    def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        if choice.is_plain and router.choice_bias is None:
            weights, experts = _most_probable(logits, choice)
        else:
            weights, experts = _best_scored(logits, choice, router.choice_bias)
        return weights.T, experts

    weights, experts = row_wise(choose, logits)
    return normalised, weights.T, jnp.where(is_token, experts.T, logits.shape[1])


def _most_probable(logits: jax.Array, choice: ExpertChoice) -> tuple[jax.Array, jax.Array]:
    """Return (weights [top_k, T], experts [T, top_k]) of a plain choice."""
    if choice.norm_topk_prob:  # the other experts' part of the softmax cancels
        chosen, experts = lax.top_k(logits, choice.top_k)
        return jax.nn.softmax(chosen.T, axis=0), experts
    chosen, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), choice.top_k)
    return chosen.T, experts


def _best_scored(
    logits: jax.Array, choice: ExpertChoice, choice_bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return (weights [top_k, T], experts [T, top_k]) of any choice."""
    scores = (
        jax.nn.sigmoid(logits) if choice.has_sigmoid_scores else jax.nn.softmax(logits, axis=-1)
    )
    # Logits rank scores that round to equal numbers.
    ranked = logits if choice_bias is None else scores + choice_bias
    if choice_bias is None and choice.num_groups > 1:
        ranked = scores
    if choice.num_groups > 1:
        in_groups = ranked.reshape(len(ranked), choice.num_groups, -1)
        best = lax.top_k(in_groups, choice.best_of_group)[0].sum(axis=-1)
        groups = lax.top_k(best, choice.top_groups)[1]
        is_chosen = jnp.any(groups[:, None] == jnp.arange(choice.num_groups)[:, None], axis=-1)
        ranked = jnp.where(is_chosen[..., None], in_groups, -jnp.inf).reshape(ranked.shape)
    experts = lax.top_k(ranked, choice.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1).T
    if choice.norm_topk_prob:
        weights /= weights.sum(axis=0) + LEAST_SUM
    return weights * choice.scale, experts


def xla_sort(experts: jax.Array, first: jax.Array, num_experts: int) -> ExpertDispatch:
    """Implement `interface.SortLines`; the second sort is eliminated if `places` is unused."""
    own = experts - first
    keys = jnp.where((own >= 0) & (own < num_experts), own, num_experts).reshape(-1)
    order = jnp.argsort(keys)
    sizes = jnp.sum(keys == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return ExpertDispatch(
        choices=order,
        places=jnp.argsort(order).reshape(experts.shape),
        group_sizes=sizes,
        num_used=jnp.sum(sizes),
    )


def xla_gather(x: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.GatherLines`."""
    return x[lines.tokens]


def xla_gate(gated: Gated, gate: jax.Array, up: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.GateLines`."""
    del lines
    return gated(gate, up)


def xla_add(results: jax.Array, weights: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.AddLines`."""
    total = jnp.zeros((weights.shape[1], results.shape[1]), jnp.float32)
    return add_by_choice(total, results, weights, lines).astype(results.dtype)


def add_part(
    total: jax.Array, results: jax.Array, weights: jax.Array, part: ExpertDispatch
) -> jax.Array:
    """Add results [lines, width] times weights float32 [top_k, T] to total float32 [T, width].

    Results are arbitrary from `part.num_used` on.
    """
    add = add_by_line if are_few(len(results), weights.size) else add_by_choice
    return add(total, results, weights, part)


def add_by_choice(
    total: jax.Array, results: jax.Array, weights: jax.Array, lines: ExpertDispatch
) -> jax.Array:
    """Add lines to total with one gather for each of the top_k.

    XLA for TPU takes half of the time of a sum over an axis of [T, top_k, width].
    """
    last = jnp.minimum(lines.num_used, len(results))
    for place, weight in zip(lines.places, weights, strict=True):
        is_here = (place >= 0) & (place < last)
        own = results.at[place].get(mode="clip").astype(jnp.float32)
        total += jnp.where(is_here[:, None], own, 0) * weight[:, None]
    return total


def add_by_line(
    total: jax.Array, results: jax.Array, weights: jax.Array, lines: ExpertDispatch
) -> jax.Array:
    """Add lines to total with one scattered row for each line, sorted by token.

    XLA for TPU would sort the rows anyway. A token's lines are added in order, so its sum has the
    same bits for parts of any size.
    """
    assert lines.choices is not None
    numbers = jnp.arange(len(results), dtype=jnp.int32)
    tokens = jnp.where(numbers < lines.num_used, lines.tokens, len(total))
    # Choices are sorted along: a gather of single numbers takes longer.
    tokens, line, choices = lax.sort((tokens, numbers, lines.choices), num_keys=1)
    rows = results[line].astype(jnp.float32) * weights.reshape(-1)[choices][:, None]
    return total.at[tokens].add(rows, mode="drop", indices_are_sorted=True)
