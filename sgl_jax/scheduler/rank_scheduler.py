"""One data-parallel rank of the scheduler: its memory and its running requests.

Gives requests memory (`admit`) and takes it away (`finish`, `retract`); `idle_sessions.py` takes
that of idle sessions. `step_builder.py` chooses the rows of a step, `apply_result.py` applies their
results.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import NO_IMAGES, Int32Array, RowAdmission
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, audit_slices, check_balance
from sgl_jax.mem_cache.pages.pool_records import PoolRecords
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    adopt_prefix,
    release_idle_lease,
    release_kv_cache,
    resume_lease,
)
from sgl_jax.mem_cache.row_states import resumable_len
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree.prompt_tree import NO_TOKENS, PromptTree
from sgl_jax.scheduler.draft_policy import start_drafting
from sgl_jax.scheduler.forecast.output_lengths import OutputLengths
from sgl_jax.scheduler.hint_counts import HintCounts
from sgl_jax.scheduler.idle_sessions import IdleSessions
from sgl_jax.scheduler.image_cache import ImageCache, image_lists
from sgl_jax.scheduler.rank_offload import RankOffload
from sgl_jax.scheduler.request import Departed, Request, RequestState
from sgl_jax.scheduler.running_prompts import RunningPrompts
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows
from sgl_jax.scheduler.working_set import WorkingSet


class RankScheduler:
    """The running requests of rank `dp_rank`; `tables` and `columns` are views of all ranks',
    and `pools` the records of all ranks' pages."""

    def __init__(
        self,
        dp_rank: int,
        sizes: EngineSizes,
        args: SchedulerArgs,
        tables: RowTables,
        columns: RowColumns,
        output_lengths: OutputLengths,
        waiting: PromptTree,
        pools: Sequence[PoolRecords],
    ) -> None:
        self.dp_rank = dp_rank
        self.memory = RankMemory(
            dp_rank,
            sizes,
            use_radix_cache=not args.disable_radix_cache,
            eviction_policy=args.radix_eviction_policy,
            tables=tables,
            waiting=waiting,
            pools=pools,
        )
        self.host = RankOffload(self.memory, args)
        self.working_set = WorkingSet(self.memory, args.working_set_s, is_on=self.host.tier is None)
        max_idle_pages = int(args.session_memory_fraction * sizes.pool_pages[0])
        self.idle_sessions = IdleSessions(self.memory, max_idle_pages)
        self._sizes = sizes
        self.images = self._empty_images()
        self.columns = columns
        self.running = RunningRows(columns)
        self._output_lengths = output_lengths
        self.on_retract: Callable[[Request], None] | None = None
        self.num_retracted = 0
        self.num_force_retracted = 0  # of the retracts, for tests
        self.num_preempted = 0  # of the retracts, for requests of higher priority
        self.num_retracted_input_tokens = 0  # prompts of retracted requests, and outputs so far:
        self.num_retracted_output_tokens = 0
        # Requests that left their rows since `NonFiniteRows` took this list.
        self.departed: list[Departed] = []
        self.num_prompt_tokens = 0  # of all admitted requests, and from the cache:
        self.num_cached_tokens = 0
        self._hints = HintCounts()
        self._max_draft_tokens = sizes.max_draft_tokens
        has_states = sizes.state_group is not None
        self.keeps_snapshots = has_states and not args.disable_radix_cache
        self._eos_token_ids = sizes.eos_token_ids
        self._random_seed = args.random_seed
        self._expects_returns = args.expects_returns
        self.has_agents = False  # whether any request began whose next one is expected
        self.most_request_pages = self.memory.request_pages(sizes.max_request_tokens)
        # `SHORT_PART` times the tokens of short prompts beyond their part of earlier steps.
        self.short_debt = 0
        # Tokens of tenants' images beyond their shares of earlier steps, by number.
        self.tenant_debts: dict[int, int] = {}
        # Admissions to send to the device with the next launched step, by row.
        self.unsent_admissions: dict[int, RowAdmission] = {}
        self.prompts = RunningPrompts(self.memory, self.running)

    def _empty_images(self) -> ImageCache:
        return ImageCache(self._sizes.image_slots, self._sizes.max_chunk_tokens)

    @property
    def num_prompt_tokens_left(self) -> int:
        """Return the number of prompt tokens of running requests still to be computed."""
        rows = self.running.active
        num_left = self.columns.planned_len[rows] - self.memory.rows.kv_committed_len[rows] - 1
        return int(np.maximum(num_left, 0).sum())

    @property
    def num_leases(self) -> int:
        """Return the number of leases that belong to no idle session."""
        return len(self.running) + self.host.num_fetches

    def reset_caches(self) -> None:
        """Empty the prefix caches of device and host. No request may run."""
        self.host.reset()
        self.memory.cache.reset()
        self.images.forget()
        self.departed.clear()  # the caches hold none of their tokens

    def check_balance(self) -> None:
        """Check the rank's counts. Raises `LedgerError`."""
        check_balance(self.memory, self.num_leases)
        self.host.check_balance()

    def audit(self) -> None:
        """Check by a full walk that every page and block has one owner. Raises `LedgerError`."""
        audit(self.memory, self.num_leases)
        self.images.audit(self.running.active.tolist())
        self.host.audit()

    def audit_slices(self) -> Iterator[None]:
        """Run the audit in slices, between which steps may run. Raises `LedgerError`."""
        yield from audit_slices(self.memory, lambda: self.num_leases)
        yield from self.host.audit_slices()
        self.images.audit(self.running.active.tolist())

    # -- room for a request -------------------------------------------------------------------

    @property
    def num_rows_left(self) -> int:
        """Return the number of free rows, including rows of idle sessions."""
        return self.memory.row_pool.num_free + self.memory.sessions.num_idle

    @property
    def has_row(self) -> bool:
        """Return whether a row is free, or available from an idle session."""
        return self.memory.row_pool.num_free > 0 or self.memory.sessions.num_idle > 0

    def num_pages_at_most(self, request: Request) -> int:
        """Return the pages that `request` would take if no running request read its prefix."""
        return self.memory.request_pages(min(len(request.tokens) + 1, request.max_kv_len))

    def num_pages_needed(self, request: Request, cursor: PrefixCursor) -> int:
        """Return the pages that `request` would take: for its known tokens and one more, unless
        that ends it, except pages that running requests also read."""
        return self.num_pages_at_most(request) - self.memory.num_pages_in_use(cursor)

    def reusable_len(self, request: Request, cursor: PrefixCursor) -> int:
        """Return tokens of `request` computed here already, in the tree or its session's lease."""
        if request.kept_by is None:
            return cursor.length
        lease = request.session_lease(self.memory)
        if lease is None:
            return cursor.length
        return max(cursor.length, resumable_len(self.memory, lease, request.resumable_len))

    def admit(self, request: Request, cursor: PrefixCursor) -> int:
        """Give a fitting request a row and the cached part of its prefix; return the row. Idle
        sessions are evicted as needed, least recently used first."""
        memory = self.memory
        num_on_tree = cursor.matched  # now: the tree will change
        lease, start = self._take_lease(request, request.session_lease(memory), num_on_tree)
        if memory.sessions.num_idle:
            needed = self.num_pages_at_most(request) - memory.num_held(lease)
            self.idle_sessions.evict_for(needed)
        row, num_cached, message = lease.row, lease.kv_committed_len, request.message
        request.lease, request.dp_rank, request.matched_len = lease, self.dp_rank, num_cached
        request.num_lost += max(request.computed_len - num_cached, 0)
        if request.num_retractions == 0:
            request.cached_tokens = num_cached
            self.num_prompt_tokens += request.prompt_len
            self.num_cached_tokens += num_cached
        request.state = RequestState.RUNNING
        stop_ids = request.stop_ids(self._eos_token_ids)
        self.running.add(row, request, stop_ids)
        self.columns.length_class[row] = self._output_lengths.class_of(request)
        self.prompts.enter(row, num_on_tree)
        if self._max_draft_tokens:
            start_drafting(self.columns, row, self._max_draft_tokens)
        tokens, images = request.tokens[start:], NO_IMAGES
        if request.images:
            tokens = self._with_slots(lease, request, start)
            images = image_lists(request.images, self._sizes.image_token_side)
        self.has_agents |= self._expects_returns and request.is_of_agent
        self.unsent_admissions[row] = RowAdmission(
            row=row,
            tokens=tokens,
            prompt_len=request.prompt_len,
            sampling=message.sampling,
            seed=request.seed(self._random_seed),
            stop_token_ids=stop_ids,
            start=start,
            logprob_ids=tuple(message.token_ids_logprob),
            logprobs_mode=message.logprobs_mode,
            prompt_logprobs_mode=message.logprobs_mode if message.scores_output else "raw",
            images=images,
        )
        return row

    def has_images(self, request: Request, cursor: PrefixCursor) -> bool:
        """Return whether the images that `request` would compute or read are, or fit, in the
        table of images."""
        self.images.unpin_computed(self.memory.rows.kv_committed_len)
        start = self.reusable_len(request, cursor)
        return self.images.has_room(request.images, request.tokens, start, request.namespace)

    def _with_slots(self, lease: KVLease, request: Request, start: int) -> Int32Array:
        """Return the tokens from `start` on as the device reads them, see `RowAdmission.images`."""
        tokens = request.tokens.copy()
        computed_len = lease.kv_committed_len
        pinned = self.images.pin(
            lease.row, request.images, request.tokens, computed_len, request.namespace
        )
        for first, slots in pinned.items():
            tokens[first : first + len(slots)] = self._sizes.vocab_size + slots
        return tokens[start:]

    def _take_lease(
        self, request: Request, kept: KVLease | None, num_on_tree: int
    ) -> tuple[KVLease, int]:
        """Return a lease with the request's available prefix; evict one session if no row is free.

        `kept` is the lease that the request's session keeps, if the request can resume from it.
        `num_on_tree` of its tokens are on the tree.
        Also returns the first position that the device needs tokens from: a continued row has the
        rest.
        """
        memory, session_id = self.memory, request.kept_by
        goes_on = kept is not None and resumable_len(memory, kept, request.resumable_len) >= 0
        if goes_on and session_id is not None:
            lease = resume_lease(memory, session_id, request.resumable_len)
            start = lease.kv_committed_len
            adopt_prefix(memory, lease, request.matchable())
            return lease, start
        if session_id is not None:
            release_idle_lease(memory, session_id)  # the turn cannot use it
        if memory.row_pool.num_free == 0:
            self.idle_sessions.evict_oldest()
        prefix = request.matchable() if num_on_tree else NO_TOKENS
        lease = memory.open_lease(prefix, request.namespace)
        if session_id is not None:
            memory.sessions.bind(session_id, lease)
        return lease, 0

    def finish(self, row: int, *, num_tokens: int | None = None) -> Request:
        """End the request in `row` normally; keep its first `num_tokens` tokens (default: all)."""
        known_len, max_len = self.columns.known_len[row], self.columns.max_len[row]
        has_ended = num_tokens is not None or known_len < max_len
        self._count_output(row, num_tokens or int(known_len), has_ended=has_ended)
        request = self._leave(row, num_tokens=num_tokens, is_complete=True)
        self._hints.add(request.message, is_recorded=self._expects_returns)
        request.state = RequestState.FINISHED
        self.idle_sessions.evict_excess()
        return request

    def _count_output(self, row: int, num_tokens: int, *, has_ended: bool) -> None:
        """Count the output of a request that leaves with `num_tokens` tokens."""
        output_len = max(num_tokens - int(self.columns.prompt_len[row]), 0)
        number = int(self.columns.length_class[row])
        self._output_lengths.add(number, output_len, has_ended=has_ended)

    def end(self, row: int, *, insert: bool = True, is_own: bool = True) -> Request:
        """End the request in `row` before its output is complete.

        If it is a session's turn, the session keeps the KV of the history before it. `insert` is
        False if the device failed: no KV of the request is kept. `is_own` is False if the engine,
        not the client or a limit, ends it: its output then counts as cut off instead of ended.
        """
        if insert:
            self._count_output(row, int(self.columns.known_len[row]), has_ended=is_own)
        request = self.running.request(row)
        assert request.lease is not None, "a running request holds a lease"
        kept = request.kept_len if request.kept_by is not None else None
        if not insert or kept is None or kept < max(request.lease.cache_protected_len, 1):
            self.memory.sessions.unbind(request.lease)
            kept = None
        self._leave(row, insert=insert, num_tokens=kept)
        self._hints.add(request.message, is_recorded=False)
        request.state = RequestState.FINISHED
        self.idle_sessions.evict_excess()
        return request

    def retract(
        self, row: int, cause: Literal["short", "forced", "preempted", "asked"] = "short"
    ) -> Request:
        """Free the memory of the request in `row`; it keeps its tokens, to run again."""
        lease = self.running.request(row).lease
        assert lease is not None, "a running request holds a lease"
        # A session does not keep the lease: the retract must free memory.
        self.memory.sessions.unbind(lease)
        request = self.running.request(row)
        request.computed_len = lease.kv_committed_len
        request.num_lost = max(int(self.columns.regained_len[row] - self.columns.known_len[row]), 0)
        self._leave(row)
        request.state = RequestState.WAITING
        request.num_retractions += 1
        self.num_retracted_input_tokens += request.prompt_len
        self.num_retracted_output_tokens += len(request.tokens) - request.prompt_len
        request.dp_rank = request.message.dp_rank
        self.num_retracted += 1
        self.num_force_retracted += cause == "forced"
        self.num_preempted += cause == "preempted"
        if self.on_retract is not None:
            self.on_retract(request)
        return request

    def counters(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "requests_retracted": self.num_retracted,
            "requests_preempted": self.num_preempted,
            "requests_force_retracted": self.num_force_retracted,
            "retracted_input_tokens": self.num_retracted_input_tokens,
            "retracted_output_tokens": self.num_retracted_output_tokens,
            "evicted_pages": self.memory.cache.num_evicted,
            "sessions_evicted": self.idle_sessions.num_evicted,
            "image_encodings": self.images.num_encoded,
            "image_cache_hits": self.images.num_hits,
            **self._hints.counters(),
            **self.memory.cache.tree.policy.retained_pages,
            **self.host.counters(),
        }

    def rebuild(self) -> None:
        """Drop all running requests and reset inconsistent memory records without reading them."""
        for row in self.running.active.tolist():
            self.running.remove(row)
        self.memory.rebuild()
        self.images = self._empty_images()
        self.host.forget()
        self.unsent_admissions.clear()
        self.prompts.clear()
        self.departed.clear()

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Keep requests from finding more than `length` tokens of the prefix `tokens` in any cache.
        Idle sessions that keep more of it lose their memory."""
        self.memory.cache.withdraw(tokens, namespace, length)
        self.host.withdraw(tokens, namespace, length)
        self.idle_sessions.drop_withdrawn()

    def withdraw_all(self) -> None:
        """Keep requests from finding any prefix computed so far, also in host memory."""
        self.host.reset()
        self.memory.cache.withdraw_all()
        self.images.forget()
        self.departed.clear()  # the caches find none of their tokens

    def make_stale(self, row: int) -> bool:
        """Let the request in `row` go on with its KV, of earlier weights, for itself only. Return
        False, changing nothing, if the row does not decode yet."""
        lease = self.running.request(row).lease
        assert lease is not None, "a running request holds a lease"
        if lease.kv_committed_len + 1 < self.columns.known_len[row]:
            return False
        lease.is_stale = True
        self.memory.sessions.unbind(lease)
        return True

    def _leave(
        self,
        row: int,
        *,
        insert: bool = True,
        num_tokens: int | None = None,
        is_complete: bool = False,
    ) -> Request:
        request = self.running.request(row)
        tokens: Int32Array = self.running.remove(row)[:num_tokens]
        self.prompts.leave(row)
        self.images.unpin(row)
        request.tokens = tokens
        assert request.lease is not None, "a running request holds a lease"
        epoch = int(self.memory.rows.epoch[row])
        self.departed.append(Departed(row, epoch, tokens, request.namespace, request.matched_len))
        unsent = self.unsent_admissions.pop(row, None)
        if unsent is not None and unsent.start < max(request.lease.kv_committed_len, 1):
            # No later turn can continue from a row with tokens that were never sent to the device.
            self.memory.sessions.unbind(request.lease)
        end = request.path_end(tokens) if is_complete and self._expects_returns else None
        release_kv_cache(self.memory, request.lease, tokens, insert=insert, end=end)
        request.lease = None
        return request
