"""Moves pages between device memory and CPU memory as planned by the scheduler."""

import time
from collections.abc import Mapping

from sgl_jax.core.step_plan import StepPlan
from sgl_jax.core.transfers import Transfers
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.multihost.group_executor import GroupExecutor
from sgl_jax.scheduler.events import (
    FetchRate,
    PrefillRate,
    StoreOverdue,
    StoreRate,
    StoreSuspended,
    TakeTransfers,
    TransferEnded,
)
from sgl_jax.scheduler.scheduler import Scheduler

# A load normally ends at the timeout, with the pages loaded so far. This covers a hanging store.
_GRACE_S = 0.5
_POLL_S = 0.002


class OffloadTransfers:
    """The transfers of an engine that keeps prefixes in CPU memory.

    It also reports the rates from which the scheduler decides between loading and computing: the
    rates measured by the executor, and the speed of later prompts. Requests wait at most
    `store_timeout_s` seconds for a lookup and its load; None: until both end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor | GroupExecutor,
        store_timeout_s: float | None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._meter = PrefillMeter(executor.prefill_rate)
        if executor.prefill_rate:
            scheduler.handle(PrefillRate(executor.prefill_rate))
        if executor.fetch_rate:
            scheduler.handle(FetchRate(executor.fetch_rate))
        if executor.store_rate:
            scheduler.handle(StoreRate(executor.store_rate))
        self._store_timeout_s = store_timeout_s
        # Deadlines of the lookups and loads for which a request waits.
        self._due_s: dict[tuple[int, int], float] = {}

    def move(self) -> None:
        """Report ended transfers and begin planned transfers. Raises the errors of the executor."""
        ended_due_s = self._report_ended()
        if self._due_s:
            self._give_up_waiting(time.monotonic())
        if self._scheduler.offload.has_transfers:
            transfers: Transfers = self._scheduler.handle(TakeTransfers())
            if self._store_timeout_s is not None:
                transfers = self._limited(transfers, self._store_timeout_s, ended_due_s)
            self._executor.transfer(transfers)

    def _report_ended(self) -> dict[tuple[int, int], float]:
        """Report ended transfers and replies of the store. Return the deadlines of the ended
        transfers for which requests wait."""
        store = self._executor.store
        for answers in [] if store is None else store.look(time.monotonic()):
            self._scheduler.handle(StoreSuspended(answers))
        ended_due_s = {}
        for end in self._executor.ended_transfers():
            key = end.dp_rank, end.number
            if key in self._due_s:
                ended_due_s[key] = self._due_s.pop(key)
            self._scheduler.handle(TransferEnded(end))
        return ended_due_s

    def _limited(
        self, transfers: Transfers, timeout_s: float, ended_due_s: Mapping[tuple[int, int], float]
    ) -> Transfers:
        due_s = time.monotonic() + timeout_s
        for move in (*transfers.searches, *transfers.loads):
            if move.is_awaited:
                key = move.dp_rank, move.number
                self._due_s[key] = ended_due_s.get(key, due_s)
        loads = [
            load._replace(end_s=self._due_s.get((load.dp_rank, load.number)))
            for load in transfers.loads
        ]
        return transfers._replace(loads=tuple(loads))

    def _give_up_waiting(self, now_s: float) -> None:
        late = [key for key, due_s in self._due_s.items() if due_s + _GRACE_S < now_s]
        for dp_rank, number in late:
            del self._due_s[dp_rank, number]
            self._scheduler.handle(StoreOverdue(dp_rank, number))

    def settle(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for prefixes being written to CPU memory and the store."""
        end_s = time.monotonic() + limit_s
        while self._scheduler.offload.is_moving_out and time.monotonic() < end_s:
            self.move()
            time.sleep(_POLL_S)

    def give_up_puts(self) -> None:
        """Fail all transfers of the store without waiting, so that their pages can be freed."""
        while self._scheduler.offload.is_storing:
            self.move()  # begins planned transfers
            if self._executor.store is not None:
                self._executor.store.give_up()
            self._report_ended()

    def launched(self, plan: StepPlan) -> None:
        self._meter.launched(plan, time.monotonic())

    def ended(self, plan: StepPlan) -> None:
        rate = self._meter.ended(plan, time.monotonic())
        if rate is not None:
            self._scheduler.handle(PrefillRate(rate))

    def reset(self) -> None:
        """Forget steps and transfers in flight, which will not end."""
        self._meter.reset()
        self._due_s.clear()


_LEAST_TOKENS = 64  # of a measured step: the launch dominates the time of shorter steps
_NEW_SHARE = 0.25  # weight of the last step in the moving average
_LEAST_CHANGE = 0.1


class PrefillMeter:
    """Measures from steps as they are launched and as their results are read, in order; times in
    seconds of any one clock. `rate` is the rate reported before, or 0."""

    def __init__(self, rate: float = 0.0) -> None:
        self._launched_s: dict[int, float] = {}
        self._last_end_s = 0.0
        self._rate = self._reported = rate

    def launched(self, plan: StepPlan, now_s: float) -> None:
        self._launched_s[plan.step_id] = now_s

    def ended(self, plan: StepPlan, now_s: float) -> float | None:
        """Return the tokens per second if they differ clearly from the last report, else None."""
        begin_s = max(self._launched_s.pop(plan.step_id), self._last_end_s)
        self._last_end_s = now_s
        num_tokens = max(int(rank.q_lens[rank.num_decode :].sum()) for rank in plan.ranks)
        if num_tokens < _LEAST_TOKENS:
            return None
        rate = num_tokens / max(now_s - begin_s, 1e-6)
        self._rate += (_NEW_SHARE if self._rate else 1.0) * (rate - self._rate)
        if abs(self._rate - self._reported) <= _LEAST_CHANGE * self._reported:
            return None
        self._reported = self._rate
        return self._rate

    def reset(self) -> None:
        self._launched_s.clear()
