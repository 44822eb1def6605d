"""Checks of drafts that layers make, whatever the model."""

from collections import Counter

import numpy as np

from sgl_jax.core.sampling_params import SamplingParams
from tests.executor.step_driver import Driver, Row

_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(0, 90, n).tolist() for n in (3, 21, 2, 10)]
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, top_k=40, frequency_penalty=0.3)


def rows(dp_size=1, sampling=GREEDY, prompts=PROMPTS):
    return [
        Row(i % dp_size, 1 + i // dp_size, list(p), sampling, seed=i + 7)
        for i, p in enumerate(prompts)
    ]


def check_drafts(executor, reference, num_steps, started=None):
    """Compare all rows' drafts after each step with the reference's; return how many rows. The rows
    are those of `started`, or of `PROMPTS`."""
    num_drafts = executor.sizes.max_draft_tokens
    driver = Driver(executor, started or rows(executor.sizes.dp_size), num_drafts)
    num_checked = 0
    for _ in range(num_steps):
        plan, order = driver.plan(chunk=4)
        driver._read([(plan, executor.launch(plan), order)])
        table = np.asarray(executor._state.token_table)
        for row in driver.rows:
            if row.output:
                known = row.prompt + row.output
                line = table[row.rank * executor.sizes.num_rows + row.row]
                drafts = line[len(known) : len(known) + num_drafts]
                assert drafts.tolist() == reference.drafts(known, num_drafts)
                num_checked += 1
    return num_checked


def check_same_tokens(plain, drafting, sampling, *, overlap=True):
    """Check that the drafting executor's tokens are the plain one's."""
    expected = Driver(plain, rows(1, sampling)).run(30, chunk=3)
    driver = Driver(drafting, rows(drafting.sizes.dp_size, sampling), num_drafts=3)
    for output, tokens in zip(driver.run(24, 3, overlap), expected, strict=True):
        shared = min(len(output), len(tokens))
        assert shared > 12
        assert output[:shared] == tokens[:shared]


def check_draws(executor, logits, temperature, num_draws):
    """Draw with drafts from a model whose next token depends on the last one alone.

    Of all tokens that follow the same token, each must have its share: a chi-squared test.

    Args:
        logits: [vocab, vocab] of each token's successors.

    Returns the mean tokens of a decode step.
    """
    shares = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    shares /= shares.sum(axis=-1, keepdims=True)
    sampling = SamplingParams(temperature=temperature)
    counts, steps, seed = np.zeros(logits.shape), Counter(), 0
    while counts.sum() < num_draws:
        executor.reset()
        started = [Row(0, 1 + i, [i], sampling, seed + i) for i in range(4)]
        seed += 4
        driver = Driver(executor, started, executor.sizes.max_draft_tokens)
        for output in driver.run(12):
            np.add.at(counts, (output[:-1], output[1:]), 1)
            steps["tokens"] += len(output)
            steps["decode"] += 11
    expected = counts.sum(axis=-1, keepdims=True) * shares
    is_large = expected > 5
    statistic = np.sum((counts - expected)[is_large] ** 2 / expected[is_large])
    degrees = is_large.sum() - is_large.any(axis=-1).sum()
    # The normal approximation of Wilson and Hilferty: 4 standard deviations.
    spread = np.sqrt(2 / (9 * degrees))
    assert (statistic / degrees) ** (1 / 3) < 1 - spread**2 + 4 * spread
    return steps["tokens"] / steps["decode"]
