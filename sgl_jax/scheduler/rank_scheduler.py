"""One data-parallel rank as the scheduler sees it: its memory and the requests running on it.

Owns how a request gets memory (`try_admit`) and how it loses it again (`finish`, `retract`).
What runs in a step is decided in `step_planner.py`, what its result means in `commit.py`.
"""

import zlib

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS
from sgl_jax.core.step_plan import Int32Array, RowAdmission
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.scheduler.admission import AdmissionReserve
from sgl_jax.scheduler.config import SchedulerConfig
from sgl_jax.scheduler.draft_policy import DraftPolicy
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.running_rows import RunningRows


class RankScheduler:
    """Requests of rank `dp_rank`, running."""

    def __init__(self, dp_rank: int, sizes: EngineSizes, config: SchedulerConfig) -> None:
        self.dp_rank = dp_rank
        self.memory = RankMemory(dp_rank, sizes, use_radix_cache=config.use_radix_cache)
        self.running = RunningRows(sizes)
        self.drafts = DraftPolicy(sizes, config.num_draft_tokens)
        self.reserve = AdmissionReserve(config.schedule_conservativeness)
        self.num_retracted = 0
        self.num_force_retracted = 0  # of these, for tests
        self.num_prompt_tokens = 0  # of all requests admitted, and of those the cache served:
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._config = config
        # What the device has not been told yet, by row: a step that runs nothing is not launched.
        self._unsent_admissions: dict[int, RowAdmission] = {}
        # Admission failed for want of pages, and nothing was given back since.
        self._is_short = False

    @property
    def has_room(self) -> bool:
        """Whether trying to admit a request can succeed."""
        return self.memory.rows.num_free > 0 and not self._is_short

    def cached_len(self, request: Request) -> int:
        """Tokens of `request` this rank has cached."""
        return self.memory.cache.peek(request.matchable()).length

    def try_admit(self, request: Request) -> int | None:
        """Give a waiting request a row, if its known tokens and the rank's reserve fit.

        Answers the row; None, changing nothing, if memory is short.
        """
        memory = self.memory
        peek = memory.cache.peek(request.matchable())
        # Locking the cached prefix takes it from the evictable pages, so it is counted as needed.
        fresh_pages = memory.pages_for(len(request.tokens) + 1) - peek.length // memory.page_size
        needed = fresh_pages + peek.num_evictable_pages
        if needed + self.reserve.pages(memory, self.running) > memory.num_available_pages:
            self._is_short = True
            return None
        lease = memory.open_lease(request.matchable())
        request.lease, request.dp_rank = lease, self.dp_rank
        if request.num_retractions == 0:
            request.cached_tokens = lease.cache_protected_len
            self.num_prompt_tokens += request.prompt_len
            self.num_cached_tokens += request.cached_tokens
        request.state = RequestState.RUNNING
        stop_ids = self._stop_ids(request)
        self.running.add(lease.row, request, stop_ids)
        self.drafts.add(lease.row)
        self._unsent_admissions[lease.row] = RowAdmission(
            row=lease.row,
            tokens=request.tokens,
            prompt_len=request.prompt_len,
            sampling=request.message.sampling,
            seed=self._seed(request),
            stop_token_ids=stop_ids,
        )
        return lease.row

    def take_admissions(self) -> tuple[RowAdmission, ...]:
        """What the next launched step must tell the device; the caller sends it, once."""
        admissions = tuple(self._unsent_admissions.values())
        self._unsent_admissions.clear()
        return admissions

    def finish(self, row: int, *, insert: bool = True, num_tokens: int | None = None) -> Request:
        """End the request in `row` for good; its first `num_tokens` tokens (all) are kept."""
        request = self._leave(row, insert=insert, num_tokens=num_tokens)
        request.state = RequestState.FINISHED
        return request

    def retract(self, row: int, *, forced: bool = False) -> Request:
        """Take the memory of the request in `row` away; it keeps its tokens, to run again.

        `forced` though memory suffices, which says nothing about the reserve.
        """
        request = self._leave(row, insert=True, num_tokens=None)
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

    def _leave(self, row: int, *, insert: bool, num_tokens: int | None) -> Request:
        request = self.running.request(row)
        tokens: Int32Array = self.running.remove(row)[:num_tokens]
        request.tokens = tokens
        self._unsent_admissions.pop(row, None)
        assert request.lease is not None, "a running request holds a lease"
        release_kv_cache(self.memory, request.lease, tokens, insert=insert)
        request.lease = None
        self._is_short = False
        return request

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
