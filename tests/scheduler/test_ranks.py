"""The rows of all ranks as one range: joined, planned alike, and never mixed up."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import IntpArray, RankPlan, RowIndex, StepPlan
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.mem_cache.row_growth import commit_rows, grow_rows
from sgl_jax.scheduler.events import PlanStep
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from tests.scheduler.driver import Driver, generate, make_sizes

NUM_ROWS = 6
PAGE_SIZE = 4


def make_ranks(dp_size: int) -> Ranks:
    sizes = make_sizes(dp_size=dp_size, num_rows=NUM_ROWS, page_size=PAGE_SIZE, num_pages=20)
    return Ranks(sizes, SchedulerArgs())


@given(
    st.lists(
        st.lists(st.integers(1, NUM_ROWS - 1), unique=True, max_size=NUM_ROWS - 1),
        min_size=1,
        max_size=4,
    )
)
def test_a_joint_row_is_found_again(lists: list[list[int]]) -> None:
    ranks = make_ranks(len(lists))
    for rank, rows in zip(ranks.ranks, lists, strict=True):
        for row in rows:
            rank.running.add(row, Request(generate(f"r{row}", [1, 2], 9), 0, 11), ())
    joint, bounds = ranks.active()
    assert bounds.tolist() == [0, *accumulate(map(len, lists))]
    found = [(rank.dp_rank, row) for rank, row in map(ranks.locate, joint.tolist())]
    assert found == [(k, row) for k, rows in enumerate(lists) for row in rows]


def test_the_joint_rows_follow_the_requests_that_come_and_go() -> None:
    ranks = make_ranks(2)
    for dp_rank, row in ((1, 3), (0, 2), (1, 1), (0, 4)):
        request = Request(generate(f"r{row}", [1, 2], 9), 0, 11)
        ranks.ranks[dp_rank].running.add(row, request, ())
    for gone in (None, 2):
        if gone is not None:
            ranks.ranks[0].running.remove(gone)
        own = [rank.running.active for rank in ranks.ranks]
        for _ in range(2):
            joint, bounds = ranks.active()
            assert joint.tolist() == [*own[0], *(NUM_ROWS + own[1])]
            assert bounds.tolist() == [0, len(own[0]), len(own[0]) + len(own[1])]


def joined(own_rows: list[list[int]]) -> tuple[RowIndex, IntpArray]:
    """The joint rows of each rank's, and the bounds of each rank's part."""
    joint = [k * NUM_ROWS + row for k, rows in enumerate(own_rows) for row in rows]
    return np.array(joint), np.array([0, *accumulate(map(len, own_rows))])


@given(st.lists(st.lists(st.integers(0, 100), max_size=NUM_ROWS - 1), min_size=1, max_size=4))
def test_the_soonest_end_of_each_rank(lists: list[list[int]]) -> None:
    ranks = make_ranks(len(lists))
    for rank, num_more in zip(ranks.ranks, lists, strict=True):
        for row, count in enumerate(num_more, 1):
            rank.running.add(row, Request(generate("r", [1], 1), 0, 1 + count), ())
    expected = [min((count // 2 for count in part), default=None) for part in lists]
    assert [None if end < 0 else end for end in ranks.outlooks()[:, 0].tolist()] == expected


def test_what_a_rank_writes_stands_in_its_part_of_the_joint_columns() -> None:
    ranks = make_ranks(2)
    rank = ranks.ranks[1]
    lease = rank.memory.open_lease(np.zeros(0, np.int32))
    assert rank.memory.grow_row(lease.row, 5)
    rank.columns.max_len[lease.row] = 9
    joint = NUM_ROWS + lease.row
    assert ranks.tables.kv_allocated_len.nonzero()[0].tolist() == [joint]
    assert ranks.tables.pages[joint, 0, :2].tolist() == lease.pages(PAGE_SIZE)[0].tolist()
    assert ranks.running.max_len.nonzero()[0].tolist() == [joint]


def test_ranks_grow_alone_where_another_is_short() -> None:
    """Rank 1 has too few pages for its two rows, and keeps what it has; 0 and 2 grow."""
    ranks = make_ranks(3)
    reversing = ranks.ranks[2].memory.allocator  # the order of its free pages
    reversing.free(reversing.alloc(19, owner=1), owner=1)
    own_rows = []
    for rank in ranks.ranks:
        leases = [rank.memory.open_lease(np.zeros(0, np.int32)) for _ in range(2)]
        own_rows.append([lease.row for lease in leases])
        assert all(rank.memory.grow_row(row, 3) for row in own_rows[-1])
    ranks.ranks[1].memory.allocator.alloc(16, owner=NUM_ROWS - 1)  # leaves one of 19
    joint, bounds = joined(own_rows)
    before = ranks.tables.pages.copy()
    lens = np.array([9, 2, 5, 5, 4, 13], np.int32)
    assert grow_rows(ranks.tables, ranks.memories, joint, lens, bounds).tolist() == [
        True,
        False,
        True,
    ]
    assert ranks.tables.kv_allocated_len[joint].tolist() == [9, 3, 3, 3, 4, 13]
    assert (ranks.tables.pages != before).sum(axis=(1, 2))[joint].tolist() == [2, 0, 0, 0, 0, 3]
    assert [rank.memory.allocator.num_free for rank in ranks.ranks] == [15, 1, 14]
    for rank, rows in zip(ranks.ranks, own_rows, strict=True):
        for row in rows:
            listed = rank.memory.leases[row].pages(PAGE_SIZE)[0]
            assert (rank.memory.allocator.owners()[listed] == row).all()
        assert not len(rank.memory.allocator.misplaced_pages())


def test_a_short_rank_evicts_while_all_ranks_grow() -> None:
    ranks = make_ranks(2)
    memory, tokens = ranks.ranks[1].memory, np.arange(72, dtype=np.int32)
    lease = memory.open_lease(tokens)
    assert memory.grow_row(lease.row, len(tokens))
    memory.commit_rows(np.array([lease.row]), np.array([len(tokens)], np.int32))
    release_kv_cache(memory, lease, tokens, insert=True)
    assert (memory.allocator.num_free, memory.allocator.num_tree) == (1, 18)
    rows = [rank.memory.open_lease(np.zeros(0, np.int32)).row for rank in ranks.ranks]
    joint, bounds = joined([[row] for row in rows])
    lens = np.array([12, 12], np.int32)
    assert grow_rows(ranks.tables, ranks.memories, joint, lens, bounds).tolist() == [True, True]
    assert memory.allocator.num_leased == 3


def test_committing_beyond_the_slots_names_rank_and_row() -> None:
    ranks = make_ranks(2)
    rows = [rank.memory.open_lease(np.zeros(0, np.int32)).row for rank in ranks.ranks]
    joint, bounds = joined([[row] for row in rows])
    lens = np.array([4, 4], np.int32)
    assert grow_rows(ranks.tables, ranks.memories, joint, lens, bounds).tolist() == [True, True]
    with pytest.raises(LeaseError, match=rf"rank 1: row {rows[1]} would commit 5 tokens of 4"):
        commit_rows(ranks.tables, ranks.memories, joint, lens + np.array([0, 1], np.int32))
    assert ranks.tables.kv_committed_len.max() == 0


def planned(prompt_lens: list[int]) -> tuple[Driver, StepPlan]:
    """A step in which a prompt of each length, on a rank of its own, is computed whole."""
    sizes = make_sizes(
        dp_size=len(prompt_lens),
        page_size=PAGE_SIZE,
        num_pages=200,
        max_context_len=600,
        max_chunk_tokens=600,
    )
    driver = Driver(sizes, SchedulerArgs())
    for dp_rank, length in enumerate(prompt_lens):
        if length:
            driver.submit(generate(f"r{dp_rank}", [7] * length, 4, dp_rank=dp_rank))
    plan = driver.scheduler.handle(PlanStep())
    assert plan is not None
    return driver, plan


@pytest.mark.parametrize("prompt_lens", [[30, 33], [5, 400], [0, 9, 60, 61]])
def test_a_rank_reads_as_many_pages_as_its_longest_row_lists(prompt_lens: list[int]) -> None:
    driver, plan = planned(prompt_lens)
    tables = PageTables(driver.scheduler.sizes)
    tables.apply(plan.page_changes)
    for k, (rank, rank_plan, length) in enumerate(
        zip(driver.scheduler.ranks, plan.ranks, prompt_lens, strict=True)
    ):
        assert rank_plan.num_pages == -(-length // PAGE_SIZE)
        table = tables.pages[k, rank_plan.rows, :, : rank_plan.num_pages]
        for lease, listed in zip(rank.memory.leases.values(), table[:, 0].tolist(), strict=True):
            assert listed == lease.pages(PAGE_SIZE, 0, length)[0].tolist()


@pytest.mark.parametrize("prompt_lens", [[30, 33], [5, 400]])
def test_a_plan_keeps_no_array_that_the_scheduler_writes_to(prompt_lens: list[int]) -> None:
    driver, plan = planned(prompt_lens)
    ranks = driver.scheduler._all_ranks
    columns = [*vars(ranks.tables).values(), *vars(ranks.running).values()]
    for rank_plan in (*plan.ranks, plan.page_changes):
        for name, array in arrays_of(rank_plan).items():  # type: ignore[arg-type]
            shared = [column for column in columns if np.shares_memory(array, column)]
            assert not shared, name


def arrays_of(plan: RankPlan) -> dict[str, np.ndarray]:
    return {name: value for name, value in plan._asdict().items() if isinstance(value, np.ndarray)}
