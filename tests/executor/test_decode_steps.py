"""Several decode steps in one launch compute and write what as many launches do, and no more."""

import json

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import NON_FINITE
from tests.executor.conftest import CONFIG
from tests.executor.step_driver import GREEDY, Driver, Row
from tests.support.non_finite import nan_token

pytestmark = pytest.mark.usefixtures("few_shapes")

RANDOM = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5)
STOP = 95  # of `step_driver`
# The stop token is drawn as soon as it may be.
ENDING = SamplingParams(temperature=0.0, min_new_tokens=4, logit_bias={STOP: 100.0})
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
MOST = 8


@pytest.fixture
def executor(make_executor):
    return make_executor(num_decode_steps=str(MOST))


def started(executor, samplings):
    """Rows after the step of their prompts, with a token each."""
    executor.reset()
    dp_size = executor.sizes.dp_size
    rows = [
        Row(i % dp_size, 1 + i // dp_size, list(prompt), sampling, seed=i)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    driver = Driver(executor, rows)
    driver.run(1)
    return driver


def run_several(driver, num_steps):
    """The tokens of one launch, by row, with so many steps of each."""
    plan, order = driver.plan(8)
    by_row = dict(zip(map(id, driver.rows), num_steps, strict=True))
    ranks = tuple(
        rank._replace(num_steps=np.array([by_row[id(row)] for row in rows], np.int32))
        for rank, rows in zip(plan.ranks, order, strict=True)
    )
    results = driver.executor.result(
        driver.executor.launch(type(plan)(1, ranks, plan.page_changes, has_steps=True))
    )
    tokens = {}
    for result, rows in zip(results, order, strict=True):
        assert result.tokens.shape == (len(rows), MOST)
        tokens |= {id(row): own for row, own in zip(rows, result.tokens.tolist(), strict=True)}
    return [tokens[id(row)] for row in driver.rows]


def padded(tokens):
    return tokens + [-1] * (MOST - len(tokens))


def keys_and_values(executor, row):
    """[layers, heads, tokens, head_dim] of a row of rank 0, whose pages are its own."""
    per_row = executor.sizes.pages_per_row
    pool = np.asarray(executor._state.kv_pools[0])
    pages = pool[:, 1 + (row.row - 1) * per_row :][:, :per_row]
    return np.moveaxis(pages, 1, 2).reshape(*pages.shape[:1], pages.shape[2], -1, pages.shape[4])


@pytest.mark.parametrize("num_steps", [[8, 8, 8], [1, 8, 3]], ids=str)
def test_tokens_and_kv_are_those_of_single_steps_and_a_row_at_its_end_writes_nothing(
    executor, num_steps
):
    driver = started(executor, [GREEDY, RANDOM, RANDOM])
    single = [tokens[1:] for tokens in driver.run(MOST, overlap=True)]
    kv = [keys_and_values(executor, row) for row in driver.rows]
    driver = started(executor, [GREEDY, RANDOM, RANDOM])
    several = run_several(driver, num_steps)
    assert several == [padded(own[:count]) for own, count in zip(single, num_steps, strict=True)]
    for row, own, count in zip(driver.rows, kv, num_steps, strict=True):
        end = len(row.prompt) + count
        found = keys_and_values(executor, row)
        np.testing.assert_array_equal(found[:, :, :end], own[:, :, :end])
        assert not found[:, :, end:].any()


def test_a_row_ends_at_a_stop_token_but_not_before_its_least_number(executor):
    several = run_several(started(executor, [ENDING, GREEDY, GREEDY]), [8, 8, 8])
    # One token came with the prompt, and three more may not be the last.
    assert several[0][3:] == [STOP] + [-1] * (MOST - 4)
    assert STOP not in several[0][:3]
    assert all(token >= 0 for token in several[1] + several[2])


def test_a_row_that_had_ended_takes_one_step_and_writes_the_kv_of_its_stop_token(executor):
    driver = started(executor, [ENDING, GREEDY, GREEDY])
    first = run_several(driver, [8, 2, 2])
    row = driver.rows[0]
    length = len(row.prompt) + 1 + first[0].index(STOP) + 1
    for each, gained in zip(driver.rows, first, strict=True):
        each.committed += sum(token >= 0 for token in gained) - 1
        each.length = each.committed + 1
    assert not keys_and_values(executor, row)[:, :, length - 1 :].any()
    second = run_several(driver, [8, 8, 8])
    found = keys_and_values(executor, row)
    assert found[:, :, length - 1].any()
    assert not found[:, :, length:].any()
    assert [token >= 0 for token in second[0]] == [True] + [False] * (MOST - 1)


def test_a_row_that_turns_non_finite_in_a_later_step_is_marked_first(make_executor, tmp_path):
    # A head of its own: only rows that read the token turn non-finite.
    config = CONFIG | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    executor = make_executor(model_path=str(tmp_path), num_decode_steps=str(MOST))
    driver = started(executor, [GREEDY, GREEDY, RANDOM])
    clean = run_several(driver, [8, 8, 8])
    bad = next(token for token in clean[0] if token not in clean[1] + clean[2])
    driver = started(executor, [GREEDY, GREEDY, RANDOM])
    with nan_token(executor, bad):
        marked = run_several(driver, [8, 8, 8])
    assert clean[0].index(bad) < MOST - 1
    assert marked == [[NON_FINITE] + [-1] * (MOST - 1), *clean[1:]]


@pytest.mark.long
def test_ranks_take_as_many_steps_as_the_longest_row_of_any(make_executor):
    executor = make_executor(num_decode_steps=str(MOST))
    driver = started(executor, [GREEDY, RANDOM, RANDOM])
    expected = [tokens[1:] for tokens in driver.run(MOST)]
    executor = make_executor(num_decode_steps=str(MOST), dp_size=2)
    several = run_several(started(executor, [GREEDY, RANDOM, RANDOM]), [2, 8, 1])
    assert several == [padded(own[:n]) for own, n in zip(expected, [2, 8, 1], strict=True)]
