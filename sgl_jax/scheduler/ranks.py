"""All ranks of the scheduler, with the rows of all of them as one range.

Step work common to many rows runs once, on columns over the rows of all ranks; the columns of a
rank are views of these. Row r of rank k is row k * num_rows + r there, its *joint* row. Owns the
columns; other files decide their contents.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from operator import is_not
from typing import Any

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.pages.pool_records import PoolRecords
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.tree.prompt_tree import PromptTree
from sgl_jax.scheduler.forecast.capacity import ROOM, Rooms
from sgl_jax.scheduler.forecast.fits import NO_FLOOR, NO_LIMIT
from sgl_jax.scheduler.forecast.forecast import Forecast
from sgl_jax.scheduler.forecast.output_lengths import OutputLengths
from sgl_jax.scheduler.in_flight_rows import ROW, Records
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.running_rows import RowColumns
from sgl_jax.scheduler.tenants import Tenants

# A step's fixed time, mostly to read the weights, equals the time of this many prompt tokens: the
# operations per byte of a TPU's peak rates are 166 on v5p, 240 on v5e, 312 on tpu7x, 560 on v6e. A
# high value, since waiting requests also gain. No step is worth more prompt tokens than it takes.
STEP_PRICE = 512


class Ranks:
    """The ranks of an engine of the given sizes; `tables` and `running` are indexed by joint row,
    and `host_tiers` are the ranks' host memories, if any."""

    def __init__(self, sizes: EngineSizes, args: SchedulerArgs) -> None:
        num_rows = sizes.dp_size * sizes.num_rows
        self.tables = RowTables.empty(num_rows, len(sizes.groups), sizes.pages_per_row)
        self.running = RowColumns.empty(num_rows, sizes.max_context_len, sizes.max_stop_ids)
        self.output_lengths = OutputLengths()
        self.waiting_prompts = PromptTree(sizes.page_size, sizes.dp_size)
        pools = [PoolRecords.empty(sizes.dp_size, num_pages) for num_pages in sizes.pool_pages]
        self.ranks = []
        for dp_rank, first in enumerate(range(0, num_rows, sizes.num_rows)):
            part = slice(first, first + sizes.num_rows)
            tables, columns = self.tables.part(part), self.running.part(part)
            self.ranks.append(
                RankScheduler(
                    dp_rank,
                    sizes,
                    args,
                    tables,
                    columns,
                    self.output_lengths,
                    self.waiting_prompts,
                    pools,
                )
            )
        self.tenants = Tenants(sizes, is_fair=args.fair_share == "tokens")
        self.page_size = sizes.page_size
        self.has_windows = any(group.sliding_window is not None for group in sizes.groups)
        self.has_states = sizes.state_group is not None
        self.has_images = sizes.image_slots > 0
        self.num_rows = sizes.num_rows
        self.max_draft_tokens = sizes.max_draft_tokens
        self.lookahead_slots = sizes.lookahead_slots
        self.step_token_shapes = sizes.step_token_shapes
        self.pages_per_row = sizes.pages_per_row
        self.num_generated_tokens = 0  # by requests of all ranks
        self.num_verified = 0  # rows with drafts and a read result
        self.num_drafted = 0  # drafted tokens with a read result
        self.num_accepted = 0  # accepted tokens, including tokens past a stop
        self.memories = [rank.memory for rank in self.ranks]
        self._empty_rooms: Rooms = np.zeros(sizes.dp_size, ROOM)
        self._empty_rooms["total"] = sizes.pool_pages[0] - 1
        self._empty_rooms["conservativeness"] = args.schedule_conservativeness
        self._empty_rooms["page_size"] = sizes.page_size
        self.set_chunk_size(sizes.max_chunk_tokens)
        self._empty_rooms["held_above"] = self._empty_rooms["floor"] = NO_FLOOR
        self._empty_rooms["most_tokens"] = NO_LIMIT
        self.host_tiers = [tier for rank in self.ranks if (tier := rank.host.tier) is not None]
        # Each rank's rows, and the cached result of `active` for them.
        self._active_parts: Sequence[RowIndex] = [rank.running.active for rank in self.ranks]
        self._active = self.join(self._active_parts)

    def set_chunk_size(self, num_tokens: int) -> None:
        self._chunk_size = num_tokens
        self._empty_rooms["chunk_size"] = num_tokens
        self._empty_rooms["step_price"] = min(STEP_PRICE, num_tokens)

    def active(self) -> tuple[RowIndex, IntpArray]:
        """Return the joint rows of all running requests, oldest first on each rank, and their
        bounds. Rank k's rows are in [bounds[k], bounds[k + 1])."""
        parts = [rank.running.active for rank in self.ranks]
        # A rank replaces its array of rows at each change.
        if any(map(is_not, parts, self._active_parts)):
            self._active_parts, self._active = parts, self.join(parts)
        return self._active

    def join(self, parts: Sequence[RowIndex]) -> tuple[RowIndex, IntpArray]:
        joint, bounds = np.concatenate(parts), np.array([0, *accumulate(map(len, parts))])
        _make_joint(joint, bounds, self.num_rows)
        return joint, bounds

    def forecast(self) -> Forecast:
        """Return a forecast of the ranks' needs without any requests yet."""
        return Forecast(
            self.output_lengths, self.memories, self.tables, self.running, self._chunk_size
        )

    def rooms(self) -> Rooms:
        """Return the capacity of each rank, ROOM[ranks], without its requests yet."""
        # numpy copies records field by field.
        return np.frombuffer(bytearray(self._empty_rooms.tobytes()), ROOM)

    def forecast_rooms(self) -> Rooms:
        """Return the capacity of each rank next to its running requests, ROOM[ranks]."""
        forecast, rooms = self.forecast(), self.rooms()
        rooms["is_open"] = True
        forecast.add(*self.active(), np.ones(len(self.ranks), np.bool_))
        for dp_rank, rank in enumerate(self.ranks):
            forecast.write(dp_rank, rooms[dp_rank : dp_rank + 1])
            rooms[dp_rank].num_running = len(rank.running)
        return rooms

    def outlooks(self) -> IntpArray:
        """Return int64[ranks, 2]: the steps until the first running request of a rank may end
        (`expected_steps_to_ends`), -1 if none runs, and an upper bound on the pages that they may
        still take."""
        rows, bounds = self.active()
        num_tables = len(self.memories[0].first_tables[0])
        outlooks: IntpArray = _outlooks(
            rows,
            bounds,
            self.running.records,
            self.tables.kv_allocated_len,
            self.page_size,
            num_tables,
        )
        return outlooks

    def states(self) -> list[dict[str, Any]]:
        """Return the memory, load and counts of each rank, as JSON values.

        The fields of `MemoryView` and

        - num_running: running requests.
        - session_pages: pages held only by idle sessions, including the tree's.
        - forecast_pages: pages by which running requests are forecast to grow, at the peak.
        - most_growth_pages: upper bound on pages that running requests may still take.
        - host_pools: `CpuPoolView` of each pool, if the host memory holds prefixes.
        - host_copies_waiting: prefixes that wait to be copied to host memory.
        - counters: counts of this rank.
        """
        states = []
        for rank, room in zip(self.ranks, self.forecast_rooms(), strict=True):
            memory, running, tier = rank.memory, rank.running, rank.host.tier
            states.append(
                {
                    **memory.view().as_dict(),
                    "num_running": len(running),
                    "session_pages": memory.num_session_pages,
                    "forecast_pages": ceil(room.pages[room.peak]) - int(room.num_in_use),
                    "most_growth_pages": int(room.most - room.num_in_use),
                    "host_pools": [view._asdict() for view in rank.host.views()],
                    "host_copies_waiting": len(tier.offers) if tier is not None else 0,
                    "counters": rank.counters(),
                }
            )
        return states

    def locate(self, joint_row: int) -> tuple[RankScheduler, int]:
        """Return the rank of a joint row, and its row there."""
        dp_rank, row = divmod(joint_row, self.num_rows)
        return self.ranks[dp_rank], row


