"""Which snapshots stay: the ends of all conversations, then those spread over paths."""

import numpy as np
import pytest

from benchmarks.trace.recurrent import StatesReplay
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.window_order import StateOrder

PAGE = 16
NUM_STATES = 98
FIRST = 128  # tokens of a first prompt
TURNS = 4


def texts(count: int, length: int) -> list[Int32Array]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 50_000, length).astype(np.int32) for _ in range(count)]


def memory_of(num_states: int, interval: int) -> StatesReplay:
    """Memory with pages for everything, and few snapshots."""
    return StatesReplay(4000, num_states, PAGE, 4096, interval=interval)


def share_found(count: int, growth: int, *, in_turn: bool = True) -> float:
    """The share of what one state per conversation serves, of all turns but the first."""
    replay, rng = memory_of(NUM_STATES, 32), np.random.default_rng(4)
    found = possible = 0
    conversations = texts(count, FIRST + TURNS * growth + 1)
    for turn in range(TURNS):
        order = range(count) if in_turn else rng.permutation(count)
        for number in order:
            served = replay.serve(conversations[number][: FIRST + turn * growth + 1])
            found += served if turn else 0
            possible += FIRST + (turn - 1) * growth if turn else 0
    return found / possible


@pytest.mark.parametrize("growth", [0, 64])
@pytest.mark.parametrize("count", [10, 31, 32, 40, 64, 90])
def test_conversations_in_turn_all_keep_their_ends(count: int, growth: int) -> None:
    """An order by age alone finds nothing from 31 conversations on: each needs three snapshots."""
    assert share_found(count, growth) >= 0.9


@pytest.mark.parametrize(("count", "least"), [(31, 0.9), (64, 0.9), (120, 0.4)])
def test_conversations_at_random_keep_their_ends(count: int, least: float) -> None:
    assert share_found(count, 64, in_turn=False) >= least


@pytest.mark.parametrize("interval", [32, 64])
def test_a_fork_in_the_middle_finds_a_snapshot_near(interval: int) -> None:
    """Three chains of 1,024 tokens have more snapshots than fit; those that stay are spread."""
    replay = memory_of(48, interval)
    chains = texts(3, 1025)
    for chain in chains:
        replay.serve(chain)
    for chain in chains:
        chain[257:] += 60_000
        assert replay.serve(chain) == 256


def levels(places: str, *, first: int = 0, to_end: int = 0) -> list[int]:
    """The levels of an edge with a snapshot at each letter. One at an `L` cannot go."""
    is_present = np.array([each != "." for each in places])
    may_go = np.array([each == "x" for each in places])
    return StateOrder(1).levels(first, is_present, may_go, to_end).tolist()


def listed(places: str) -> list[int]:
    return [place for place, level in enumerate(levels(places)) if level >= 0]


def test_the_snapshot_with_the_least_gap_is_offered_and_the_end() -> None:
    assert listed("...x.xx....x") == [5, 11]
    assert listed("x..x") == [0, 3]
    assert listed("........") == []


def test_a_snapshot_that_is_locked_gives_its_place_to_the_next() -> None:
    assert listed("...x.Lx....x") == [6, 11]


def test_what_a_single_prompt_has_passed_is_an_inner_snapshot() -> None:
    order = StateOrder(1)
    passed, branch = levels("...x", to_end=1), levels("...x", to_end=0)
    assert order.weight(passed[3]) < order.weight(branch[3])


def test_a_wider_gap_and_a_shorter_path_make_a_snapshot_worth_more() -> None:
    narrow, wide = max(levels(".x.x...x")[:7]), max(levels("...x...x")[:7])
    assert narrow < wide
    assert max(levels("...x...x", first=64)[:7]) < wide


def test_lookups_decide_what_inner_snapshots_are_worth() -> None:
    order = StateOrder(1)
    (level,) = [each for each in levels("...x...x")[:7] if each >= 0]
    assert order.weight(level) < 0.01
    for _ in range(2000):
        order.searched(found_end=False)
    assert order.weight(level) > 1
    for _ in range(2000):
        order.searched(found_end=True)
    assert order.weight(level) < 0.1
    assert order.weight(max(levels("x"))) == 4
