"""Whether a request fits a rank, by the forecast of its pages and by the most that it may take."""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.scheduler.forecast.capacity import NEED, ROOM, Needs, Rooms, steps_to_room
from sgl_jax.scheduler.forecast.fits import NEVER, NO_FLOOR, NO_LIMIT, find_fits, hold, pages_short
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS

NUM_MOMENTS = len(MOMENTS) - 1
LAST = int(MOMENTS[-1])
TO_ITS_LIMIT = np.ones((1, 1, NUM_MOMENTS))  # the chances of an output that nothing else ends


def room(in_use: float = 0, later: float | None = None, **fields: Any) -> Rooms:
    """A rank of 100 pages of 4 tokens, of which running requests hold so many, and so many at each
    later moment. They may come to take them all, and a step has no price."""
    rooms = np.zeros(1, ROOM)
    settings: dict[str, Any] = {
        "total": 100,
        "num_in_use": int(in_use),
        "most": 100,
        "conservativeness": 1.0,
        "page_size": 4,
        "chunk_size": 64,
        "is_open": True,
        "floor": NO_FLOOR,
        "most_tokens": NO_LIMIT,
        "held_above": NO_FLOOR,
    }
    for name, value in (settings | fields).items():
        rooms[name] = value
    rooms["pages"] = in_use if later is None else later
    rooms["pages"][0, 0] = in_use
    rooms["peak"] = int(rooms["pages"][0].argmax())
    return rooms


