"""Moves pages between the devices and the host's memory as the scheduler plans it."""

import time
from collections.abc import Mapping

from sgl_jax.core.step_plan import StepPlan
from sgl_jax.core.transfers import Transfers
from sgl_jax.engine.loop.prefill_meter import PrefillMeter
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.hosts.group_executor import GroupExecutor
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

# A load itself ends at the timeout, with the blocks so far; this is for a store that hangs.
_GRACE_S = 0.5
_POLL_S = 0.002


class HostTransfers:
    """The transfers of an engine whose host's memory holds prefixes.

    It also reports the rates by which the scheduler chooses to load or to compute: the ones that
    the executor has measured, and the speed of later prompts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor | GroupExecutor,
        store_timeout_s: float | None,
    ) -> None:
        """Requests wait `store_timeout_s` at most for a search and its load; None: for all."""
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
        # The awaited searches and loads under way, and the times by which they are to end.
        self._due_s: dict[tuple[int, int], float] = {}

    def move(self) -> None:
        """Report ended transfers to the scheduler, and begin the ones that it plans.

        Raises the errors of `ModelExecutor.transfer`.
        """
        ended_due_s = self._report_ended()
        if self._due_s:
            self._give_up_waiting(time.monotonic())
        if self._scheduler.has_transfers:
            transfers: Transfers = self._scheduler.handle(TakeTransfers())
            if self._store_timeout_s is not None:
                transfers = self._limited(transfers, self._store_timeout_s, ended_due_s)
            self._executor.transfer(transfers)

    def _report_ended(self) -> dict[tuple[int, int], float]:
        """Report ended transfers, and answers of the store. Return the times by which awaited
        transfers were to end."""
        for answers in self._executor.look_at_store():
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
        """Set the ends of awaited loads: a load has the time that its search has left, and its
        number."""
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
        """Wait for prefixes on their way to the host's memory and the store, `limit_s` at most."""
        end_s = time.monotonic() + limit_s
        while self._scheduler.is_moving_out and time.monotonic() < end_s:
            self.move()
            time.sleep(_POLL_S)

    def give_up_puts(self) -> None:
        """End all transfers of the store as failed, without a wait: their blocks can be freed
        then."""
        while self._scheduler.is_storing:
            self.move()  # begins the ones that were planned
            self._executor.give_up_store()
            self._report_ended()

    def launched(self, plan: StepPlan) -> None:
        """A step was launched."""
        self._meter.launched(plan, time.monotonic())

    def ended(self, plan: StepPlan) -> None:
        """The result of a step was read."""
        rate = self._meter.ended(plan, time.monotonic())
        if rate is not None:
            self._scheduler.handle(PrefillRate(rate))

    def reset(self) -> None:
        """Steps and transfers in flight will not end."""
        self._meter.reset()
        self._due_s.clear()
