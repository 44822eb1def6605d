"""The next waiting request that may start, or that a rank may be held for."""

from typing import Any

import numpy as np
import pytest

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.forecast.capacity import Needs, Rooms
from sgl_jax.scheduler.forecast.fits import MAY_HOLD, MAY_START, NEVER, NO_FLOOR, next_line
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS
from tests.scheduler.forecast.test_fits import TO_ITS_LIMIT, need, room

NUM_TENANTS = 3
MAX_SKIP_COUNT = 4
# How a line is found -> arguments of `find`.
WAYS: dict[str, dict[str, Any]] = {
    "fits": {},
    "due": {"skip_count": [MAX_SKIP_COUNT]},
    "preempts": {"preempts": [[True]]},
}
NO_PREEMPTION = np.zeros((0, 0), np.bool_)


def find(rooms: Rooms, needs: Needs, **arguments: Any) -> tuple[int, int]:
    """Call `next_line` for lines in their order, none of which has cached pages, preempts, or is
    due."""
    count, end = len(rooms), len(needs)
    ranks = np.array(arguments.pop("ranks", range(count)))
    settings: dict[str, Any] = {
        "order": np.arange(end),
        "start": 0,
        "rooms": rooms,
        "ranks": ranks,
        "least": np.tile(needs["pages"], (len(ranks), 1)),
        "preempts": NO_PREEMPTION,
        "needs": needs,
        "tenant": np.zeros(end, np.int32),
        "open_tenants": np.zeros((count, NUM_TENANTS), np.bool_),
        "skip_count": np.zeros(end, np.int32),
        "max_skip_count": MAX_SKIP_COUNT,
        "in_use": np.full((len(ranks), end), -1, np.int32),
        "chances": TO_ITS_LIMIT,
        "moments": MOMENTS,
    }
    for name, value in arguments.items():
        settings[name] = np.array(value, np.asarray(settings[name]).dtype)
    for name in ("start", "max_skip_count"):
        settings[name] = int(settings[name])
    index, found = next_line(*settings.values())
    return index, found


def in_use(count: int) -> Int32Array:
    """The pages in use of the prefix of a single line, on one rank."""
    return np.array([[count]], np.int32)


def test_the_first_line_that_fits_is_found() -> None:
    needs = np.concatenate([need(11, 0), need(10, 0), need(5, 0)])
    assert find(room(90), needs) == (1, MAY_START)
    assert find(room(90), needs, start=2) == (2, MAY_START)
    assert find(room(90), needs, order=[0, 2, 1]) == (1, MAY_START)
    assert find(room(96), needs) == (3, MAY_HOLD)
    assert find(room(0), needs, start=3) == (3, MAY_HOLD)
    assert find(room(0, is_open=False), needs) == (3, MAY_HOLD)


def test_a_line_that_never_starts_is_left_out() -> None:
    needs = np.concatenate([need(10, 0), need(10, 0)])
    due = {"skip_count": [MAX_SKIP_COUNT, 0]}
    assert find(room(90), needs, least=[[NEVER, 10]], **due) == (1, MAY_START)
    assert find(room(95), needs, least=[[NEVER, 10]], **due) == (2, MAY_HOLD)


def test_pages_in_use_are_asked_for_only_if_a_start_depends_on_them() -> None:
    """Six of ten pages are cached."""
    least = {"least": [[4]]}
    assert find(room(90), need(10, 0), **least) == (0, MAY_START)
    assert find(room(91), need(10, 0), **least) == (0, 0)
    assert find(room(96), need(10, 0), **least) == (0, 0)
    assert find(room(97), need(10, 0), **least) == (1, MAY_HOLD)


@pytest.mark.parametrize(
    ("count", "found"),
    [(-1, (0, 0)), (4, (1, MAY_HOLD)), (5, (0, MAY_START)), (50, (0, MAY_START))],
)
def test_a_line_takes_all_its_pages_but_those_in_use(count: int, found: tuple[int, int]) -> None:
    known = {"least": [[4]], "in_use": in_use(count)}
    assert find(room(95), need(10, 0), **known) == found


def test_no_more_pages_are_in_use_than_are_cached() -> None:
    for num_in_use, found in ((95, (0, MAY_START)), (96, (0, MAY_START)), (97, (1, MAY_HOLD))):
        known = {"least": [[4]], "in_use": in_use(50)}
        assert find(room(num_in_use), need(10, 0), **known) == found
    # It lacks pages later, so the look at the present alone does not leave it out.
    rooms, grows = room(0, 60), need(10, 120)  # by up to 30, at moment 112
    assert find(rooms, grows, least=[[10]]) == (0, MAY_START)
    rooms["pages"][0, 1:] = 66
    assert find(rooms, grows, least=[[4]], in_use=in_use(50)) == (0, MAY_START)
    rooms["pages"][0, 1:] = 69
    assert find(rooms, grows, least=[[4]], in_use=in_use(50)) == (1, MAY_HOLD)


