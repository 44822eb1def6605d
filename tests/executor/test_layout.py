"""Every rank's rows arrive at their own place, padding is harmless, and nothing is reused."""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageChanges, PageTables
from sgl_jax.core.step_plan import NO_DRAFT, RankPlan, StatePlan
from sgl_jax.executor.layout import DPLayout


def rank_plan(num_rows, first=1, pages=3, **wants):
    ids = np.arange(first, first + num_rows, dtype=np.int32)
    return RankPlan(
        rows=ids,
        kv_starts=ids * 10,
        q_lens=ids + 1,
        samples=ids % 2 == 0,
        num_pages=pages,
        num_decode=num_rows - 1,
        relayed=ids % 3 == 0,
        **wants,
    )


NUM_ROWS = 12


def tables(dp_size, pages_per_row):
    """Of rows that all list pages of their own."""
    sizes = EngineSizes(dp_size, 1, (10_000,), NUM_ROWS, pages_per_row, 100, 1, 100)
    rows = [(rank, row) for rank in range(dp_size) for row in range(1, NUM_ROWS)]
    page_tables = PageTables(sizes)
    page_tables.apply(
        PageChanges.listing(sizes, {key: [listed(*key)[:pages_per_row]] for key in rows})
    )
    return page_tables


def listed(rank, row):
    return [1000 * rank + 10 * row + column for column in range(1, 6)]


def test_each_rank_reads_its_own_rows_and_padding_is_the_null_row():
    layout = DPLayout(dp_size=3, rows_per_rank=4, pages_per_row=5, num_groups=1)
    num_scored = np.array([0, 0, 3, 5], np.int32)
    scored = rank_plan(4, first=7, return_logprob=True, num_scored=num_scored)
    plans = [rank_plan(2), rank_plan(0), scored]
    step_input = layout.pack(plans, tables(dp_size=3, pages_per_row=5))
    for rank, plan in enumerate(plans):
        n = len(plan.rows)
        seen = layout.unpack_controls(step_input.controls[rank])
        for name in ("rows", "kv_starts", "q_lens", "samples", "relayed"):
            np.testing.assert_array_equal(getattr(seen, name)[:n], getattr(plan, name))
            assert not getattr(seen, name)[n:].any()
        assert seen.num_scored.tolist() == ([0, 0, 3, 5] if rank == 2 else [0] * 4)
        assert seen.any_scored
        assert seen.num_decode == plan.num_decode or n == 0
        assert bool(seen.returns_logprobs) == plan.return_logprob
        table = step_input.page_tables.reshape(3, 4, 5)[rank]
        assert table[:n, :3].tolist() == [listed(rank, row)[:3] for row in plan.rows.tolist()]
        assert not table[n:].any()
        assert not table[:, 3:].any()


def test_drafts_that_the_host_knows_arrive_beside_states():
    layout = DPLayout(
        2, rows_per_rank=3, pages_per_row=5, num_groups=1, max_snapshots=2, max_drafts=2
    )
    states = StatePlan(np.array([7, 8]), np.array([1, 0]), np.array([[0, 4, 9]]))
    known = rank_plan(2, states=states, drafts=np.array([[5, NO_DRAFT]]))
    step_input = layout.pack([rank_plan(2), known], tables(dp_size=2, pages_per_row=5))
    guessing, seen = (layout.unpack_controls(words) for words in step_input.controls)
    assert (guessing.drafts == NO_DRAFT).all()
    assert seen.drafts.shape == (3, 2)
    assert seen.drafts[0].tolist() == [5, NO_DRAFT]
    assert seen.states.sources[:2].tolist() == [7, 8]
    assert seen.states.halves[:2].tolist() == [1, 0]
    assert seen.states.snapshots.tolist() == [[0, 4, 9], [0, 0, 0]]
    assert seen.num_decode == 1


def test_masks_of_each_rank_and_place_arrive():
    layout = DPLayout(2, rows_per_rank=3, pages_per_row=1, num_groups=1, max_drafts=1)
    masks = [np.arange(8, dtype=np.int32).reshape(2, 2, 2), np.zeros((0, 2, 2), np.int32)]
    packed = layout.pack_masks(masks).reshape(2, 3, 2, 2)
    np.testing.assert_array_equal(packed[0, :2], masks[0])
    assert not packed[0, 2:].any()
    assert not packed[1].any()


def test_results_come_back_to_their_rank_without_padding():
    layout = DPLayout(dp_size=2, rows_per_rank=3, pages_per_row=1, num_groups=1)
    assert [x.tolist() for x in layout.split(np.arange(6), [2, 1])] == [[0, 1], [3]]
    per_row = np.arange(12).reshape(6, 2)
    assert [x.tolist() for x in layout.split(per_row, [0, 2])] == [[], [[6, 7], [8, 9]]]


def test_every_step_gets_arrays_of_its_own():
    layout = DPLayout(dp_size=1, rows_per_rank=2, pages_per_row=4, num_groups=1)
    plan = rank_plan(2)
    pages = tables(dp_size=1, pages_per_row=4)
    first, second = layout.pack([plan], pages), layout.pack([plan], pages)
    for a, b in zip(first, second, strict=True):
        assert not np.shares_memory(a, b)
        assert not any(np.shares_memory(a, part) for part in plan if isinstance(part, np.ndarray))
