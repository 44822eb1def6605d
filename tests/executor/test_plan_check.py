"""Plans beyond the engine's sizes are refused with the limit that they break."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import RankPlan, RowAdmission, StepPlan
from sgl_jax.executor.plan_check import check_plan
from tests.support.compiled_loops import compile_loops_together


@pytest.fixture(scope="module", autouse=True)
def _compiled_loops() -> None:
    compile_loops_together()


SIZES = EngineSizes(
    dp_size=1,
    page_size=4,
    pool_pages=(10,),
    num_rows=4,
    max_context_len=32,
    max_step_tokens=16,
    max_prompt_logprob_tokens=6,
    vocab_size=50,
)


def plan(**changes):
    """A decode row, then a prefill chunk of 8 tokens, with `changes`."""
    rank = RankPlan(
        rows=np.array([1, 3], np.int32),
        kv_starts=np.array([5, 0], np.int32),
        q_lens=np.array([1, 8], np.int32),
        samples=np.array([True, False]),
        num_pages=2,
        num_decode=1,
        relayed=np.zeros(2, np.bool_),
    )
    return StepPlan(7, (rank._replace(**changes),))


def ints(*values):
    return np.array(values, np.int32)


def admission(row, length, start=0):
    return RowAdmission(row, np.zeros(length, np.int32), length, SamplingParams(), 0, (), start)


BROKEN = {
    "rows .* outside 1 to 3": {"rows": ints(0, 3)},
    "go outside 1 to 3": {"rows": ints(1, 4)},
    "too small": {"q_lens": ints(1, 0)},
    "too small$": {"kv_starts": ints(-1, 0)},
    "17 query tokens, at most 16": {"q_lens": ints(1, 16)},
    "num_decode 3 does not match": {"num_decode": 3},
    "does not match 2 rows or relayed": {"relayed": np.array([False, True])},
    "7 drafts of a row, at most 0": {"num_decode": 2},
    r"drafts are of shape \(2, 0\), not \(1, 0\)": {"drafts": np.zeros((2, 0), np.int32)},
    "reaches 33 tokens, at most 32": {"kv_starts": ints(32, 0)},
    "num_pages 2: rows of 3 to 8 pages": {"kv_starts": ints(8, 0)},
    "num_pages 9: rows of 2 to 8 pages": {"num_pages": 9},
    "7 prompt tokens are scored, at most 6": {"num_scored": ints(0, 7)},
    r"num_scored \[0 9\] does not match q_lens \[1 8\]": {"num_scored": ints(0, 9)},
    r"num_scored \[3\] does not match": {"num_scored": ints(3)},
    "of 1 decode rows, which have no prompt left": {"num_scored": ints(1, 3)},
    "admits row 4": {"admissions": (admission(4, 3),)},
    "admits 33 tokens to row 2, at most 32": {"admissions": (admission(2, 33),)},
    "admits 33 tokens to row 1, at most 32": {"admissions": (admission(1, 3, start=30),)},
    "admits tokens to row 2 from position -1 on": {"admissions": (admission(2, 3, start=-1),)},
}


def test_a_plan_within_the_sizes_passes():
    check_plan(plan(), SIZES)
    check_plan(plan(admissions=(admission(3, 32), admission(2, 2, start=30))), SIZES)
    check_plan(plan(num_scored=ints(0, 6)), SIZES)


@pytest.mark.parametrize(("message", "changes"), BROKEN.items(), ids=BROKEN)
def test_a_plan_beyond_the_sizes_is_refused(message, changes):
    with pytest.raises(ValueError, match=message) as caught:
        check_plan(plan(**changes), SIZES)
    assert "step 7, rank 0" in str(caught.value)


BROKEN_PAGES = {
    "pages outside 0 to 9": (ints(8), ints(10)),
    "pages outside 0 to 9$": (ints(8), ints(-1)),
    "tables of 32 cells are changed at 0 to 32": (ints(0, 32), ints(1, 2)),
    "tables of 32 cells are changed at -1 to 0": (ints(0, -1), ints(1, 2)),
    "1 pages for 2 cells": (ints(0, 1), ints(1)),
}


@pytest.mark.parametrize(("message", "changes"), BROKEN_PAGES.items(), ids=BROKEN_PAGES)
def test_page_changes_beyond_the_sizes_are_refused(message, changes):
    cells, pages = changes
    broken = replace(plan(), page_changes=PageChanges(cells.astype(np.intp), pages))
    with pytest.raises(ValueError, match=f"step 7: .*{message}"):
        check_plan(broken, SIZES)


STEPS = {"q_lens": ints(1, 1), "num_decode": 2, "samples": np.array([True, True])}
BROKEN_STEPS = {
    "1 numbers of steps for 2 rows": {"num_steps": ints(2)},
    "outside 1 to 4": {"num_steps": ints(1, 5)},
    "outside 1 to 4$": {"num_steps": ints(0, 1)},
    "only decode rows": {"num_steps": ints(1, 2), "num_decode": 1},
    "only decode rows without drafts$": {
        "num_steps": ints(1, 2),
        "samples": np.array([True, False]),
    },
    "reaches 33 tokens, at most 32": {
        "num_steps": ints(1, 4),
        "kv_starts": ints(0, 29),
        "num_pages": 8,
    },
    "num_pages 2: rows of 3 to 8 pages": {"num_steps": ints(4, 1)},
}


@pytest.mark.parametrize(("message", "changes"), BROKEN_STEPS.items(), ids=BROKEN_STEPS)
def test_several_steps_beyond_the_sizes_are_refused(message, changes):
    broken = replace(plan(**STEPS | changes), has_steps=True)
    with pytest.raises(ValueError, match=f"step 7, rank 0: .*{message}"):
        check_plan(broken, SIZES._replace(max_decode_steps=4))


def test_several_steps_are_of_all_ranks_and_without_masks():
    sizes = SIZES._replace(max_decode_steps=4)
    several = replace(plan(**STEPS, num_steps=ints(3, 4)), has_steps=True)
    check_plan(several, sizes)
    with pytest.raises(ValueError, match="a masked plan has one step"):
        check_plan(replace(several, is_masked=True), sizes)
    for broken in (replace(several, has_steps=False), replace(plan(), has_steps=True)):
        with pytest.raises(ValueError, match="either all ranks have several steps, or none"):
            check_plan(broken, sizes)


def test_only_a_masked_plan_returns_hidden_states():
    hidden = plan(returns_hidden=True)
    check_plan(replace(hidden, is_masked=True), SIZES)
    with pytest.raises(ValueError, match="only a masked plan returns hidden states"):
        check_plan(hidden, SIZES)


def test_the_plan_must_have_the_engines_ranks():
    with pytest.raises(ValueError, match="1 ranks, the engine 2"):
        check_plan(plan(), SIZES._replace(dp_size=2))


def test_more_rows_than_the_engine_runs_are_refused():
    n = 4
    rank = plan(
        rows=ints(1, 2, 3, 1),
        kv_starts=np.zeros(n, np.int32),
        q_lens=np.ones(n, np.int32),
        num_pages=2,
    )
    with pytest.raises(ValueError, match="4 rows, at most 3 run"):
        check_plan(rank, SIZES)
