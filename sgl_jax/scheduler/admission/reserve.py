"""The number of pages that admission keeps for the further output of running requests.

Reserving every request's longest possible output would leave most of the pool unused; reserving
nothing would admit too much and retract all the time. So the need for memory is forecast: for some
moments ahead, the size of each running request and the chance that it still runs
(`output_lengths.py`). Requests end one by one, and each frees more than the others take meanwhile,
so the sum has a peak: the reserve is the peak's excess over the present need. (Gong et al.,
"Past-Future Scheduler", ASPLOS 2025, draw the lengths at random; here mean and variance of the sum
are computed, so that all hosts find the same.)

The rows' parts of mean and variance are summed for each rank once in a step, and a request that
starts adds its row. Sums are kept by powers of the part of its pages that each row gives back,
which changes for all rows as pages are shared.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.pages.row_growth import pages_held_and_lacking
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.admission.output_lengths import MOMENTS, Float64Array, OutputLengths
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows

# The forecast's distance above the mean need, in standard deviations: at a moment the need is
# higher with a chance of 40 %, at the peak of all moments less often.
_NUM_DEVIATIONS = 0.25
_NUM_MOMENTS = len(MOMENTS) - 1
# Counts and sums over a rank's rows, the latter for each moment. A row runs on with chance c, and
# then holds `own_part` * a + b pages.
_NEED_FIELDS = [
    ("held", np.int64),  # pages that rows list
    ("known", np.int64),  # pages that rows lack for their present tokens
    ("most", np.int64),  # pages that rows lack for all tokens that they may come to have
    ("longest", np.int64),  # tokens of the youngest at most
    *(("mean_a", np.float64, _NUM_MOMENTS), ("mean_b", np.float64, _NUM_MOMENTS)),  # c a, c b
    # a, b, if c is not 0
    *(("most_a", np.float64, _NUM_MOMENTS), ("most_b", np.float64, _NUM_MOMENTS)),
    # c (1 - c) times a a, 2 a b, b b
    *((f"var_{terms}", np.float64, _NUM_MOMENTS) for terms in ("aa", "ab", "bb")),
    # The same for one more request like the youngest, which has no a.
    *((f"more_{of}", np.float64, _NUM_MOMENTS) for of in ("mean", "most", "var")),
]
_NEEDS = np.dtype((np.record, _NEED_FIELDS))
_Records = NDArray[Any]
_ALL_OF_ONE: BoolArray = np.ones(1, np.bool_)
# Bounds of an array with one row.
_ONE_ROW: IntpArray = np.array((0, 1))
# A request with a smaller chance to run on counts as gone.
_LEAST_CHANCE = 0.001


class AdmissionReserve:
    """The reserve of ranks. `conservativeness` scales it; `lengths` covers all ranks."""

    def __init__(self, lengths: OutputLengths, conservativeness: float) -> None:
        self.lengths = lengths
        self.conservativeness = conservativeness

    def pages(
        self,
        memory: RankMemory,
        running: RunningRows,
        rows: RowIndex | None = None,
        num_freed: int = 0,
    ) -> int:
        """Pages to leave for the rank's running requests, and for the output of one more, which
        is like the youngest of them. None while nothing runs.

        With `rows`, the pages for these requests alone, were all others to end and to free
        `num_freed` pages.
        """
        if rows is None:
            rows = running.active
        forecast = Forecast(self, [memory], memory.rows, running)
        forecast.add(rows, np.array((0, len(rows))), _ALL_OF_ONE, slice(0, 1))
        return forecast.pages(slice(0, 1), num_freed)[0]


class Forecast:
    """The reserve of several ranks while requests start in a step.

    Args:
        reserve: how it is computed.
        memories: of the ranks.
        tables: columns of the ranks' joint rows, as `running`.
    """

    def __init__(
        self,
        reserve: AdmissionReserve,
        memories: Sequence[RankMemory],
        tables: RowTables,
        running: RowColumns,
    ) -> None:
        self._reserve = reserve
        self._memories = memories
        self._tables = tables
        self._running = running
        self._needs: _Records = np.zeros(len(memories), _NEEDS)

    def add(
        self, rows: RowIndex, bounds: IntpArray, is_counted: BoolArray, ranks: slice = slice(None)
    ) -> None:
        """Add requests that run in `rows`, joint ones, oldest first. Rows of rank k of `ranks` lie
        in [bounds[k], bounds[k + 1]), and are left out if the rank is not counted."""
        running, lengths = self._running, self._reserve.lengths
        lens = _lens(rows, running.planned_len, running.max_len)
        _add_rows(
            rows,
            bounds,
            is_counted,
            running.length_class,
            running.prompt_len,
            lens,
            pages_held_and_lacking(self._memories[0], self._tables, rows, lens),
            lengths.starts,
            lengths.survival,
            lengths.chances,
            lengths.is_current,
            MOMENTS,
            self._needs[ranks],
        )

    def start(self, dp_rank: int, row: int) -> None:
        """A request has started in a row of a rank."""
        joint = self._memories[dp_rank].rows.first_row + row
        self.add(np.array((joint,)), _ONE_ROW, _ALL_OF_ONE, slice(dp_rank, dp_rank + 1))

    def recount(self, dp_rank: int, active: RowIndex) -> None:
        """Other requests than before run on a rank: those in the rows `active`."""
        self._needs[dp_rank] = 0
        joint = self._memories[dp_rank].rows.first_row + active
        bounds = np.array((0, len(joint)))
        self.add(joint, bounds, _ALL_OF_ONE, slice(dp_rank, dp_rank + 1))

    def pages(self, ranks: slice, num_freed: int = 0) -> list[int]:
        """The reserve of each of `ranks`, were `num_freed` pages to become free."""
        in_use = [
            each.allocator.num_pages - 1 - each.num_reclaimable_pages - num_freed
            for each in self._memories[ranks]
        ]
        needs = self._needs[ranks]
        known, most, longest = (needs[of].tolist() for of in ("known", "most", "longest"))
        peaks = _peaks(needs, np.array(in_use)).tolist()
        return [
            # Uncomputed prompts are no forecast.
            max(self._growth(peaks[k] - in_use[k], most[k], longest[k]), known[k])
            if longest[k]
            else 0
            for k in range(len(needs))
        ]

    def _growth(self, growth: float, at_most: int, longest: int) -> int:
        """Pages by which the need is forecast to grow; no more than the requests, and one more
        of `longest` tokens, may come to take."""
        scaled = ceil(max(growth, 0.0) * self._reserve.conservativeness)
        return min(scaled, at_most + self._memories[0].request_pages(longest))


@compiled("(int64[::1], int32[:], int32[:])")
def _lens(rows: RowIndex, planned_len: Int32Array, max_len: Int32Array) -> Int32Array:
    """Tokens that each of `rows` has, has with one more, and may come to have: int32[3, n]."""
    lens = np.empty((3, len(rows)), np.int32)
    assert len(planned_len) == len(max_len)
    for i in range(len(rows)):
        row = rows[i]
        assert 0 <= row < len(planned_len)
        lens[0, i], lens[2, i] = planned_len[row], max_len[row]
        lens[1, i] = min(planned_len[row] + 1, max_len[row])
    return lens


@compiled(
    "(int64, float64[::1], int64[::1], int64[::1], float64[::1])",
)
def _find_chances(
    bucket: int,
    survival: Float64Array,
    starts: IntpArray,
    moments: IntpArray,
    chances: Float64Array,
) -> None:
    """Write the chances of an output in `bucket` to continue up to each of `moments`."""
    assert len(survival) == len(starts)
    assert len(chances) < len(moments)
    first = bucket
    for j in range(len(chances)):
        while bucket + 1 < len(starts) and starts[bucket + 1] <= starts[first] + moments[j]:
            bucket += 1
        chance = survival[bucket] / survival[first]
        chances[j] = chance if chance >= _LEAST_CHANCE else 0.0


@compiled("(need, float64[::1], int64, int64[::1], int64, float64, float64, float64)", need=_NEEDS)
def _add_running(
    need: Any,
    goes_on: Float64Array,
    num_ahead: int,
    ahead: IntpArray,
    left_len: int,
    growth: float,
    held: float,
    known: float,
) -> None:
    """Add a running request to the sums of its rank.

    Args:
        need: the rank's record.
        goes_on: the request's chances to run on, of which the first `num_ahead` count.
        ahead: steps until each moment.
        left_len: tokens that the request may still gain, `growth` pages each.
        held: pages that the request lists.
        known: pages that it lacks for its present tokens.
    """
    assert num_ahead <= len(goes_on) == len(ahead) == len(need.mean_a)
    for j in range(num_ahead):
        gained = known + growth * min(ahead[j], left_len)
        likely, unlikely = goes_on[j] * gained, 1 - goes_on[j]
        need.mean_a[j] += goes_on[j] * held
        need.mean_b[j] += likely
        need.most_a[j] += held
        need.most_b[j] += gained
        need.var_aa[j] += goes_on[j] * unlikely * held * held
        need.var_ab[j] += 2 * likely * unlikely * held
        need.var_bb[j] += likely * unlikely * gained


@compiled("(need, float64[::1], int64, int64[::1], int64, float64)", need=_NEEDS)
def _set_one_more(
    need: Any,
    goes_on: Float64Array,
    num_ahead: int,
    ahead: IntpArray,
    left_len: int,
    growth: float,
) -> None:
    """Set the part of one more request; arguments as for `_add_running`."""
    assert num_ahead <= len(goes_on) == len(ahead) == len(need.more_mean)
    for j in range(len(ahead)):
        # An earlier youngest may have had further moments ahead.
        chance = goes_on[j] if j < num_ahead else 0.0
        gained = growth * min(ahead[j], left_len) if j < num_ahead else 0.0
        need.more_mean[j] = chance * gained
        need.more_most[j] = gained
        need.more_var[j] = chance * (1 - chance) * gained * gained


@compiled(
    "(int64[::1], int64[::1], boolean[::1], int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], "
    "int64[::1], float64[:, ::1], float64[:, :, ::1], boolean[:, ::1], int64[::1], "
    "needs[::1])",
    needs=_NEEDS,
)
def _add_rows(
    rows: RowIndex,
    bounds: IntpArray,
    is_counted: BoolArray,
    length_class: Int32Array,
    prompt_len: Int32Array,
    lens: Int32Array,
    pages: Int32Array,
    starts: IntpArray,
    survival: Float64Array,
    chances: Float64Array,
    is_current: BoolArray,
    moments: IntpArray,
    needs: _Records,
) -> None:
    """Add rows to the needs of their ranks.

    Args:
        rows: joint, oldest first; rows of rank k lie in [bounds[k], bounds[k + 1]).
        is_counted: bool[ranks].
        length_class: of all joint rows, as `prompt_len`.
        lens: int32[3, n] of `rows`, from `_lens`.
        pages: int32[4, n], from `pages_held_and_lacking` for `lens`.
        starts: as `survival`, `chances` and `is_current`, of `OutputLengths`.
        moments: `MOMENTS`.
        needs: `_NEEDS` records [ranks].
    """
    num_ranks, num_moments = len(bounds) - 1, len(moments) - 1
    ahead = (moments[:-1] + moments[1:]) // 2  # until the next moment, in the mean
    assert bounds[num_ranks] == len(rows)
    assert len(needs) == len(is_counted) == num_ranks
    assert lens.shape[1] == pages.shape[1] == len(rows)
    assert chances.shape[2] == num_moments
    for rank in range(num_ranks):
        first, end = bounds[rank], bounds[rank + 1]
        if first == end or not is_counted[rank]:
            continue
        need = needs[rank]
        need.longest = lens[2, end - 1]
        for i in range(first, end + 1):
            last = min(i, end - 1)  # the youngest counts twice: for itself, and for one more
            row = rows[last]
            assert 0 <= row < len(prompt_len)
            output_len, left_len = lens[0, last] - prompt_len[row], lens[2, last] - lens[0, last]
            held, known, most = float(pages[0, last]), float(pages[2, last]), pages[3, last]
            growth = (most - known) / max(left_len, 1)  # pages a token
            if i == end:
                output_len, left_len, known = 0, output_len + left_len, 0.0
            else:
                need.held += pages[0, i]
                need.known += pages[1, i]
                need.most += most
            of_class = length_class[row]
            bucket = np.searchsorted(starts, output_len, "right") - 1
            assert 0 <= of_class < len(survival)
            goes_on = chances[of_class, bucket]
            if not is_current[of_class, bucket]:
                _find_chances(bucket, survival[of_class], starts, moments, goes_on)
                is_current[of_class, bucket] = True
            num_ahead = 1
            while num_ahead < num_moments and moments[num_ahead] < left_len:
                num_ahead += 1
            while goes_on[num_ahead - 1] == 0:
                num_ahead -= 1
            if i == end:
                _set_one_more(need, goes_on, num_ahead, ahead, left_len, growth)
            else:
                _add_running(need, goes_on, num_ahead, ahead, left_len, growth, held, known)


@compiled("(needs[::1], int64[::1])", needs=_NEEDS)
def _peaks(needs: _Records, num_in_use: IntpArray) -> Float64Array:
    """The most pages that each rank's requests, and one more, will hold at any moment:
    float64[ranks].

    `num_in_use` are the pages that the requests of each rank list, each counted once.
    """
    peaks = np.zeros(len(needs))
    assert len(needs) == len(num_in_use)
    for rank in range(len(needs)):
        need = needs[rank]
        # A shared page is given back by the last that reads it: each has its part of it.
        own_part = num_in_use[rank] / max(need.held, 1)
        for j in range(len(need.mean_a)):
            mean = own_part * need.mean_a[j] + need.mean_b[j] + need.more_mean[j]
            most = own_part * need.most_a[j] + need.most_b[j] + need.more_most[j]
            variance = (own_part * need.var_aa[j] + need.var_ab[j]) * own_part
            variance += need.var_bb[j] + need.more_var[j]
            peaks[rank] = max(peaks[rank], min(mean + _NUM_DEVIATIONS * np.sqrt(variance), most))
    return peaks
