"""Rows: each is free or held, and a row given back keeps nothing of its last holder."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.pages.req_to_token_pool import NULL_ROW, ReqToTokenPool, RowTables


def test_the_null_row_is_never_handed_out() -> None:
    pool = ReqToTokenPool(RowTables.empty(4, 1, 2))
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(rows) == [1, 2, 3]
    assert NULL_ROW not in rows
    assert pool.num_free == 0


def test_asking_an_empty_pool_raises() -> None:
    pool = ReqToTokenPool(RowTables.empty(2, 1, 2))
    pool.alloc()
    with pytest.raises(LeaseError, match="all 1 rows are held"):
        pool.alloc()


def test_a_row_given_back_is_clean_and_of_a_new_epoch() -> None:
    pool = ReqToTokenPool(RowTables.empty(3, 1, 4))
    row = pool.alloc()
    epoch = int(pool.tables.epoch[row])
    pool.tables.pages[row] = 7
    pool.tables.lengths[1:, row] = 9
    pool.free(row)
    assert pool.tables.pages[row, 0].tolist() == [0, 0, 0, 0]
    assert pool.tables.kv_committed_len[row] == 0
    assert pool.tables.kv_allocated_len[row] == 0
    assert pool.tables.cache_protected_len[row] == 0
    assert pool.tables.epoch[row] == epoch + 1


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_not_held_cannot_be_given_back(row: int) -> None:
    pool = ReqToTokenPool(RowTables.empty(3, 1, 4))
    epochs = pool.tables.epoch.tolist()
    with pytest.raises(LeaseError, match=f"row {row} is given back, but is not held"):
        pool.free(row)
    assert pool.num_free == 2
    assert pool.tables.epoch.tolist() == epochs


def test_held_and_free_rows_are_listed() -> None:
    pool = ReqToTokenPool(RowTables.empty(5, 1, 1))
    first, second = pool.alloc(), pool.alloc()
    pool.free(first)
    assert pool.held_rows().tolist() == [second]
    assert sorted([*pool.free_rows().tolist(), second]) == [1, 2, 3, 4]
    assert pool.num_free == 3


@pytest.mark.parametrize(("num_rows", "pages_per_row"), [(1, 4), (2, 0)])
def test_a_pool_that_can_hold_nothing_is_refused(num_rows: int, pages_per_row: int) -> None:
    with pytest.raises(ValueError, match="at least 2 rows of 1 page"):
        ReqToTokenPool(RowTables.empty(num_rows, 1, pages_per_row))


class RowMachine(RuleBasedStateMachine):
    """Rows taken, written and given back in any order, against a dictionary of what they hold."""

    num_rows = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReqToTokenPool(RowTables.empty(self.num_rows, 1, 3))
        self.held: dict[int, list[int]] = {}
        self.epochs = [0] * self.num_rows

    @rule()
    def alloc(self) -> None:
        if len(self.held) == self.num_rows - 1:
            with pytest.raises(LeaseError, match="all 5 rows are held"):
                self.pool.alloc()
            return
        row = self.pool.alloc()
        assert row != NULL_ROW
        assert row not in self.held
        self.held[row] = [0, 0, 0]

    @rule(which=st.integers(0, 5), lengths=st.lists(st.integers(0, 12), min_size=3, max_size=3))
    def write(self, which: int, lengths: list[int]) -> None:
        if which not in self.held:
            return
        self.held[which] = sorted(lengths)
        tables = self.pool.tables
        tables.lengths[1:, which] = self.held[which]
        tables.pages[which] = which

    @rule(row=st.integers(0, 5))
    def free(self, row: int) -> None:
        if row not in self.held:
            with pytest.raises(LeaseError, match="is not held"):
                self.pool.free(row)
            return
        self.pool.free(row)
        del self.held[row]
        self.epochs[row] += 1

    @rule(dice=st.integers(0, 5))
    def reset(self, dice: int) -> None:
        if dice:
            return
        self.pool.reset()
        self.held.clear()
        self.epochs = [epoch + 1 for epoch in self.epochs]

    @invariant()
    def agrees_with_the_dictionary(self) -> None:
        pool = self.pool
        assert pool.held_rows().tolist() == sorted(self.held)
        assert pool.num_held == len(self.held)
        assert pool.num_free == self.num_rows - 1 - len(self.held)
        free = set(range(1, self.num_rows)) - self.held.keys()
        assert sorted(pool.free_rows().tolist()) == sorted(free)
        assert pool.tables.epoch.tolist() == self.epochs
        for row in range(self.num_rows):
            assert pool.tables.lengths[:, row].tolist() == [0, *self.held.get(row, [0, 0, 0])]
            if row not in self.held:
                assert not pool.tables.pages[row].any()


TestRows = RowMachine.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def mirrored(mirror: np.ndarray, tables: RowTables) -> np.ndarray:
    """What one knows who was told all changes so far."""
    changes = tables.page_log.take()
    mirror.reshape(-1)[changes.cells] = changes.pages
    return mirror


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["list", "each", "unlist", "pass", "take"]), st.integers(0, 2**16)
        ),
        max_size=40,
    )
)
def test_the_log_tells_all_that_rows_list_of_all_ranks(acts: list[tuple[str, int]]) -> None:
    num_rows, groups, width = 4, 2, 3
    joint = RowTables.empty(2 * num_rows, groups, width)
    parts = [joint.part(slice(k, k + num_rows)) for k in (0, 4)]
    mirror = np.zeros((2 * num_rows, groups, width), np.int32)
    for act, seed in acts:
        rng = np.random.default_rng(seed)
        part, row, first = parts[seed % 2], int(rng.integers(num_rows)), int(rng.integers(width))
        if act == "list":
            part.list_pages(row, first, rng.integers(1, 99, (groups, width - first), np.int32))
        elif act == "each":
            rows = rng.permutation(2 * num_rows)[:3]
            columns = rng.integers(0, width, 3).astype(np.int32)
            group = int(rng.integers(groups))
            joint.list_page_each(group, rows, columns, rng.integers(1, 99, 3, np.int32))
        elif act == "pass":
            before = int(part.first_pages[0, row])
            first = max(first, before)
            part.pass_pages(row, 0, first)
            assert not part.pages[row, 0, before:first].any()
            assert part.first_pages[0, row] == first
        elif act == "unlist":
            part.unlist_pages(row, first)
            assert not part.pages[row, :, first:].any()
        else:
            assert (mirrored(mirror, joint) == joint.pages).all()
    assert (mirrored(mirror, joint) == joint.pages).all()
    assert len(joint.page_log.take().cells) == 0


def test_a_log_that_is_not_taken_is_bounded_and_tells_all_the_same() -> None:
    joint = RowTables.empty(4, 1, 3)
    part = joint.part(slice(2, 4))
    for page in range(1, 100):
        part.list_pages(1, page % 3, np.array([[page]], np.int32))
    assert len(joint.page_log._cells) <= 1 + joint.pages.size
    assert (mirrored(np.zeros((4, 1, 3), np.int32), joint) == joint.pages).all()
    assert joint.pages[3, 0].tolist() == [99, 97, 98]


def test_rows_that_are_all_given_back_list_nothing_any_more() -> None:
    joint = RowTables.empty(4, 1, 3)
    pool = ReqToTokenPool(joint.part(slice(2, 4)))
    pool.tables.list_pages(1, 0, np.array([[5, 6]], np.int32))
    mirror = mirrored(np.zeros((4, 1, 3), np.int32), joint)
    pool.reset()
    assert not mirrored(mirror, joint).any()
