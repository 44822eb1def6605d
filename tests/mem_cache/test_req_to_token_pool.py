"""Rows: each is free or held, and a row given back keeps nothing of its last holder."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.req_to_token_pool import NULL_ROW, ReqToTokenPool


def test_the_null_row_is_never_handed_out() -> None:
    pool = ReqToTokenPool(num_rows=4, pages_per_row=2)
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(rows) == [1, 2, 3]
    assert NULL_ROW not in rows
    assert pool.num_free == 0


def test_asking_an_empty_pool_raises() -> None:
    pool = ReqToTokenPool(num_rows=2, pages_per_row=2)
    pool.alloc()
    with pytest.raises(LeaseError, match="all 1 rows are held"):
        pool.alloc()


def test_a_row_given_back_is_clean_and_of_a_new_epoch() -> None:
    pool = ReqToTokenPool(num_rows=3, pages_per_row=4)
    row = pool.alloc()
    epoch = int(pool.epoch[row])
    pool.pages[row] = 7
    pool.kv_committed_len[row] = pool.kv_allocated_len[row] = pool.cache_protected_len[row] = 9
    pool.free(row)
    assert pool.pages[row].tolist() == [0, 0, 0, 0]
    assert pool.kv_committed_len[row] == 0
    assert pool.kv_allocated_len[row] == 0
    assert pool.cache_protected_len[row] == 0
    assert pool.epoch[row] == epoch + 1


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_nobody_holds_cannot_be_given_back(row: int) -> None:
    pool = ReqToTokenPool(num_rows=3, pages_per_row=4)
    epochs = pool.epoch.tolist()
    with pytest.raises(LeaseError, match=f"row {row} is given back, but nobody holds it"):
        pool.free(row)
    assert pool.num_free == 2
    assert pool.epoch.tolist() == epochs


def test_held_and_free_rows_are_listed() -> None:
    pool = ReqToTokenPool(num_rows=5, pages_per_row=1)
    first, second = pool.alloc(), pool.alloc()
    pool.free(first)
    assert pool.held_rows().tolist() == [second]
    assert sorted([*pool.free_rows().tolist(), second]) == [1, 2, 3, 4]
    assert pool.num_free == 3


@pytest.mark.parametrize(("num_rows", "pages_per_row"), [(1, 4), (2, 0)])
def test_a_pool_that_can_hold_nothing_is_refused(num_rows: int, pages_per_row: int) -> None:
    with pytest.raises(ValueError, match="at least 2 rows of 1 page"):
        ReqToTokenPool(num_rows, pages_per_row)


class RowMachine(RuleBasedStateMachine):
    """Rows taken, written and given back in any order, against a dictionary of what they hold."""

    num_rows = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReqToTokenPool(self.num_rows, pages_per_row=3)
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
        pool = self.pool
        pool.cache_protected_len[which], pool.kv_committed_len[which] = self.held[which][:2]
        pool.kv_allocated_len[which] = self.held[which][2]
        pool.pages[which] = which

    @rule(row=st.integers(0, 5))
    def free(self, row: int) -> None:
        if row not in self.held:
            with pytest.raises(LeaseError, match="nobody holds it"):
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
        assert pool.epoch.tolist() == self.epochs
        for row in range(self.num_rows):
            assert pool.lengths[:, row].tolist() == [0, *self.held.get(row, [0, 0, 0])]
            if row not in self.held:
                assert not pool.pages[row].any()


TestRows = RowMachine.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
