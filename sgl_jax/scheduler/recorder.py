"""A scheduler whose events are recorded, for `python -m sgl_jax.replay`.

Events are written before the scheduler gets them, its decisions afterwards; if it raises, that is
written too. Must never change what the scheduler does.
"""

from collections.abc import Callable
from typing import Any

from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    OutputBatch,
    PauseMode,
    Reply,
    SessionMessage,
    StopRequest,
)
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array, RankResult, StepPlan
from sgl_jax.scheduler.event_log import EventWriter
from sgl_jax.scheduler.events import (
    Aborted,
    AnsweredSession,
    AskedSession,
    AwaitedPrograms,
    Configured,
    Expected,
    FailedAll,
    Flushed,
    Noted,
    Paused,
    Planned,
    ProgramsReady,
    Raised,
    Rebuilt,
    Refused,
    ResultRead,
    Resumed,
    RetractedAll,
    Started,
    Stopped,
    Submitted,
    Ticked,
    Told,
    TookOutputs,
)
from sgl_jax.scheduler.scheduler import Scheduler


class Recorder:
    """Passes every event on to `scheduler`, which was just made, and writes it."""

    def __init__(self, scheduler: Scheduler, writer: EventWriter) -> None:
        self._scheduler = scheduler
        self._writer = writer
        args, max_passed_over = scheduler.args.for_scheduler(), scheduler.max_passed_over
        writer.write(Started(scheduler.sizes, args, max_passed_over))

    def close(self) -> None:
        """End the recording."""
        self._writer.close()

    def note(self, text: str) -> None:
        """Write something that a reader of the recording should know."""
        self._writer.write(Noted(text))

    def submit(self, message: GenerateRequest) -> None:
        self._tell(Submitted(message))

    def refuse(self, message: GenerateRequest, text: str, status_code: int) -> None:
        self._tell(Refused(message, text, status_code))

    def abort(self, message: AbortRequest) -> None:
        self._tell(Aborted(message))

    def stop(self, message: StopRequest) -> None:
        self._tell(Stopped(message))

    def expect(self, rid: str, first: int, tokens: Int32Array) -> None:
        self._tell(Expected(rid, first, tokens))

    def await_programs(self) -> None:
        self._tell(AwaitedPrograms())

    def programs_ready(self, error: str) -> None:
        self._tell(ProgramsReady(error))

    def session(self, message: SessionMessage) -> Reply:
        reply: Reply = self._tell(AskedSession(message))
        self._writer.write(AnsweredSession(reply))
        return reply

    def flush(self) -> bool:
        return bool(self._tell(Flushed()))

    def pause(self, mode: PauseMode) -> None:
        self._tell(Paused(mode))

    def resume(self) -> None:
        self._tell(Resumed())

    def configure(self, args: SchedulerArgs, chunk_tokens: int) -> None:
        self._tell(Configured(args, chunk_tokens))

    def retract_all(self) -> None:
        self._tell(RetractedAll())

    def fail_all(self, reason: str) -> None:
        self._tell(FailedAll(reason))

    def rebuild(self, reason: str) -> None:
        self._tell(Rebuilt(reason))

    def tick(self, now_s: float) -> None:
        self._tell(Ticked(now_s))

    def plan(self) -> StepPlan | None:
        if self._scheduler.is_resting:
            return self._scheduler.plan()  # there is nothing to decide, many times a second
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            self._writer.write(Planned(None))
            self._writer.write(Raised(describe(error)))
            raise
        self._writer.write(Planned(plan))
        return plan

    def apply_result(self, plan: StepPlan, results: tuple[RankResult, ...]) -> None:
        event = ResultRead(plan.step_id, results)
        self._write_and_call(event, lambda: self._scheduler.apply_result(plan, results))

    def take_outputs(self) -> OutputBatch | None:
        outputs = self._scheduler.take_outputs()
        if outputs is not None:
            self._writer.write(TookOutputs(outputs))
        return outputs

    def _tell(self, event: Told) -> Any:
        return self._write_and_call(event, lambda: event.tell(self._scheduler))

    def _write_and_call(self, event: Told | ResultRead, call: Callable[[], Any]) -> Any:
        self._writer.write(event)
        try:
            return call()
        except Exception as error:
            self._writer.write(Raised(describe(error)))
            raise


def describe(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"
