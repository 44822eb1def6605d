"""The page allocator against a dictionary, and every misuse it must refuse."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_jax.mem_cache.errors import OutOfPagesError, OwnershipError
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import FREE, RESERVED, TREE


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def state_of(allocator: PageAllocator) -> tuple[object, ...]:
    return (
        allocator.owners().tolist(),
        allocator.free_pages().tolist(),
        allocator.num_free,
        allocator.num_tree,
        allocator.num_leased,
    )


def allocator_with_some_pages() -> PageAllocator:
    """Row 1 holds pages 1 and 2, row 2 holds 3, the tree holds 4, the rest is free."""
    allocator = PageAllocator(8, "rank 5")
    assert allocator.alloc(2, owner=1).tolist() == [1, 2]
    assert allocator.alloc_each(np.array([2, 1], np.int32)).tolist() == [3, 4]
    allocator.give_to_tree(pages(4), owner=1)
    return allocator


MISUSES = {
    "a free page": (pages(6), 1, "free"),
    "a page of another row": (pages(1, 3), 1, "row 2"),
    "a page of the tree": (pages(4), 1, "tree"),
    "a row's page as the tree": (pages(1), TREE, "row 1"),
    "the null page": (pages(0), 1, "reserved"),
    "the null page as reserved": (pages(0), RESERVED, "reserved"),
    "a free page as unowned": (pages(6), FREE, "free"),
    "a page twice in one call": (pages(1, 2, 1), 1, r"twice.*\[1\]"),
    "a negative page": (pages(1, -1), 1, r"no such page \[-1\]"),
    "a page past the end": (pages(8, 1), 1, r"no such page \[8\]"),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("action", ["free", "give_to_tree"])
def test_misuse_raises_and_changes_nothing(action: str, misuse: str) -> None:
    allocator = allocator_with_some_pages()
    before = state_of(allocator)
    which, owner, words = MISUSES[misuse]
    with pytest.raises(OwnershipError, match=f"(?s)rank 5.*{words}"):
        getattr(allocator, action)(which, owner)
    assert state_of(allocator) == before


def test_a_double_free_names_the_last_owner() -> None:
    allocator = allocator_with_some_pages()
    allocator.free(pages(3), owner=2)
    with pytest.raises(OwnershipError, match=r"page 3: free \(before: row 2\)"):
        allocator.free(pages(3), owner=2)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    allocator = allocator_with_some_pages()
    before = state_of(allocator)
    with pytest.raises(OutOfPagesError, match="4 pages asked, 3 free"):
        allocator.alloc(4, owner=1)
    assert state_of(allocator) == before


@pytest.mark.parametrize("owner", [FREE, RESERVED, TREE])
def test_only_rows_take_pages(owner: int) -> None:
    allocator = allocator_with_some_pages()
    before = state_of(allocator)
    with pytest.raises(OwnershipError, match="only rows"):
        allocator.alloc_each(np.array([1, owner], np.int32))
    assert state_of(allocator) == before


def test_moving_no_pages_is_no_misuse() -> None:
    allocator = allocator_with_some_pages()
    before = state_of(allocator)
    allocator.free(pages(), owner=7)
    assert allocator.alloc(0, owner=1).tolist() == []
    assert state_of(allocator) == before


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages, got 1"):
        PageAllocator(1)


class AllocatorMachine(RuleBasedStateMachine):
    """Random moves, mirrored in a dictionary page -> owner."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(24)
        self.owner = dict.fromkeys(range(1, 24), FREE)

    def held_by(self, owner: int) -> list[int]:
        return [page for page, holder in self.owner.items() if holder == owner]

    def some_of(self, owner: int, data: st.DataObject) -> list[int]:
        held = self.held_by(owner)
        return data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []

    @rule(owners=st.lists(st.integers(1, 4), max_size=10))
    def alloc(self, owners: list[int]) -> None:
        asked = np.array(owners, np.int32)
        if len(owners) > len(self.held_by(FREE)):
            with pytest.raises(OutOfPagesError):
                self.allocator.alloc_each(asked)
            return
        got = self.allocator.alloc_each(asked).tolist()
        assert len(set(got)) == len(got)
        for page, owner in zip(got, owners, strict=True):
            assert self.owner[page] == FREE
            self.owner[page] = owner

    @rule(owner=st.sampled_from([1, 2, 3, 4, TREE]), data=st.data())
    def free(self, owner: int, data: st.DataObject) -> None:
        freed = self.some_of(owner, data)
        self.allocator.free(pages(*freed), owner)
        self.owner.update(dict.fromkeys(freed, FREE))

    @rule(owner=st.integers(1, 4), data=st.data())
    def give_to_tree(self, owner: int, data: st.DataObject) -> None:
        given = self.some_of(owner, data)
        self.allocator.give_to_tree(pages(*given), owner)
        self.owner.update(dict.fromkeys(given, TREE))

    @rule(which=st.lists(st.integers(-2, 26), min_size=1, max_size=6), owner=st.integers(1, 4))
    def free_anything(self, which: list[int], owner: int) -> None:
        is_fine = len(set(which)) == len(which) and set(which) <= set(self.held_by(owner))
        if is_fine:
            self.allocator.free(pages(*which), owner)
            self.owner.update(dict.fromkeys(which, FREE))
            return
        before = state_of(self.allocator)
        with pytest.raises(OwnershipError):
            self.allocator.free(pages(*which), owner)
        assert state_of(self.allocator) == before

    @precondition(lambda self: self.allocator.num_free == 0)
    @rule()
    def reset(self) -> None:
        self.allocator.reset()
        self.owner = dict.fromkeys(self.owner, FREE)

    @invariant()
    def agrees_with_the_dictionary(self) -> None:
        assert self.allocator.owners().tolist() == [RESERVED, *self.owner.values()]
        assert sorted(self.allocator.free_pages().tolist()) == self.held_by(FREE)
        assert self.allocator.num_free == len(self.held_by(FREE))
        assert self.allocator.num_tree == len(self.held_by(TREE))
        leased = sum(owner > 0 for owner in self.owner.values())
        assert self.allocator.num_leased == leased


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
