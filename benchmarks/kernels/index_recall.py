#!/usr/bin/env python
"""Recall of the tokens that an indexer chooses in bfloat16, against float64; needs no TPU.

    python -m benchmarks.kernels.index_recall [--contexts 4096 16384 65536] [--queries 8]

DeepSeek-V3.2's indexer: 64 heads of 128, the 2,048 greatest scores. Queries, keys and weights are
drawn: independent normal numbers, or keys that resemble their neighbours and share a mean, with
queries that resemble some of them. Keys pass a layer norm, as the indexer's do.

Recall is the share of float64's choice that is also chosen if queries and keys are rounded: to
bfloat16, by the engine's code; or keys, or both, to 8-bit floats with a scale for each token and
each head's query. The output's error is the difference of the attention to both choices, relative
to its size (root of the mean square). Attention is drawn, too: its scores follow the indexer's, as
in a trained model, with as much noise.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.kernels.latent_attention.chosen_xla import positions_of_greatest, xla_index_scores
from sgl_jax.kernels.latent_attention.latents import latent_row_size

HEADS, KEY_DIM, TOP_K, VALUE_DIM = 64, 128, 2048, 128
PAGE_SIZE = 128
GREATEST_FLOAT8 = 448.0
GAIN = 4.0  # standard deviation of attention's scores, of which half the variance is noise

Values = NDArray[np.float64]


class Problem(NamedTuple):
    queries: Values  # [queries, heads, key_dim]
    weights: Values  # [queries, heads]
    keys: Values  # [tokens, key_dim]

    def scores(self) -> Values:
        """Return the scores [queries, tokens] in float64."""
        found = [
            weights @ np.maximum(queries @ self.keys.T, 0)
            for queries, weights in zip(self.queries, self.weights, strict=True)
        ]
        return np.stack(found)


def independent(rng: np.random.Generator, num_queries: int, context: int) -> Problem:
    weights = rng.normal(size=(num_queries, HEADS)) * (HEADS * KEY_DIM) ** -0.5
    queries = rng.normal(size=(num_queries, HEADS, KEY_DIM))
    return Problem(queries, weights, _normalized(rng.normal(size=(context, KEY_DIM))))


def correlated(rng: np.random.Generator, num_queries: int, context: int) -> Problem:
    drawn = independent(rng, num_queries, context)
    keys = rng.normal(size=(context, KEY_DIM))
    for position in range(1, context):
        keys[position] += 0.9 * keys[position - 1]
    keys = _normalized(keys + 2 * rng.normal(size=KEY_DIM))
    like = keys[rng.integers(0, context, (num_queries, HEADS))]
    return Problem(drawn.queries + like, np.abs(drawn.weights), keys)


INPUTS: dict[str, Callable[[np.random.Generator, int, int], Problem]] = {
    "independent": independent,
    "correlated": correlated,
}


def _normalized(keys: Values) -> Values:
    centred = keys - keys.mean(axis=1, keepdims=True)
    return centred / centred.std(axis=1, keepdims=True)


def as_float8(x: Values) -> Values:
    """Round to 8-bit floats with a scale for each vector."""
    scales = np.abs(x).max(axis=-1, keepdims=True) / GREATEST_FLOAT8
    rounded: Values = (x / scales).astype(jnp.float8_e4m3fn).astype(np.float64) * scales
    return rounded


def greatest(scores: Values, top_k: int) -> NDArray[np.intp]:
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :top_k], axis=1)


def choose_in_bfloat16(problem: Problem, top_k: int) -> NDArray[np.int32]:
    """Return the choice of the engine's code, from a cache of bfloat16."""
    key_dim = problem.keys.shape[1]
    keys = problem.keys.reshape(-1, PAGE_SIZE, key_dim)
    row_size = latent_row_size(key_dim, 0)
    pages = np.zeros((1, 1 + len(keys), 1, PAGE_SIZE, row_size), jnp.bfloat16)
    pages[0, 1:, 0, :, :key_dim] = keys.astype(jnp.bfloat16)
    scores = xla_index_scores(
        jnp.asarray(problem.queries[None], jnp.bfloat16),
        jnp.asarray(problem.weights[None], jnp.float32),
        jnp.arange(1, 1 + len(keys), dtype=jnp.int32)[None],
        jnp.array([len(problem.keys)], jnp.int32),
        jnp.asarray(pages),
        jnp.int32(0),
    )
    return np.asarray(positions_of_greatest(scores[0, :, : len(problem.keys)], top_k))


class Recall(NamedTuple):
    bfloat16: float
    float8_keys: float
    float8: float  # queries, too
    error: float  # of attention's output, with the choice of bfloat16
    error_of_float8: float


def measure(problem: Problem, rng: np.random.Generator, top_k: int = TOP_K) -> Recall:
    exact = problem.scores()
    right = greatest(exact, top_k)
    rounded = problem._replace(keys=as_float8(problem.keys))
    both = rounded._replace(queries=as_float8(problem.queries))
    choices: list[NDArray[Any]] = [
        choose_in_bfloat16(problem, top_k),
        greatest(rounded.scores(), top_k),
        greatest(both.scores(), top_k),
    ]
    shares = [
        np.mean([len(np.intersect1d(*pair)) for pair in zip(own, right, strict=True)]) / top_k
        for own in choices
    ]
    spread = (exact - exact.mean(axis=1, keepdims=True)) / exact.std(axis=1, keepdims=True)
    logits = GAIN * (spread + rng.normal(size=exact.shape)) / 2**0.5
    values = rng.normal(size=(exact.shape[1], VALUE_DIM))
    outputs = [_attend(logits, values, own) for own in (right, choices[0], choices[2])]
    errors = [
        float(np.sqrt(np.mean((own - outputs[0]) ** 2) / np.mean(outputs[0] ** 2)))
        for own in outputs[1:]
    ]
    return Recall(*map(float, shares), *errors)


def _attend(logits: Values, values: Values, chosen: NDArray[np.integer]) -> Values:
    own = np.take_along_axis(logits, chosen, axis=1)
    shares = np.exp(own - own.max(axis=1, keepdims=True))
    found: Values = np.einsum("qk,qkd->qd", shares, values[chosen])
    return found / shares.sum(axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| inputs | tokens | bfloat16 | float8 keys | float8 | error | error with float8 |")
    print("|---" * 7 + "|")
    for name, draw in INPUTS.items():
        for context in options.contexts:
            rng = np.random.default_rng(options.seed)
            found = measure(draw(rng, options.queries, context), rng)
            shares = found.bfloat16, found.float8_keys, found.float8
            figures = *shares, found.error, found.error_of_float8
            numbers = " | ".join(f"{figure:.4f}" for figure in figures)
            print(f"| {name} | {context:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