def test_pages_are_those_in_use_on_the_rank_itself() -> None:
    """Of four ranks, two may take the line, and only the last one has room for four pages."""
    rooms = np.concatenate([room(0), room(100), room(0), room(95)])
    known: dict[str, Any] = {"ranks": [1, 3], "least": [[4], [4]]}
    assert find(rooms, need(10, 0), **known) == (0, 1)
    assert find(rooms, need(10, 0), **known, in_use=[[9], [-1]]) == (0, 1)
    assert find(rooms, need(10, 0), **known, in_use=[[9], [0]]) == (1, MAY_HOLD)
    assert find(rooms, need(10, 0), **known, in_use=[[0], [5]]) == (0, MAY_START)


def test_pages_in_use_are_not_asked_for_if_the_line_fits_on_another_rank() -> None:
    rooms = np.concatenate([room(95), room(90)])
    assert find(rooms, need(10, 0), least=[[4], [10]]) == (0, MAY_START)
    assert find(rooms, need(10, 0), least=[[4], [4]]) == (0, MAY_START)


def test_a_rank_may_be_held_for_a_due_line_that_does_not_fit() -> None:
    needs = np.concatenate([need(10, 0), need(10, 0), need(1, 0)])
    due = {"skip_count": [MAX_SKIP_COUNT - 1, MAX_SKIP_COUNT, 0]}
    assert find(room(95), needs, **due) == (1, MAY_HOLD)
    assert find(room(95), needs, **due, start=2) == (2, MAY_START)
    assert find(room(90), needs, **due, start=1) == (1, MAY_START)
    closed = room(0, is_open=False)
    assert find(closed, needs, **due) == (1, MAY_HOLD)


def test_no_rank_is_held_twice() -> None:
    due = {"skip_count": [MAX_SKIP_COUNT]}
    held = room(95, held_above=0)
    assert find(held, need(10, 0), **due) == (1, MAY_HOLD)
    assert find(np.concatenate([held, room(95)]), need(10, 0), **due) == (0, MAY_HOLD)
    assert find(np.concatenate([room(95), held]), need(10, 0), **due) == (0, MAY_HOLD)
    assert find(np.concatenate([held, held]), need(10, 0), **due) == (1, MAY_HOLD)


def test_no_rank_is_held_for_a_line_before_it_is_known_that_it_does_not_fit() -> None:
    due = {"skip_count": [MAX_SKIP_COUNT], "least": [[4]]}
    assert find(room(95), need(10, 0), **due) == (0, 0)
    assert find(room(95), need(10, 0), **due, in_use=in_use(4)) == (0, MAY_HOLD)
    assert find(room(95), need(10, 0), **due, in_use=in_use(5)) == (0, MAY_START)


@pytest.mark.parametrize("way", WAYS)
def test_a_line_up_to_the_floor_is_left_out(way: str) -> None:
    found = MAY_HOLD if way == "due" else MAY_START
    in_pages = 0 if way == "fits" else 95
    for floor, expected in ((NO_FLOOR, (0, found)), (1, (0, found)), (2, (1, MAY_HOLD))):
        rooms = room(in_pages, floor=floor)
        assert find(rooms, need(10, 0, priority=2), **WAYS[way]) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_line_just_above_the_floor_is_left_out_if_it_has_too_many_tokens(way: str) -> None:
    found = (0, MAY_HOLD if way == "due" else MAY_START)
    rooms = room(0 if way == "fits" else 95, floor=1, most_tokens=30)
    for tokens, expected in ((30, found), (31, (1, MAY_HOLD))):
        assert find(rooms, need(10, 0, priority=2, tokens=tokens), **WAYS[way]) == expected
    assert find(rooms, need(10, 0, priority=3, tokens=31), **WAYS[way]) == found


def test_cached_tokens_are_not_computed() -> None:
    rooms = room(0, floor=-1, most_tokens=10)
    assert find(rooms, need(10, 0, tokens=34), least=[[4]]) == (0, MAY_START)
    assert find(rooms, need(10, 0, tokens=35), least=[[4]]) == (1, MAY_HOLD)


def test_a_tenant_that_gets_tokens_on_the_rank_is_not_bound_by_their_number() -> None:
    rooms = np.concatenate([room(100), room(0), room(0, floor=-1, most_tokens=10)])
    one = {"ranks": [0, 2], "tenant": [1]}
    is_open = np.zeros((3, NUM_TENANTS), np.bool_)
    is_open[:2] = is_open[2, 0] = is_open[2, 2] = True
    assert find(rooms, need(10, 0, tokens=11), **one, open_tenants=is_open) == (1, MAY_HOLD)
    assert find(rooms, need(10, 0, tokens=11), **one, open_tenants=~is_open) == (0, MAY_START)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_line_that_preempts_may_start_without_room(is_open: bool) -> None:
    rooms = np.concatenate([room(100), room(100, is_open=is_open)])
    needs = np.concatenate([need(10, 0), need(10, 0)])
    assert find(rooms, needs, preempts=[[False, False], [False, True]]) == (1, MAY_START)
    assert find(rooms, needs, preempts=[[False, False], [False, False]]) == (2, MAY_HOLD)
