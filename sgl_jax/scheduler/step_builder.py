"""Chooses the rows of one rank's next step.

Each running request needs the tokens between its committed length and its end: one token if it
decodes, more if it (still or again) prefills. All decode rows run, first in the step, with drafts
if these are useful and memory allows. Prefill chunks follow while the step's prompt tokens last:
the highest priority first, then the oldest request. If the prompts of one priority need more tokens
than the step has for them, a part goes to the prompts with the fewest tokens left, so that a long
prompt delays no short prompt by more than a few steps (`shared_tokens.py`). A prompt with requested
log-probabilities gets only as many tokens as the step may score, so that it delays no other.

Running rows get their decode slots before other requests start, and their chunks afterwards. So a
request of a higher priority starts ahead of the chunks of lower priorities.

A shortage of pages is ordinary: evict, then retract the request that costs least to recompute.
"""

from bisect import insort_right

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import BoolArray, Int32Array, RowIndex
from sgl_jax.mem_cache.release import free_tails
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.draft_policy import grow_for_drafts
from sgl_jax.scheduler.forecast.fits import NO_FLOOR, NO_LIMIT
from sgl_jax.scheduler.image_cache import image_ahead, whole_images_end
from sgl_jax.scheduler.preemption import choose_victim
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.runnable import Need, decode_ends
from sgl_jax.scheduler.shared_tokens import SHORT_PART, SharedTokens
from sgl_jax.scheduler.tenants import Tenants

_NO_DRAFTS = np.zeros(0, np.int32)