@compiled("(int64[::1], int64[::1], int64)")
def _make_joint(rows: RowIndex, bounds: IntpArray, num_rows: int) -> None:
    """Make joint rows of `rows`; rank k, with `num_rows` rows, has those from bounds[k] on."""
    assert bounds[len(bounds) - 1] == len(rows)
    for rank in range(len(bounds) - 1):
        for i in range(bounds[rank], bounds[rank + 1]):
            rows[i] += rank * num_rows


@compiled("(int64[::1], int64[::1], row[::1], int32[::1], int64, int64)", row=ROW)
def _outlooks(
    rows: RowIndex,
    bounds: IntpArray,
    records: Records,
    allocated_len: Int32Array,
    page_size: int,
    num_tables: int,
) -> IntpArray:
    """Return `Ranks.outlooks` for rows with `num_tables` page tables."""
    outlooks = np.zeros((len(bounds) - 1, 2), np.int64)
    assert bounds[len(bounds) - 1] == len(rows)
    assert len(records) == len(allocated_len)
    for rank in range(len(outlooks)):
        soonest, most_growth = -1, 0
        for i in range(bounds[rank], bounds[rank + 1]):
            assert 0 <= rows[i] < len(records)
            row = records[rows[i]]
            steps = (row.max_len - row.planned_len) // 2
            if soonest < 0 or steps < soonest:
                soonest = steps
            beyond = row.max_len - 1 - allocated_len[rows[i]]
            most_growth += max(beyond + page_size - 1, 0) // page_size
        outlooks[rank, 0], outlooks[rank, 1] = soonest, num_tables * most_growth
    return outlooks
