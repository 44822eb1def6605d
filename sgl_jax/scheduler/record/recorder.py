"""Records the events and decisions of a scheduler, for `python -m sgl_jax.replay`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.scheduler import events
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT


class RecordedScheduler(Scheduler):
    """Passes to `write` every event before it is handled, and its decision afterwards."""

    def __init__(
        self,
        sizes: EngineSizes,
        args: SchedulerArgs,
        write: Callable[[events.Record], object],
        max_skip_count: int = MAX_SKIP_COUNT,
    ) -> None:
        super().__init__(sizes, args, max_skip_count)
        self._write = write
        write(events.Started(sizes, args.for_scheduler(), max_skip_count))

    def handle(self, event: events.Event) -> Any:
        # No decision depends on pixels, and they are long.
        match event:
            case GenerateRequest() | events.RestoreCache():
                self._write(event.without_pixels())
            case _:
                self._write(event)
        try:
            value = super().handle(event)
        except Exception as error:
            self._write(events.Raised(f"{type(error).__name__}: {error}"))
            raise
        decision = _decision(event, value)
        if decision is not None:
            self._write(decision)
        return value


def _plan_without_pixels(plan: StepPlan) -> StepPlan:
    if not any(rank.encodings for rank in plan.ranks):
        return plan
    ranks = tuple(
        rank._replace(encodings=tuple(each._replace(pixels=b"") for each in rank.encodings))
        for rank in plan.ranks
    )
    return dataclasses.replace(plan, ranks=ranks)


def _decision(event: events.Event, value: Any) -> events.Decision | None:
    match event:
        case events.PlanStep():
            return events.Planned(value and _plan_without_pixels(value))
        case events.TakeOutputs():
            return events.OutputsTaken(value)
        case events.TakeTransfers():
            return events.TransfersTaken(value)
        case _:
            return events.SessionReply(value) if isinstance(value, Reply) else None
