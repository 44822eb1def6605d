"""One data-parallel rank as the scheduler sees it: its memory and the requests running on it.

Owns how a request gets memory (`try_admit`) and how it loses it again (`finish`, `retract`).
What runs in a step is decided in `step_planner.py`, what its result means in `commit.py`.
"""

import zlib

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS
from sgl_jax.core.step_plan import Int32Array, RowAdmission
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    release_idle_lease,
    release_kv_cache,
    resume_lease,
    roll_back_lease,
)
from sgl_jax.scheduler.admission import AdmissionReserve
from sgl_jax.scheduler.config import SchedulerConfig
from sgl_jax.scheduler.draft_policy import DraftPolicy
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.running_rows import RunningRows


class RankScheduler:
    """Requests of rank `dp_rank`, running."""

    def __init__(self, dp_rank: int, sizes: EngineSizes, config: SchedulerConfig) -> None:
        self.dp_rank = dp_rank
        self.memory = RankMemory(
            dp_rank,
            sizes,
            use_radix_cache=config.use_radix_cache,
            eviction_policy=config.radix_eviction_policy,
        )
        self.running = RunningRows(sizes)
        self.drafts = DraftPolicy(sizes, config.num_draft_tokens)
        self.reserve = AdmissionReserve(config.schedule_conservativeness)
        self.num_retracted = 0
        self.num_evicted_sessions = 0
        self.num_force_retracted = 0  # of these, for tests
        self.num_prompt_tokens = 0  # of all requests admitted, and of those the cache served:
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._config = config
        self._max_session_pages = int(config.session_memory_fraction * sizes.num_pages)
        # What the device has not been told yet, by row: a step that runs nothing is not launched.
        self._unsent_admissions: dict[int, RowAdmission] = {}
        # Admission failed for want of pages, and nothing was given back since.
        self._is_short = False

    @property
    def has_room(self) -> bool:
        """Whether trying to admit a request can succeed."""
        memory = self.memory
        return (memory.rows.num_free > 0 or memory.cache.num_idle > 0) and not self._is_short

    def cached_len(self, request: Request) -> int:
        """Tokens of `request` this rank has cached; a session's slot is not looked up."""
        slot = self._slot_of(request)
        if slot is not None:
            return min(slot.kv_committed_len, self._reusable_len(request))
        return self.memory.cache.peek(request.matchable()).length

    def try_admit(self, request: Request) -> int | None:
        """Give a waiting request a row, if its known tokens and the rank's reserve fit.

        Idle sessions are evicted for it, used longest ago first. Answers the row; None if memory
        is short even so.
        """
        slot = self._slot_of(request)
        while not self._fits(request, slot):
            # Nobody is evicted in vain.
            may_fit = self._fits_without_idle(request, slot)
            if may_fit and slot is None and self._empty_slot_of(request):
                continue  # what it held was of no use to the turn itself
            if not may_fit or not self.evict_idle_session(except_id=request.slot_id):
                self._is_short = True
                return None
        lease = self._take_lease(request, slot)
        request.lease, request.dp_rank = lease, self.dp_rank
        # A row that goes on where it was still has its tokens on the device.
        start = 0 if slot is None else lease.kv_committed_len
        if request.num_retractions == 0:
            request.cached_tokens = lease.kv_committed_len
            self.num_prompt_tokens += request.prompt_len
            self.num_cached_tokens += request.cached_tokens
        request.state = RequestState.RUNNING
        stop_ids = self._stop_ids(request)
        self.running.add(lease.row, request, stop_ids)
        self.drafts.add(lease.row)
        self._unsent_admissions[lease.row] = RowAdmission(
            row=lease.row,
            tokens=request.tokens[start:],
            prompt_len=request.prompt_len,
            sampling=request.message.sampling,
            seed=self._seed(request),
            stop_token_ids=stop_ids,
            start=start,
        )
        return lease.row

    def _slot_of(self, request: Request) -> KVLease | None:
        """The lease in its session's slot, if it can go on with that."""
        if request.slot_id is None:
            return None
        lease = self.memory.cache.idle_lease(request.slot_id)
        if lease is not None and self._reusable_len(request) < lease.cache_protected_len:
            # More of it is the tree's than the turn may read: it is matched anew instead.
            return None
        return lease

    def _empty_slot_of(self, request: Request) -> bool:
        """Take what its session's slot holds; False if that is nothing."""
        cache, session_id = self.memory.cache, request.slot_id
        if session_id is None or cache.idle_lease(session_id) is None:
            return False
        self.release_session(session_id)
        return True

    def _reusable_len(self, request: Request) -> int:
        """Tokens of its session's history that a turn may find in its slot."""
        return min(request.kept_len, len(request.matchable()))

    def _fits(self, request: Request, slot: KVLease | None) -> bool:
        """Whether row, tokens and reserve fit what is free or evictable, idle sessions left out."""
        memory = self.memory
        needed = memory.pages_for(len(request.tokens) + 1)
        if slot is not None:
            # What it holds past the tokens it goes on with is freed, and counts as much.
            needed -= memory.pages_for(slot.kv_allocated_len)
        elif memory.rows.num_free == 0:
            return False
        else:
            peek = memory.cache.peek(request.matchable())
            # Locking a cached prefix takes it from the evictable pages, so it counts as needed.
            needed += peek.num_evictable_pages - peek.length // memory.page_size
        return needed + self.reserve.pages(memory, self.running) <= memory.num_available_pages

    def _fits_without_idle(self, request: Request, slot: KVLease | None) -> bool:
        """Whether row, tokens and reserve would fit, were every other idle session evicted."""
        memory = self.memory
        if memory.rows.num_free == 0 and memory.cache.num_idle == 0:
            return False
        is_needed = memory.needed_pages()
        # Only what running requests need, too, can the request read without taking a page.
        if slot is None:
            known = memory.cache.peek_pages(request.matchable())
        else:
            known = slot.pages(memory.page_size)
        needed = memory.pages_for(len(request.tokens) + 1) - int(is_needed[known].sum())
        available = memory.allocator.num_pages - memory.allocator.num_reserved
        available -= int(is_needed.sum())
        return needed + self.reserve.pages(memory, self.running) <= available

    def _take_lease(self, request: Request, slot: KVLease | None) -> KVLease:
        if slot is not None and request.slot_id is not None:
            return resume_lease(self.memory, request.slot_id, self._reusable_len(request))
        self._empty_slot_of(request)
        lease = self.memory.open_lease(request.matchable())
        if request.slot_id is not None:
            self.memory.cache.bind(request.slot_id, lease)
        return lease

    def evict_idle_session(self, except_id: str | None = None) -> bool:
        """Take the memory of the session used longest ago; False if all others are running.

        It keeps its tokens: its next turn computes again what the tree no longer has.
        """
        session_id = self.memory.cache.oldest_idle(except_id)
        if session_id is None:
            return False
        self.release_session(session_id)
        self.num_evicted_sessions += 1
        return True

    def release_session(self, session_id: str) -> None:
        """Take what an idle session holds, if anything."""
        release_idle_lease(self.memory, session_id)
        self._is_short = False

    def roll_back_session(self, session_id: str, num_tokens: int) -> None:
        """An idle session keeps no more than its first `num_tokens` tokens."""
        roll_back_lease(self.memory, session_id, num_tokens)
        self._is_short = False

    def take_admissions(self) -> tuple[RowAdmission, ...]:
        """What the next launched step must tell the device; the caller sends it, once."""
        admissions = tuple(self._unsent_admissions.values())
        self._unsent_admissions.clear()
        return admissions

    def finish(self, row: int, *, num_tokens: int | None = None) -> Request:
        """End the request in `row` well; its first `num_tokens` tokens (all) are kept."""
        request = self._leave(row, num_tokens=num_tokens)
        request.state = RequestState.FINISHED
        if num_tokens is not None and request.slot_id is not None:
            # What it had generated further is of no use to an idle session.
            self.roll_back_session(request.slot_id, len(request.tokens))
        self._bound_sessions()
        return request

    def end(self, row: int, *, insert: bool = True) -> Request:
        """End the request in `row` before its time. A session's turn leaves what was before it.

        Not `insert`: the device failed, and nothing that it wrote is kept.
        """
        request = self.running.request(row)
        assert request.lease is not None, "a running request holds a lease"
        kept = request.kept_len if request.slot_id is not None else None
        if not insert or kept is None or kept < max(request.lease.cache_protected_len, 1):
            self.memory.cache.unbind(request.lease)
            kept = None
        self._leave(row, insert=insert, num_tokens=kept)
        request.state = RequestState.FINISHED
        if request.slot_id is not None:
            # What the turn had reserved is of no use to an idle session.
            self.roll_back_session(request.slot_id, request.kept_len)
        self._bound_sessions()
        return request

    def retract(self, row: int, *, forced: bool = False) -> Request:
        """Take the memory of the request in `row` away; it keeps its tokens, to run again.

        `forced` though memory suffices, which says nothing about the reserve.
        """
        lease = self.running.request(row).lease
        assert lease is not None, "a running request holds a lease"
        # A session's slot holds nothing back: memory is what the retract is for.
        self.memory.cache.unbind(lease)
        request = self._leave(row)
        request.state = RequestState.WAITING
        request.num_retractions += 1
        request.dp_rank = request.message.dp_rank
        self.num_retracted += 1
        if forced:
            self.num_force_retracted += 1
        else:
            self.reserve.after_retract()
        return request

    def rebuild(self) -> None:
        """The books are wrong: forget what runs and start with empty memory, asking no book."""
        for row in self.running.active.tolist():
            self.running.remove(row)
        self.memory.rebuild()
        self._unsent_admissions.clear()
        self._is_short = False

    def _leave(self, row: int, *, insert: bool = True, num_tokens: int | None = None) -> Request:
        request = self.running.request(row)
        tokens: Int32Array = self.running.remove(row)[:num_tokens]
        request.tokens = tokens
        assert request.lease is not None, "a running request holds a lease"
        unsent = self._unsent_admissions.pop(row, None)
        is_untold = unsent is not None and unsent.start == 0
        if is_untold or len(tokens) < request.lease.cache_protected_len:
            # No later turn can go on with a row whose tokens the device was never told, nor
            # where the tree owns more than the session will know (a stop found late).
            self.memory.cache.unbind(request.lease)
        release_kv_cache(self.memory, request.lease, tokens, insert=insert)
        request.lease = None
        self._is_short = False
        return request

    def _bound_sessions(self) -> None:
        """Idle sessions hold no more than their share: those used longest ago give theirs up."""
        while self.memory.idle_sessions_keep_more_than(self._max_session_pages):
            self.evict_idle_session()

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        sampling = request.message.sampling
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        return tuple(dict.fromkeys(eos + sampling.stop_token_ids))[:MAX_STOP_TOKEN_IDS]

    def _seed(self, request: Request) -> int:
        """The request's seed as uint32; without one, drawn from its id and the engine's seed."""
        seed = request.message.sampling.seed
        if seed is None:
            return zlib.crc32(request.rid.encode(), self._config.random_seed & 0xFFFFFFFF)
        return (seed ^ (seed >> 32)) & 0xFFFFFFFF
