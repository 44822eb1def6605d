"""Forecasts the pages that each rank's running requests will hold.

Keeping every request's longest possible output free would leave most of the pool unused; keeping
nothing free would admit too much and retract all the time. So the need for memory is forecast from
the size of each running request, at some moments ahead, and the chance that it still runs
(`output_lengths.py`). The forecast is the mean of the sum plus a part of its standard deviation.
(Gong et al., "Past-Future Scheduler", ASPLOS 2025, draw the lengths at random; here mean and
variance of the sum are computed, so that all hosts find the same.)

The rows' parts of mean and variance are summed for each rank once in a step, and a request that
starts adds its row. Sums are kept by powers of the fraction of its pages that each row gives back,
which changes for all rows as pages are shared.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.row_growth import pages_held_and_lacking
from sgl_jax.scheduler.forecast.capacity import ROOM, Rooms
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS, Float64Array, OutputLengths
from sgl_jax.scheduler.running_rows import RowColumns

# The forecast's distance above the mean need, in standard deviations: at one moment the need is
# higher with a chance of 40 %, at the peak of all moments less often.
_NUM_DEVIATIONS = 0.25
_NUM_MOMENTS = len(MOMENTS) - 1
# Counts and sums over a rank's rows, the latter for each moment. A row runs on with chance c, and
# then holds `own_part` * a + b pages.
_NEED_FIELDS = [
    ("held", np.int64),  # pages that rows list
    ("known", np.int64),  # pages that rows lack for their present tokens
    ("most", np.int64),  # pages that rows lack for the most tokens they can have
    *(("mean_a", np.float64, _NUM_MOMENTS), ("mean_b", np.float64, _NUM_MOMENTS)),  # c a, c b
    # a, b, if c is not 0
    *(("most_a", np.float64, _NUM_MOMENTS), ("most_b", np.float64, _NUM_MOMENTS)),
    # c (1 - c) times a a, 2 a b, b b
    *((f"var_{terms}", np.float64, _NUM_MOMENTS) for terms in ("aa", "ab", "bb")),
]
_NEEDS = np.dtype((np.record, _NEED_FIELDS))
_Records = NDArray[Any]
_ALL_OF_ONE: BoolArray = np.ones(1, np.bool_)
# Bounds of an array with one row.
_ONE_ROW: IntpArray = np.array((0, 1))


class Forecast:
    """The forecast of several ranks while requests start in a step.

    Args:
        lengths: the estimate of output lengths, for all ranks.
        memories: the memories of the ranks.
        tables, running: columns of the ranks' joint rows.
        chunk_size: prompt tokens of a step.
    """

    def __init__(
        self,
        lengths: OutputLengths,
        memories: Sequence[RankMemory],
        tables: RowTables,
        running: RowColumns,
        chunk_size: int,
    ) -> None:
        self._lengths = lengths
        self._memories = memories
        self._tables = tables
        self._running = running
        self._chunk = chunk_size

    @cached_property
    def _needs(self) -> _Records:
        """Return `_NEEDS`[ranks], at first without requests. In most steps no rank needs them."""
        return np.zeros(len(self._memories), _NEEDS)

    def add(
        self, rows: RowIndex, bounds: IntpArray, is_counted: BoolArray, ranks: slice = slice(None)
    ) -> None:
        """Add the requests in the joint `rows`. Rank k of `ranks` has those from bounds[k] to
        bounds[k + 1]; they are left out unless `is_counted[k]`."""
        running, lengths, tables = self._running, self._lengths, self._tables
        lens = _lens(
            rows, running.planned_len, running.max_len, running.prompt_len, tables.kv_committed_len
        )
        classes = running.length_class[rows]
        _add_rows(
            bounds,
            is_counted,
            classes,
            lengths.buckets(classes, lens[3]),
            lens,
            pages_held_and_lacking(self._memories[0], tables, rows, lens[:3]),
            lengths.chances,
            MOMENTS,
            self._chunk,
            self._needs[ranks],
        )

    def start(self, dp_rank: int, row: int) -> None:
        """Add a request that has started in a row of a rank."""
        joint = self._memories[dp_rank].rows.first_row + row
        self.add(np.array((joint,)), _ONE_ROW, _ALL_OF_ONE, slice(dp_rank, dp_rank + 1))

    def recount(self, dp_rank: int, active: RowIndex) -> None:
        """Count the requests of a rank again, from its rows `active`."""
        self._needs[dp_rank] = 0
        joint = self._memories[dp_rank].rows.first_row + active
        bounds = np.array((0, len(joint)))
        self.add(joint, bounds, _ALL_OF_ONE, slice(dp_rank, dp_rank + 1))

    def write(self, dp_rank: int, room: Rooms) -> None:
        """Write the forecast of a rank to `room`, ROOM[1]."""
        _write(self._needs[dp_rank : dp_rank + 1], self._num_in_use(dp_rank), room)

    def write_for(self, dp_rank: int, rows: RowIndex, num_freed: int, room: Rooms) -> None:
        """Write the forecast of a rank to `room`, ROOM[1], as if only the requests in `rows` ran
        there and the rest had freed `num_freed` pages."""
        alone = Forecast(self._lengths, self._memories, self._tables, self._running, self._chunk)
        alone.recount(dp_rank, rows)
        _write(alone._needs[dp_rank : dp_rank + 1], self._num_in_use(dp_rank) - num_freed, room)

    def _num_in_use(self, dp_rank: int) -> int:
        memory = self._memories[dp_rank]
        return memory.allocator.num_pages - 1 - memory.num_reclaimable_pages


@compiled("(int64[::1], int32[:], int32[:], int32[:], int32[:])")
def _lens(
    rows: RowIndex,
    planned_len: Int32Array,
    max_len: Int32Array,
    prompt_len: Int32Array,
    committed_len: Int32Array,
) -> Int32Array:
    """Return int32[5, n], token counts of each of `rows`: present, present and one more with KV,
    most with KV (a request ends as its last token is sampled), of the output, and not computed."""
    lens = np.empty((5, len(rows)), np.int32)
    assert len(planned_len) == len(max_len) == len(prompt_len) == len(committed_len)
    for i in range(len(rows)):
        row = rows[i]
        assert 0 <= row < len(planned_len)
        lens[0, i], lens[2, i] = planned_len[row], max_len[row] - 1
        lens[1, i] = min(planned_len[row] + 1, max_len[row] - 1)
        lens[3, i] = planned_len[row] - prompt_len[row]
        lens[4, i] = planned_len[row] - committed_len[row]
    return lens


@compiled("(need, float64[::1], int64[::1], int64, int64, float64, float64, float64)", need=_NEEDS)
def _add_running(
    need: Any,
    goes_on: Float64Array,
    moments: IntpArray,
    num_steps: int,
    left_len: int,
    growth: float,
    held: float,
    known: float,
) -> None:
    """Add a running request to the sums of its rank, the `_NEEDS` record `need`.

    Args:
        goes_on: float64, the request's chances to run on up to each moment after its prompt.
        num_steps: steps until its prompt is computed.
        left_len, growth: tokens that the request may still gain, and pages for each of them.
        held: pages that the request lists.
        known: pages that it lacks for its present tokens and one more.
    """
    assert len(goes_on) + 1 == len(moments)
    assert len(goes_on) == len(need.mean_a)
    after = 0
    for j in range(len(goes_on)):
        # In the mean of the interval.
        ahead = max((moments[j] + moments[j + 1]) // 2 - num_steps, 0)
        if j and moments[j] >= num_steps + left_len:
            break
        while after + 1 < len(goes_on) and moments[after + 1] <= ahead:
            after += 1
        chance = goes_on[after]
        if chance == 0:
            break
        gained = known + growth * min(ahead, left_len)
        likely, unlikely = chance * gained, 1 - chance
        need.mean_a[j] += chance * held
        need.mean_b[j] += likely
        need.most_a[j] += held
        need.most_b[j] += gained
        need.var_aa[j] += chance * unlikely * held * held
        need.var_ab[j] += 2 * likely * unlikely * held
        need.var_bb[j] += likely * unlikely * gained


@compiled(
    "(int64[::1], boolean[::1], int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], "
    "float64[:, :, ::1], int64[::1], int64, needs[::1])",
    needs=_NEEDS,
)
def _add_rows(
    bounds: IntpArray,
    is_counted: BoolArray,
    classes: Int32Array,
    buckets: Int32Array,
    lens: Int32Array,
    pages: Int32Array,
    chances: Float64Array,
    moments: IntpArray,
    chunk_size: int,
    needs: _Records,
) -> None:
    """Add rows to the needs of their ranks.

    Args:
        bounds: rank k has the rows from bounds[k] to bounds[k + 1].
        is_counted: bool[ranks].
        classes, buckets: int32[n], classes of the rows' outputs, and buckets of their present
            lengths.
        lens: int32[5, n], the result of `_lens`.
        pages: int32[4, n], the result of `pages_held_and_lacking` for the first three `lens`.
        chances, moments: `OutputLengths.chances`, `MOMENTS`.
        chunk_size: prompt tokens of a step.
        needs: `_NEEDS` records [ranks].
    """
    num_ranks = len(bounds) - 1
    assert bounds[num_ranks] == len(classes) == len(buckets)
    assert len(needs) == len(is_counted) == num_ranks
    assert lens.shape[1] == pages.shape[1] == len(classes)
    for rank in range(num_ranks):
        if not is_counted[rank]:
            continue
        need = needs[rank]
        for i in range(bounds[rank], bounds[rank + 1]):
            left_len = lens[2, i] + 1 - lens[0, i]
            held, known, most = float(pages[0, i]), float(pages[2, i]), pages[3, i]
            growth = (most - known) / max(left_len, 1)  # pages a token
            need.held += pages[0, i]
            need.known += pages[1, i]
            need.most += most
            assert 0 <= classes[i] < len(chances)
            assert 0 <= buckets[i] < chances.shape[1]
            goes_on = chances[classes[i], buckets[i]]
            num_steps = max(lens[4, i] - 1, 0) // chunk_size
            _add_running(need, goes_on, moments, num_steps, left_len, growth, held, known)


@compiled("(needs[::1], int64, rooms[::1])", needs=_NEEDS, rooms=ROOM)
def _write(needs: _Records, num_in_use: int, rooms: Rooms) -> None:
    """Write a rank's forecast to its room. `needs` and `rooms` have only the record of the rank;
    `num_in_use` is the number of distinct pages that its requests list."""
    assert len(needs) == len(rooms) == 1
    need, room = needs[0], rooms[0]
    # The last reader of a shared page frees it: each reader counts a part of it.
    own_part = num_in_use / max(need.held, 1)
    peak, room.most = 0, num_in_use + need.most
    for j in range(len(need.mean_a)):
        mean = own_part * need.mean_a[j] + need.mean_b[j]
        most = own_part * need.most_a[j] + need.most_b[j]
        variance = (own_part * need.var_aa[j] + need.var_ab[j]) * own_part + need.var_bb[j]
        growth = min(mean + _NUM_DEVIATIONS * np.sqrt(variance), most) - num_in_use
        if growth > 0:
            growth *= min(room.conservativeness, 1.0)
        if j == 0:
            growth = max(growth, need.known)  # uncomputed prompts are certain
        # A sum of rounded parts may be above the most of an exact fit.
        room.pages[j] = min(num_in_use + growth, room.most)
        if room.pages[j] > room.pages[peak]:
            peak = j
    room.num_in_use, room.peak = num_in_use, peak