class StepBuilder:
    """The rows of one rank's next step while they are chosen.

    First `grow_decoding` if decode rows lack slots, then `admit` or `preempt`, then `choose_rows`,
    then read the chosen rows.

    Args:
        rank: its memory provides the step's pages.
        sizes: the sizes of the engine.
        decode_rows, needs, has_slots: the rank's part of `Runnable`.
        chunk_tokens: prompt tokens that the step may hold, at most `sizes.max_chunk_tokens`.
        tenants: the tenants of the requests.
    """

    # First values. Most ranks only decode in most steps, and then nothing else is set.
    num_drafts = _NO_DRAFTS  # of each decode row; empty if there is no speculation
    drafts: Int32Array | None = None  # `RankPlan.drafts`
    num_prefill_tokens = 0  # needed in this step or later
    # The step has prompt tokens for another request if its priority is above this floor. If it is
    # above by one, it must also have at most `most_tokens` tokens to compute, or a tenant, by
    # number, of `open_tenants`.
    priority_floor, most_tokens = NO_FLOOR, NO_LIMIT
    open_tenants: BoolArray | None = None
    _is_short = False  # whether there was an unservable row
    _has_admitted = False
    # If the prompt tokens do not suffice, the rows among which the last of them are divided.
    _shared: SharedTokens | None = None

    def __init__(
        self,
        rank: RankScheduler,
        sizes: EngineSizes,
        decode_rows: RowIndex,
        needs: dict[int, Need],
        chunk_tokens: int,
        tenants: Tenants,
        *,
        has_slots: bool,
    ) -> None:
        self.rank, self._sizes, self._tenants = rank, sizes, tenants
        self.decode_rows, self._needs, self.has_slots = decode_rows, needs, has_slots
        self.retracted: list[Request] = []  # since memory is short
        self.preempted: list[Request] = []  # for requests that start
        self.unservable: list[int] = []  # rows that do not fit even an empty rank
        self.chunks: dict[int, int] = {}  # prompt tokens by row
        # Priorities of prompts, the highest first, with the tokens that higher ones leave.
        self._levels: list[tuple[int, int]] = []
        self._num_left = chunk_tokens
        self.chunk_size = chunk_tokens  # prompt tokens of the step
        self._num_scored_left = sizes.max_prompt_logprob_tokens
        # Rows of prompts, the highest priority first, then the oldest.
        self._prefilling = list(self._needs)
        if self._needs:
            self._begin_prompts(self._needs)

    def _begin_prompts(self, needs: dict[int, Need]) -> None:
        if len(needs) > 1 and self.rank.running.priorities.differ:
            self._prefilling.sort(key=lambda row: -needs[row][2])  # stable
        self.num_prefill_tokens = sum([need[0] for need in needs.values()])
        self._take_in_order()

    def grow_decoding(self) -> None:
        """Reserve the slots of the decode rows; if memory is short, retract requests."""
        self.decode_rows = self._grow_or_retract(self.decode_rows)
        if self.retracted:
            self._plan_tokens()

    def choose_rows(self) -> None:
        """Take memory for drafts and for chunks of prompts, including admitted ones."""
        if self._sizes.max_draft_tokens:
            rank, rows = self.rank, self.decode_rows
            ends = decode_ends(rank.memory.rows, rank.columns, rows)
            grown = grow_for_drafts(rank.memory, rank.running, rows, ends, self._sizes)
            self.num_drafts, self.drafts = grown
        if self._prefilling or not len(self.decode_rows):
            self._add_chunks()

    @property
    def can_admit(self) -> bool:
        """Return whether a new request could start in this step. None can right after a retract:
        the memory taken from one request belongs to the requests that needed it."""
        return not self.retracted and not self._is_short

    def take_unservable(self) -> list[int]:
        """Return the rows, at least one, that do not fit even an empty rank and must end."""
        rows = self.unservable
        self.unservable, self._is_short = [], True
        return rows

    def takes(self, priority: int, tenant: int, num_tokens: int) -> bool:
        """Return whether the step has prompt tokens for another request of that priority and
        tenant, with `num_tokens` to compute."""
        if priority != self.priority_floor + 1:
            return priority > self.priority_floor
        is_open = self.open_tenants is not None and bool(self.open_tenants[tenant])
        return is_open or num_tokens <= self.most_tokens

    def num_tokens_left(self, priority: int, tenant: int, num_tokens: int) -> int:
        """Return the number of prompt tokens that the step has for another request of that priority
        and tenant, with `num_tokens` to compute."""
        if not self.takes(priority, tenant, num_tokens):
            return 0
        if self._shared is not None and priority == self._shared.priority:
            return self._shared.num_left(num_tokens, tenant)
        return next((left for level, left in self._levels if level < priority), self._num_left)

    def is_served(self, row: int) -> bool:
        """Return whether the prefilling `row` gets prompt tokens of the step, as planned so far."""
        if self._shared is None:
            return True
        priority = self._needs[row][2]
        if priority != self._shared.priority:
            return priority > self._shared.priority
        return self._shared.serves(row)

    @property
    def is_prefilling(self) -> bool:
        """Return whether any row had more than one token to compute, in this step or later."""
        return bool(self._prefilling)

    def admit(self, request: Request, cursor: PrefixCursor) -> int:
        """Start a waiting request that fits, and return its row."""
        row = self.rank.admit(request, cursor)
        self._has_admitted = True
        self.num_prefill_tokens += self._count_needs(row)[0]
        insort_right(self._prefilling, row, key=lambda each: -self._needs[each][2])
        floor, most_tokens = self.priority_floor, self.most_tokens
        shared = None if self._shared is None else self._shared.priority
        if request.priority in (shared, self.rank.running.priorities.lowest):
            self._take_tokens(row)  # no later row gets tokens
        else:
            self._plan_tokens()
        # The candidates of the step were chosen by these limits.
        if self.priority_floor < floor:
            self.priority_floor, self.most_tokens, self.open_tenants = floor, most_tokens, None
        elif self.priority_floor == floor:
            self.most_tokens = min(self.most_tokens, most_tokens)
        return row

    def preempt(self, row: int) -> None:
        """Retract the request in `row` for a request that starts in this step."""
        self.decode_rows = self.decode_rows[self.decode_rows != row]
        self._drop_prompt(row)
        self.preempted.append(self.rank.retract(row, "preempted"))
        self._plan_tokens()

    def _drop_prompt(self, row: int) -> None:
        """Forget the prompt of a row before its request leaves."""
        if row in self._prefilling:
            self._prefilling.remove(row)
            self.num_prefill_tokens -= self._needs[row][0]

    # -- prompt tokens ----------------------------------------------------------------------

    def _plan_tokens(self) -> None:
        """Count the prompt tokens that the prefilling rows leave."""
        self._num_left = self.chunk_size
        self._num_scored_left = self._sizes.max_prompt_logprob_tokens
        self.priority_floor, self.most_tokens = NO_FLOOR, NO_LIMIT
        self.open_tenants = self._shared = None
        self._levels.clear()
        self._take_in_order()

    def _take_in_order(self) -> None:
        for row in self._prefilling:
            self._take_tokens(row)
            if self._num_left <= 0:
                return

    def _take_tokens(self, row: int) -> None:
        """Count the prompt tokens that `row` takes, the next in the order of chunks."""
        priority = self._needs[row][2]
        if not self._levels or self._levels[-1][0] != priority:
            self._levels.append((priority, self._num_left))
        count, num_scored = self._share(row, self._num_left, self._num_scored_left)
        self._num_left -= count
        self._num_scored_left -= num_scored
        if self._shared is not None:
            self._shared.add(row, self._needs[row][0], int(self.rank.columns.tenant[row]))
            self._limit()
        elif self._num_left <= 0:
            self._divide(*self._levels[-1])

    def _divide(self, priority: int, num_tokens: int) -> None:
        """Divide the `num_tokens` prompt tokens left by higher priorities among the rows of
        `priority`, which need all of them."""
        num_short = 0
        if not self.rank.short_debt:
            least = max(num_tokens // SHORT_PART, self.rank.memory.page_size)
            num_short = min(least, num_tokens // 2)
        needs = self._needs
        self._shared = SharedTokens(
            priority,
            {row: needs[row][0] for row in self._prefilling if needs[row][2] == priority},
            num_tokens,
            num_short,
            self.rank.columns.tenant,
            self._tenants.step_weights(),
            self.rank.tenant_debts,
        )
        self._limit()

    def _limit(self) -> None:
        """Limit admission to requests that get prompt tokens."""
        assert self._shared is not None
        self.open_tenants = self._shared.open_tenants()
        self.most_tokens = self._shared.most_tokens()
        is_open = self.most_tokens > 0 or self.open_tenants is not None
        self.priority_floor = self._shared.priority - is_open
        if not is_open:
            self.most_tokens = NO_LIMIT  # of higher priorities

    def _share(self, row: int, num_left: int, num_scored_left: int) -> tuple[int, int]:
        """Return how many of `num_left` prompt tokens `row` takes, and how many it scores."""
        num_wanted, num_unscored, _ = self._needs.get(row) or self._count_needs(row)
        if num_planned := self.chunks.get(row, 0):
            num_wanted, num_unscored = num_wanted - num_planned, max(num_unscored - num_planned, 0)
        count = min(num_wanted, num_left)
        if count <= num_unscored:
            return count, 0
        count = min(count, num_unscored + num_scored_left)
        return count, count - num_unscored

    def _count_needs(self, row: int) -> Need:
        """Return what `row` needs, which changes only as the step is launched."""
        columns, committed = self.rank.columns, self.rank.memory.rows.kv_committed_len.item(row)
        num_wanted = columns.planned_len.item(row) - committed
        num_unscored = max(columns.score_start.item(row) - committed, 0)
        need = self._needs[row] = num_wanted, num_unscored, columns.priority.item(row)
        return need

    def prefilling_rows(self) -> list[int]:
        """Return the rows with more than one token to compute, in this step or later: the highest
        priority first, then the oldest."""
        return [row for row in self._prefilling if self._needs[row][0] > 1]

    # -- choosing rows ----------------------------------------------------------------------

    def _grow_or_retract(self, rows: RowIndex) -> RowIndex:
        """Reserve one more slot for each of `rows`, retracting until they fit; return the rest."""
        memory, sessions = self.rank.memory, self.rank.idle_sessions
        while len(rows):
            ends = decode_ends(memory.rows, self.rank.columns, rows)
            if memory.grow_rows(rows, ends):
                break
            if free_tails(memory, rows, ends) or self.rank.host.drop_fetches():
                continue
            if sessions.evict_for(int(memory.pages_to_grow(rows, ends).sum())):
                continue
            victim = self._retract_one()
            if victim is None:
                # The only row, and still short: wait until any finished requests are read.
                if len(self.rank.running) == 1:
                    self.unservable.append(int(rows[0]))
                return rows[:0]
            rows = rows[rows != victim]
        return rows

    def _retract_one(self) -> int | None:
        """Retract a request to free memory; never the only one. Return its row, or None."""
        victim = choose_victim(self.rank.memory, self.rank.running)
        if victim is not None:
            self._drop_prompt(victim)
            self.retracted.append(self.rank.retract(victim))
        return victim

    def _add_chunks(self) -> None:
        """Add a chunk of each prefilling row within the step's prompt tokens and memory."""
        running = self.rank.running
        self._num_left = self.chunk_size
        self._num_scored_left = self._sizes.max_prompt_logprob_tokens
        if (shared := self._shared) is None:
            self.rank.short_debt = 0
            self.rank.tenant_debts.clear()
        if self._prefilling:  # the first, so that others' tokens never leave too few for it
            self._add_image(self._prefilling[0])
        for row in self._prefilling:
            if self._num_left <= 0:
                break
            if shared is not None and self._needs[row][2] == shared.priority:
                self._add_parts(shared)
                shared = None
            self._add_chunk(row, self._num_left, self._num_scored_left)
        if self._has_admitted:
            return  # a request just started may have its first chunk in the next step
        # Prefills that block each other would wait forever: retract until one can go on.
        while not (len(self.decode_rows) or self.chunks or self.unservable):
            rows = running.runnable()
            if not len(rows) or len(rows) < len(running):
                return  # a finished request will free its pages when its result is read
            first = int(rows[running.columns.priority[rows].argmax()])
            count = self._add_image(first)
            if count or self._add_chunk(first, self._num_left, self._num_scored_left)[0]:
                return
            if self._retract_one() is None:
                self.unservable.append(first)
                return

    def _add_image(self, row: int) -> int:
        """Add the image that `row` has to compute next, if steps must not split it; return how many
        tokens. It may exceed the step's prompt tokens, but not those of the engine's steps."""
        if not self._sizes.whole_images:
            return 0
        start = int(self.rank.memory.rows.kv_committed_len[row]) + self.chunks.get(row, 0)
        num_tokens = image_ahead(self.rank.running.request(row).images, start)
        if not 0 < num_tokens <= self._sizes.max_chunk_tokens - sum(self.chunks.values()):
            return 0
        self._num_left = max(self._num_left, num_tokens)
        return self._add_chunk(row, num_tokens, self._num_scored_left)[0]

    def whole_len(self, row: int, count: int) -> int:
        """Return `count`, or fewer tokens if a chunk of so many of `row` would split an image."""
        if not self._sizes.whole_images:
            return count
        start = int(self.rank.memory.rows.kv_committed_len[row])
        return whole_images_end(self.rank.running.request(row).images, start + count) - start

    def _add_parts(self, shared: SharedTokens) -> None:
        """Add chunks of each part of the tokens. Tokens of scored positions are divided in
        proportion. A short part of a page, and the last image of a part, may exceed the part: the
        next steps have none until that is made up for."""
        num_scored_before, num_taken = self._num_scored_left, 0
        most_debt = self._sizes.max_image_tokens if self._sizes.whole_images else 0
        for rows, most in shared.parts():
            num_left = min(most - sum(self.chunks.get(row, 0) for row in rows), self._num_left)
            is_short = rows is shared.short_rows
            part = min(most, shared.num_tokens // SHORT_PART) if is_short else most
            num_scored_left = num_scored_before * part // shared.num_tokens
            for row in rows:
                if num_left <= 0:
                    break
                num_scored_left = min(num_scored_left, self._num_scored_left)
                count, num_scored = self._add_chunk(row, num_left, num_scored_left)
                count = count or self._add_image(row)
                num_left, num_scored_left = num_left - count, num_scored_left - num_scored
            num_chosen = sum(self.chunks.get(row, 0) for row in rows)
            if is_short:
                num_taken = SHORT_PART * num_chosen
            else:
                tenant = int(self.rank.columns.tenant[rows[0]])
                self.rank.tenant_debts[tenant] = min(max(num_chosen - most, 0), most_debt)
        self.rank.short_debt = max(self.rank.short_debt + num_taken - shared.num_tokens, 0)

    def _add_chunk(self, row: int, num_left: int, num_scored_left: int) -> tuple[int, int]:
        """Plan as many of `row`'s needed tokens as fit, of `num_left` and `num_scored_left`. Return
        how many, and how many of them are scored."""
        memory = self.rank.memory
        num_planned = self.chunks.get(row, 0)
        start = int(memory.rows.kv_committed_len[row]) + num_planned
        wanted, num_scored = self._share(row, num_left, num_scored_left)
        while (room := memory.tokens_that_fit(row) - start) < wanted and (
            self.rank.host.drop_fetches() or self.rank.idle_sessions.evict_oldest()
        ):
            pass
        count = self.whole_len(row, num_planned + min(wanted, room)) - num_planned
        if count <= 0 or not memory.grow_row(row, start + count):
            return 0, 0
        if count < wanted:
            _, num_scored = self._share(row, count, num_scored_left)
        self.chunks[row] = num_planned + count
        self._num_left -= count
        self._num_scored_left -= num_scored
        return count, num_scored
