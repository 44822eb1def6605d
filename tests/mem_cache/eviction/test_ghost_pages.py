"""What is remembered of pages that left."""

import numpy as np
import pytest

from sgl_jax.mem_cache.eviction.ghost_pages import GhostPages, PrefixHasher


def prefix_hashes(tokens: np.ndarray, page_size: int, before: int = 0) -> np.ndarray:
    return PrefixHasher(page_size).hashes(tokens, before)


def num_recalled(ghosts: GhostPages, hashes: np.ndarray) -> int:
    pages = ghosts.recall(hashes)
    return 0 if pages is None else int(pages.is_ghost.sum())


def hashes_of(first: int, count: int) -> np.ndarray:
    """As many different hashes."""
    return prefix_hashes(np.arange(first, first + count, dtype=np.int32), 1)


def test_a_prefix_has_one_hash_however_it_was_divided() -> None:
    tokens = np.random.default_rng(0).integers(0, 100, 48, np.int32)
    whole = prefix_hashes(tokens, 4)
    for cut in (4, 20, 44):
        front = prefix_hashes(tokens[:cut], 4)
        back = prefix_hashes(tokens[cut:], 4, int(front[-1]))
        assert np.concatenate([front, back]).tolist() == whole.tolist()


def test_prefixes_that_differ_anywhere_have_different_hashes() -> None:
    tokens = np.zeros(16, np.int32)
    last = {int(prefix_hashes(tokens, 4)[-1])}
    for position in range(16):
        for token in (1, 2, 2**31 - 1):
            changed = tokens.copy()
            changed[position] = token
            last.add(int(prefix_hashes(changed, 4)[-1]))
    swapped = np.repeat(np.array([1, 0, 0, 0], np.int32), 4)
    last |= {int(prefix_hashes(np.roll(swapped, 4 * i), 4)[-1]) for i in range(4)}
    assert len(last) == 1 + 16 * 3 + 4


def test_a_page_that_left_is_recalled_with_its_history_and_another_is_not() -> None:
    ghosts = GhostPages(100)
    ghosts.remember(hashes_of(0, 10), num_uses=3, last_access=5, now=9)
    pages = ghosts.recall(np.concatenate([hashes_of(0, 10), hashes_of(50, 2)]))
    assert pages is not None
    assert pages.is_ghost.tolist() == [True] * 10 + [False] * 2
    assert pages.num_uses.tolist() == [3] * 10
    assert pages.last_access.tolist() == [5] * 10
    assert pages.left_at.tolist() == [9] * 10


def test_those_that_left_longest_ago_are_forgotten_first() -> None:
    ghosts = GhostPages(100)
    batches = [hashes_of(1000 * i, 30) for i in range(8)]
    for batch in batches:
        ghosts.remember(batch, num_uses=0, last_access=0, now=1)
    recalled = [num_recalled(ghosts, batch) for batch in batches]
    assert recalled == [0, 0, 0, 0, 10, 30, 30, 30]


def test_more_than_it_can_hold_leaves_the_first_of_them() -> None:
    ghosts = GhostPages(10)
    hashes = hashes_of(0, 25)
    ghosts.remember(hashes, num_uses=0, last_access=0, now=1)
    assert num_recalled(ghosts, hashes) == num_recalled(ghosts, hashes[:10]) == 10
    assert num_recalled(ghosts, hashes[10:]) == 0


def test_a_page_that_leaves_again_is_remembered_as_it_left_last() -> None:
    ghosts = GhostPages(100)
    for num_uses in (0, 2):
        ghosts.remember(hashes_of(0, 5), num_uses, last_access=num_uses, now=7)
    pages = ghosts.recall(hashes_of(0, 5))
    assert pages is not None
    assert pages.num_uses.tolist() == [2] * 5


@pytest.mark.parametrize("seed", range(5))
def test_what_leaves_from_the_ends_of_edges_is_found_from_their_beginnings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ghosts = GhostPages(200)
    edges = [hashes_of(1000 * i, 20) for i in range(40)]
    left = np.zeros(len(edges), int)  # pages of each edge
    last_left: list[int] = []  # hashes, in the order in which they left
    while left.min() < 15:
        i = rng.choice(np.flatnonzero(left < 20))
        count = rng.integers(1, 21 - left[i])
        gone = edges[i][20 - left[i] - count : 20 - left[i]]
        ghosts.remember(gone, num_uses=0, last_access=0, now=1)
        last_left += gone[::-1].tolist()
        left[i] += count
        if left[i] == 20:  # the edge returns
            remembered = np.isin(edges[i], np.array(last_left[-200:], np.uint64))
            pages = ghosts.recall(edges[i])
            is_ghost = np.zeros(20, bool) if pages is None else pages.is_ghost
            assert (is_ghost == remembered).all()


def test_nothing_is_recalled_after_a_clear() -> None:
    ghosts = GhostPages(100)
    ghosts.remember(hashes_of(0, 10), num_uses=1, last_access=1, now=2)
    ghosts.clear()
    assert num_recalled(ghosts, hashes_of(0, 10)) == 0
