"""Rows whose results are not finite are marked, on every path that draws or scores tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import NON_FINITE, mask_words
from tests.executor.conftest import CONFIG
from tests.executor.step_driver import Driver, Row
from tests.support.non_finite import nan_token, nan_weights

pytestmark = pytest.mark.usefixtures("few_shapes")

BAD = 77  # the token whose embedding is NaN
PLAIN = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, top_p=0.9)
PROMPTS = [[3, 4, 5], [6, BAD, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def untied(make_executor, tmp_path_factory):
    """`make_executor` for a model whose head is not its embedding."""
    folder = tmp_path_factory.mktemp("untied")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    return lambda **settings: make_executor(model_path=str(folder), **settings)


def rows(sampling=PLAIN, prompts=PROMPTS):
    return [Row(0, 1 + i, list(p), sampling, seed=i) for i, p in enumerate(prompts)]


def first_step(executor, sampling=PLAIN, prompts=PROMPTS, chunk=8, **wants):
    """The result of one step over the prompts."""
    plan, _ = Driver(executor, rows(sampling, prompts)).plan(chunk, **wants)
    return executor.result(executor.launch(plan))[0]


@pytest.mark.parametrize("sampling", [PLAIN, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}], ids=str)
def test_a_row_with_nan_is_marked_and_its_neighbours_draw_as_before(untied, sampling, layout):
    executor = untied(**layout)
    clean = first_step(executor, sampling).tokens
    with nan_token(executor, BAD):
        marked = first_step(executor, sampling).tokens
    assert (clean >= 0).all()
    assert marked[1].tolist() == [NON_FINITE]
    np.testing.assert_array_equal(marked[[0, 2]], clean[[0, 2]])


def test_a_chunk_of_a_prompt_is_marked_before_any_logits_are_computed(untied):
    executor = untied()
    prompts = [[3] * 12, [3, BAD, *[3] * 10]]
    with nan_token(executor, BAD):
        marked = first_step(executor, prompts=prompts, chunk=4)
    assert marked.tokens.tolist() == [[-1], [NON_FINITE]]


@pytest.mark.parametrize("part", ["['norm']", "['lm_head']"])
def test_nan_weights_mark_every_row(untied, part):
    executor = untied()
    with nan_weights(executor, part):
        assert first_step(executor).tokens.tolist() == [[NON_FINITE]] * 3
        scored = first_step(executor, num_scored=np.array([2, 0, 3], np.int32), return_logprob=True)
    assert scored.tokens.tolist() == [[NON_FINITE]] * 3
    assert first_step(executor).tokens.min() >= 0


def test_rows_with_a_grammar_are_marked_whatever_tokens_are_allowed(untied):
    executor = untied()
    with nan_token(executor, BAD):
        plan, _ = Driver(executor, rows()).plan(8)
        handle = executor.launch(replace(plan, is_masked=True))
        words = mask_words(executor.sizes.vocab_size)
        allowed = np.zeros((3, 1, words), np.int32)
        allowed[:, :, 0] = 1 << 5
        executor.draw(handle, [allowed])
        tokens = executor.result(handle)[0].tokens
    assert tokens.tolist() == [[5], [NON_FINITE], [5]]