def need(pages: int, left: int, **fields: Any) -> Needs:
    """A request that takes so many pages, and may gain so many tokens, four to a page."""
    needs = np.zeros(1, NEED)
    settings: dict[str, Any] = {"pages": pages, "most": pages + left // 4, "left": left}
    for name, value in (settings | fields).items():
        needs[name] = value
    return needs


def short(
    rooms: Rooms, needs: Needs, chances: Any = TO_ITS_LIMIT, num_pages: int | None = None
) -> int:
    """The pages that the request lacks. It fits, among all lines, if it lacks none."""
    taken = int(needs["pages"][0]) if num_pages is None else num_pages
    found = int(pages_short(rooms, 0, needs, 0, taken, chances, MOMENTS))
    fits = find(rooms, [0], [[taken]], needs, [True], chances)
    may_start = rooms["is_open"][0] and needs["priority"][0] > rooms["floor"][0]
    assert fits[0, 0] == (found <= 0 and may_start)
    return found


def find(
    rooms: Rooms,
    ranks: list[int],
    pages: list[list[int]],
    needs: Needs,
    is_tried: list[bool],
    chances: Any = TO_ITS_LIMIT,
) -> BoolArray:
    """Call `find_fits`."""
    places = np.array(pages, np.int32)
    fits: BoolArray = find_fits(
        rooms, np.array(ranks), places, needs, np.array(is_tried), chances, MOMENTS
    )
    return fits


def ends_after(num_steps: int) -> Any:
    """The chances of an output that ends after so many steps."""
    return np.where(MOMENTS[:-1] <= num_steps, 1.0, 0.0)[None, None]


# -- the request's own growth -------------------------------------------------------------------


def test_a_request_needs_its_pages_at_once() -> None:
    assert short(room(90), need(10, 0)) == 0
    assert short(room(90), need(11, 0)) == 1


def test_a_request_fits_by_what_it_grows_to_and_no_longer_than_to_its_limit() -> None:
    assert short(room(57), need(10, 132)) == 0  # up to 43 pages, by moment 128
    assert short(room(58), need(10, 132)) == 1


@pytest.mark.parametrize("num_short", [0, 1])
def test_a_request_fits_if_it_takes_all_that_is_left_at_the_peak(num_short: int) -> None:
    rooms = room(0, 0)
    rooms["peak"] = peak = MOMENTS.tolist().index(64)
    rooms["pages"][0, peak] = 72 + num_short
    assert short(rooms, need(10, 120)) == num_short  # it has 28 pages then


def test_a_request_counts_by_the_chance_that_it_still_runs() -> None:
    assert short(room(40), need(10, 400)) == 50
    assert short(room(40), need(10, 400), TO_ITS_LIMIT / 2) == -5
    assert short(room(80), need(10, 400), ends_after(8)) == -7  # 13 pages in the mean of the time


def test_conservativeness_scales_the_growth_of_a_request_alone() -> None:
    careless = {"conservativeness": 0.0}
    assert short(room(90, **careless), need(10, 400)) == 0
    assert short(room(91, **careless), need(10, 400)) == 1
    assert short(room(60, conservativeness=0.5), need(10, 240)) == 0
    assert short(room(61, conservativeness=0.5), need(10, 240)) == 1


def test_a_request_is_not_there_for_the_peak_after_its_limit() -> None:
    rooms = room(10)
    rooms["pages"][0, MOMENTS[:-1] >= 64] = 100
    rooms["peak"] = NUM_MOMENTS - 1
    assert short(rooms, need(10, 64)) <= 0
    assert short(rooms, need(10, 68)) > 0


def test_a_long_prompt_is_there_while_it_is_computed() -> None:
    """Its 80 pages take five steps, and its only output token follows."""
    rooms = room(0, 100)
    rooms["pages"][0, 1] = 25
    chances = ends_after(0)
    assert short(rooms, need(80, 4), chances) == 6  # at moment 8; at 16 it is gone
    rooms = room(0, 0)
    rooms["pages"][0, 1], rooms["peak"] = 18, 1
    assert short(rooms, need(80, 64)) == 0  # it has gained 7 tokens then, in the mean


def test_shared_pages_of_a_prefix_are_not_taken_again() -> None:
    assert short(room(95), need(10, 0), num_pages=5) == 0
    assert short(room(50, most=60), need(50, 0), num_pages=40) == 0
    assert short(room(50, most=61), need(60, 0), num_pages=51) == 1


# -- the worst case -----------------------------------------------------------------------------


def test_what_fits_up_to_the_limits_of_all_starts_whatever_the_forecast() -> None:
    assert short(room(50, 200, most=60), need(10, 120)) == 0
    assert short(room(50, 200, most=61), need(10, 120)) == 1


def test_no_more_is_lacking_than_up_to_the_limits_of_all() -> None:
    assert short(room(50, 200, most=70), need(10, 120)) == 10


# -- how far it looks ---------------------------------------------------------------------------


def test_a_moment_counts_only_until_the_steps_that_are_saved_pay_for_a_retract() -> None:
    """Beside one other each token saves 64, which pays for a prompt of 40 in the first step.
    Beside 126 others it saves but little more than a retract computes again."""
    rooms = room(10, step_price=128, num_running=1)
    rooms["pages"][0, MOMENTS[:-1] >= 8] = 100
    rooms["peak"] = 1
    assert short(rooms, need(10, 400)) <= 0
    rooms["num_running"] = 126
    assert short(rooms, need(10, 400)) > 0


@pytest.mark.parametrize(("conservativeness", "horizon"), [(1.0, 32), (2.0, 80), (3.0, 160)])
def test_the_price_of_a_retract_grows_with_conservativeness(
    conservativeness: float, horizon: int
) -> None:
    """The prompt has 160 tokens, and each step saves six: 160 / 5, 320 / 4, 480 / 3 steps."""
    for first in (horizon, horizon + 1):
        rooms = room(0, step_price=12, num_running=1, conservativeness=conservativeness)
        rooms["pages"][0, MOMENTS[:-1] >= first] = 100
        rooms["peak"] = NUM_MOMENTS - 1
        assert (short(rooms, need(40, 400)) > 0) == (first == horizon)


# -- a rank that is held ------------------------------------------------------------------------

HELD = {"held_above": 5, "held_pages": 60, "held_steps": 32, "held_most": 60}


def test_a_held_rank_takes_what_ends_before_its_due_request_starts() -> None:
    assert short(room(0, most=0, **HELD), need(80, 27, priority=5)) <= 0  # 5 steps of its prompt
    assert short(room(0, most=0, **HELD), need(80, 28, priority=5)) > 0


def test_a_held_rank_takes_what_leaves_enough_to_its_due_request() -> None:
    assert short(room(0, **HELD), need(10, 120, priority=5)) == 0
    assert short(room(1, **HELD), need(10, 120, priority=5)) == 1


def test_a_held_rank_is_held_from_the_step_on_at_which_its_request_starts() -> None:
    """It takes 80 pages until then, and few after."""
    chances = ends_after(20)
    assert short(room(0, **HELD), need(80, 120, priority=5), chances) <= 0
    early = HELD | {"held_steps": 8}
    assert short(room(0, **early), need(80, 120, priority=5), chances) > 0


def test_a_rank_is_held_against_priorities_up_to_that_of_its_due_request() -> None:
    assert short(room(0, **HELD), need(80, 64, priority=5)) > 0
    assert short(room(0, **HELD), need(80, 64, priority=6)) <= 0


def test_a_hold_counts_beyond_the_horizon_up_to_its_step() -> None:
    """Its steps have paid for a retract long before, but the due request would wait for it."""
    cheap = {"step_price": 512, "num_running": 0}
    assert short(room(0, **cheap, **HELD), need(80, 400, priority=6)) <= 0
    assert short(room(0, **cheap, **HELD), need(80, 400, priority=5)) > 0


def test_a_hold_counts_beyond_the_horizon_after_its_step() -> None:
    """What starts behind the fixed step leaves enough as long as it may run, not for a few steps:
    else others that grow keep the due request out."""
    cheap = {"step_price": 512, "num_running": 0}
    late = HELD | {"held_steps": 0}
    assert short(room(0, **cheap, **late), need(10, 400, priority=6)) <= 0
    assert short(room(0, **cheap, **late), need(10, 120, priority=5)) <= 0
    assert short(room(0, **cheap, **late), need(10, 400, priority=5)) > 0


def test_a_rank_is_held_for_the_pages_that_its_due_request_grows_to() -> None:
    """The pages of other requests, which leave before, are not among these."""
    rooms, needs = room(60, 90), need(10, 120, priority=5)
    before = rooms["pages"].copy()
    hold(rooms, 0, needs, 0, 8, 7, TO_ITS_LIMIT, MOMENTS)
    alone = room(0, most=NEVER)
    assert rooms["held_pages"][0] == 100 + short(alone, needs, num_pages=8) > 8
    assert rooms["held_above"][0] == 5
    assert rooms["held_steps"][0] == 7
    assert rooms["held_most"][0] == 40
    assert (rooms["pages"] == before).all()


def test_up_to_the_limits_of_all_the_due_request_has_its_own() -> None:
    held = HELD | {"held_pages": 10, "held_most": 60}
    assert short(room(0, 90, most=0, **held), need(10, 120, priority=5)) == 0
    assert short(room(0, 90, most=0, **held), need(10, 124, priority=5)) == 1


# -- steps until there is room ------------------------------------------------------------------


def test_room_is_there_at_the_first_moment_with_enough_pages() -> None:
    rooms = room(100)
    rooms["pages"][0, MOMENTS[:-1] >= 24] = 70
    rooms["pages"][0, MOMENTS[:-1] >= 56] = 40
    steps = [int(steps_to_room(rooms, 0, pages, MOMENTS)) for pages in (0, 1, 30, 31, 60, 61)]
    assert steps == [0, 24, 24, 56, 56, LAST]


# -- all of it ----------------------------------------------------------------------------------


def slow_pages_short(room: Any, need: Any, num_pages: int, chances: list[float]) -> int:
    """`pages_short` from the rules of its module, one by one."""
    moments = MOMENTS.tolist()
    most = int(need.most) - (int(need.pages) - num_pages)
    num_steps = num_pages * int(room.page_size) // int(room.chunk_size)  # of its prompt
    end = num_steps + int(need.left)
    is_held = need.priority <= room.held_above and end > room.held_steps
    by_limits = int(room.most) + most - int(room.total) + is_held * int(room.held_most)
    if by_limits <= 0:
        return by_limits

    def has_paid(step: int) -> bool:
        """Whether its tokens up to a step have saved more than a retract costs then."""
        saved = step * float(room.step_price / (room.num_running + 1))
        return saved > room.conservativeness * (num_pages * room.page_size + step)

    lacking = [float(room.pages[0]) + num_pages - float(room.total)]
    if is_held and room.held_steps < moments[1]:
        lacking[0] += int(room.held_pages)
    growth = min(float(room.conservativeness), 1.0) * (most - num_pages) / max(int(need.left), 1)
    for j in range(1, NUM_MOMENTS):
        if moments[j] >= end or (has_paid(moments[j]) and not is_held):
            continue
        gained = max((moments[j] + moments[j + 1]) // 2 - num_steps, 0)
        chance = chances[max(k for k in range(NUM_MOMENTS) if moments[k] <= gained)]
        pages = chance * (num_pages + growth * min(gained, int(need.left)))
        if is_held and room.held_steps < moments[j + 1]:
            pages += int(room.held_pages)
        lacking.append(float(room.pages[j]) + pages - float(room.total))
    return min(by_limits, math.ceil(max(lacking)))


@st.composite
def drawn_rooms(draw: st.DrawFn) -> Rooms:
    """A rank's room; powers of two in divisions, so that nothing is rounded."""
    is_held = draw(st.booleans())
    pages = draw(st.lists(st.integers(0, 110), min_size=1, max_size=8))
    rooms = room(
        most=pages[0] + draw(st.integers(0, 200)),
        is_open=draw(st.sampled_from([True, True, True, False])),
        conservativeness=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        chunk_size=draw(st.sampled_from([4, 16, 64])),
        step_price=draw(st.sampled_from([0, 1, 2, 16, 512])),
        num_running=draw(st.sampled_from([0, 1, 3, 7])),
        floor=draw(st.sampled_from([NO_FLOOR, 0, 1])),
        held_above=draw(st.integers(0, 2)) if is_held else NO_FLOOR,
        held_pages=draw(st.integers(1, 60)),
        held_steps=draw(st.sampled_from([*range(40), 100, 400, LAST])),
        held_most=draw(st.integers(60, 120)),
    )
    rooms["pages"] = np.resize(np.repeat(pages, NUM_MOMENTS // len(pages)), NUM_MOMENTS)
    rooms["peak"] = int(rooms["pages"][0].argmax())
    return rooms


@st.composite
def drawn_needs(draw: st.DrawFn) -> Needs:
    """A request's need."""
    left = draw(st.sampled_from([0, 1, 2, 8, 16, 32, 64, 256, 1024, 4096]))
    return need(draw(st.integers(1, 100)), left, priority=draw(st.integers(0, 2)))


@settings(max_examples=500)
@given(
    rooms=drawn_rooms(),
    needs=drawn_needs(),
    part=st.sampled_from([1.0, 0.5, 0.0]),
    halvings=st.lists(st.integers(0, NUM_MOMENTS - 1), max_size=4),
)
def test_a_request_lacks_what_the_rules_say(
    rooms: Rooms, needs: Needs, part: float, halvings: list[int]
) -> None:
    chances = np.ones((1, 1, NUM_MOMENTS))
    for first in halvings:
        chances[0, 0, first:] /= 2
    chances[..., 0] = 1.0
    num_pages = max(int(part * int(needs["pages"][0])), 1)
    found = short(rooms, needs, chances, num_pages)
    assert found == slow_pages_short(rooms[0], needs[0], num_pages, chances[0, 0].tolist())


def test_lines_that_are_not_tried_do_not_fit() -> None:
    rooms, needs = room(90), np.concatenate([need(10, 0)] * 4)
    pages, is_tried = [[10, 10, NEVER, 10]], [False, True, True, True]
    assert find(rooms, [0], pages, needs, is_tried).tolist() == [[False, True, False, True]]
