"""Moves pages between the devices and the host's memory as the scheduler plans it."""

import time

from sgl_jax.core.step_plan import StepPlan
from sgl_jax.engine.prefill_meter import PrefillMeter
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.hosts.group_executor import GroupExecutor
from sgl_jax.scheduler.record.events import PrefillRate, TakeTransfers, TransferEnded
from sgl_jax.scheduler.scheduler import Scheduler


class HostTransfers:
    """The transfers of an engine whose host's memory holds prefixes.

    It also reports the speed of prompts, by which the scheduler chooses to fetch or to compute.
    """

    def __init__(self, scheduler: Scheduler, executor: ModelExecutor | GroupExecutor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._meter = PrefillMeter()

    def move(self) -> None:
        """Report ended transfers to the scheduler, and begin the ones that it plans.

        Raises the errors of `ModelExecutor.transfer`.
        """
        for end in self._executor.ended_transfers():
            self._scheduler.handle(TransferEnded(end))
        if self._scheduler.has_transfers:
            self._executor.transfer(self._scheduler.handle(TakeTransfers()))

    def settle(self) -> None:
        """Wait for prefixes on their way to the host's memory and the store: the blocks of these
        cannot be freed meanwhile."""
        while self._scheduler.is_moving_out:
            self._executor.wait_for_transfers()
            self.move()

    def launched(self, plan: StepPlan) -> None:
        """A step was launched."""
        self._meter.launched(plan, time.monotonic())

    def ended(self, plan: StepPlan) -> None:
        """The result of a step was read."""
        rate = self._meter.ended(plan, time.monotonic())
        if rate is not None:
            self._scheduler.handle(PrefillRate(rate))

    def reset(self) -> None:
        """Steps in flight will not end."""
        self._meter.reset()
