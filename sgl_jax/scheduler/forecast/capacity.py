"""Records of the capacity of ranks and the needs of requests, which `fits.py` compares.

Writes a rank's load and, where any request fits, its pages. `forecast.py` writes the other pages.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, IntpArray
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS

# The capacity of a rank for another request.
ROOM = np.dtype(
    (
        np.record,
        [
            ("total", np.int64),  # pages of the first pool
            ("num_in_use", np.int64),  # pages held by running requests now
            ("pages", np.float64, len(MOMENTS) - 1),  # forecast of their pages at each moment
            ("peak", np.int64),  # index of the highest of `pages`
            ("most", np.int64),  # upper bound on their pages
            ("num_running", np.int64),  # requests
            ("num_ahead", np.int64),  # prompt tokens that they have to compute
            ("has_row", np.bool_),  # whether a row is free, or held by an idle session
            ("soonest_end", np.int64),  # steps until the first may end; 1 if none runs
            ("conservativeness", np.float64),  # factor of growth (at most 1) and a retract's price
            ("page_size", np.int64),
            ("chunk_size", np.int64),  # prompt tokens of a step
            ("step_price", np.int64),  # prompt tokens that take as long as a step without any
            ("is_open", np.bool_),  # whether the step takes another request that fits
            ("floor", np.int64),  # a request starts in this step only if its priority is above
            ("most_tokens", np.int64),  # if above by one, only with at most this many to compute
            # It is held against requests up to this priority, for a request that is expected to
            # hold `held_pages` from `held_steps` on, and `held_most` at most.
            ("held_above", np.int64),
            ("held_pages", np.int64),
            ("held_steps", np.int64),
            ("held_most", np.int64),
        ],
    )
)
Rooms: TypeAlias = NDArray[Any]

# The need of a waiting request.
NEED = np.dtype(
    (
        np.record,
        [
            ("pages", np.int32),  # for its known tokens and one more
            ("most", np.int32),  # up to its limit
            ("tokens", np.int32),  # known
            ("left", np.int32),  # maximum number of further tokens
            ("output_len", np.int32),  # of the known tokens
            ("length_class", np.int32),  # of its output
            ("bucket", np.int32),  # of the output's present length
            ("priority", np.int64),
        ],
    )
)
Needs: TypeAlias = NDArray[Any]


# A request that is tried on a rank.
OPTION = np.dtype(
    (
        np.record,
        [
            ("num_present", np.int64),  # tokens that it would read if it started now
            ("num_read", np.int64),  # tokens present, or computed by another request first
            ("is_unconfirmed", np.bool_),  # whether `num_read` is an upper bound
            # Pages of its cached prefix that running requests use, below 0 if not counted.
            ("in_use", np.int64),
            ("is_uncounted", np.bool_),  # whether `fits` depends on `in_use`, which is not counted
            ("num_spared", np.int64),  # tokens of computation that a fetch from the host would save
            ("fits", np.bool_),  # in this step
            # Prompt tokens: to compute, and ahead of it. A wait for room is not included.
            ("cost", np.int64),
            ("is_full", np.bool_),  # whether most pages are forecast to be in use, at the peak
            ("may_win", np.bool_),  # whether it could cost less than the cheapest after a wait
        ],
    )
)
Options: TypeAlias = NDArray[Any]


@compiled(
    "(rooms[::1], int64, int64, int64, boolean, int64, boolean, int64, int64, int64, int64, int64)",
    rooms=ROOM,
)
def write_load(
    rooms: Rooms,
    dp_rank: int,
    num_running: int,
    num_ahead: int,
    has_row: bool,
    soonest_end: int,
    can_admit: bool,
    floor: int,
    most_tokens: int,
    num_left: int,
    most_growth: int,
    enough: int,
) -> bool:
    """Write the load of a rank on which running requests do not hold `num_left` pages, and may come
    to take `most_growth`. If a request of `enough` pages fits even then, write its pages too.
    Return whether they need a forecast instead."""
    assert 0 <= dp_rank < len(rooms)
    room = rooms[dp_rank]
    room.num_running, room.num_ahead, room.has_row = num_running, num_ahead, has_row
    room.soonest_end = soonest_end
    room.is_open, room.floor, room.most_tokens = has_row and can_admit, floor, most_tokens
    if num_left - most_growth < enough:
        return True
    num_in_use = room.total - num_left
    room.num_in_use, room.peak, room.most = num_in_use, 0, num_in_use + most_growth
    for j in range(len(room.pages)):
        room.pages[j] = num_in_use
    return False


@compiled("(rooms[::1], int64[::1], int64[:, ::1], int64)", rooms=ROOM)
def write_loads(rooms: Rooms, loads: IntpArray, outlooks: IntpArray, enough: int) -> BoolArray:
    """Write the capacity of all ranks but for the pages of those that need a forecast. Return which
    these are, bool[ranks]: a request of `enough` pages may not fit after the greatest growth.

    Args:
        loads: int64[7 * ranks], for each rank the arguments of `write_load` up to the pages left,
            except the steps until the first end.
        outlooks: the result of `Ranks.outlooks`.
    """
    is_counted = np.zeros(len(rooms), np.bool_)
    assert len(outlooks) == len(rooms)
    assert len(loads) == 7 * len(rooms)
    for k in range(len(rooms)):
        load = loads[7 * k : 7 * k + 7]
        num_running, num_ahead, has_row, can_admit, floor, most_tokens, num_left = load
        soonest_end, most_growth = outlooks[k]
        soonest_end = 1 if soonest_end < 0 else soonest_end
        is_counted[k] = write_load(
            rooms,
            k,
            num_running,
            num_ahead,
            has_row > 0,
            soonest_end,
            can_admit > 0,
            floor,
            most_tokens,
            num_left,
            most_growth,
            enough,
        )
    return is_counted


@compiled("(rooms[::1], int64, int64, int64[::1])", rooms=ROOM)
def steps_to_room(rooms: Rooms, dp_rank: int, num_pages: int, moments: IntpArray) -> int:
    """Return the steps until the forecast leaves `num_pages` on a rank, the last of `moments` at
    most."""
    assert 0 <= dp_rank < len(rooms)
    room = rooms[dp_rank]
    for j in range(len(room.pages)):
        if room.pages[j] + num_pages <= room.total:
            return int(moments[j])
    return int(moments[len(moments) - 1])
