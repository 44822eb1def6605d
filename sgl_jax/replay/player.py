"""Feeds recorded events to a fresh scheduler and compares what it decides with the recording.

The results of steps come from the recording; there is no device and no executor.
"""

from collections.abc import Callable
from typing import Any

from sgl_jax.core.step_plan import StepPlan
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.replay.difference import first_difference
from sgl_jax.scheduler.event_log import RecordingError
from sgl_jax.scheduler.events import (
    Aborted,
    AnsweredSession,
    AskedSession,
    Event,
    FailedAll,
    Noted,
    Paused,
    Planned,
    Raised,
    Rebuilt,
    ResultRead,
    Started,
    Told,
    TookOutputs,
)
from sgl_jax.scheduler.recorder import describe
from sgl_jax.scheduler.scheduler import Scheduler

# Events after which the scheduler may have come to rest.
_MAY_REST = (ResultRead, Aborted, Paused, FailedAll, AskedSession)


class DifferenceError(Exception):
    """The scheduler did not do what was recorded; the text says at which event, and how."""


class Player:
    """One replay. `check_memory` (off, idle, busy) says when the ledger is proved besides.

    Raises `RecordingError` if no scheduler can be made as `started` says.
    """

    def __init__(self, started: Started, check_memory: str = "off") -> None:
        try:
            self.scheduler = Scheduler(started.sizes, started.args, started.max_passed_over)
        except (ValueError, IndexError, MemoryError) as error:
            raise RecordingError(f"no scheduler can be made of its sizes: {error}") from error
        self.num_events = 1
        self.num_raised = 0  # exceptions, as recorded
        self.notes: list[str] = []
        self._check_memory = check_memory
        self._unread: dict[int, StepPlan] = {}  # planned, not committed, by step id
        self._reply: Any = None  # of the scheduler to the last event that it was told
        self._error: str | None = None  # raised by the last event

    def feed(self, event: Event) -> None:
        """The next event. Raises `DifferenceError`, or `RecordingError` if it cannot be."""
        self.num_events += 1
        if isinstance(event, Raised):
            self._compare(event, "error", event.error, self._error)
            self._error = None
            self.num_raised += 1
            return
        self.finish()
        try:
            self._apply(event)
        except (DifferenceError, RecordingError):
            raise
        except Exception as error:  # of any kind: the recording must have it next
            self._error = describe(error)
        if self._error is None:
            self._prove(event)

    def finish(self) -> None:
        """There is no next event, or it is none that says that the last one raised."""
        if self._error is not None:
            raise DifferenceError(
                f"before event {self.num_events}: nothing raised in the recording, "
                f"got {self._error}"
            )

    def _apply(self, event: Event) -> None:
        scheduler = self.scheduler
        match event:
            case Told():
                if isinstance(event, FailedAll | Rebuilt):
                    self._unread.clear()
                self._reply = event.tell(scheduler)
            case AnsweredSession():
                self._compare(event, "reply", event.reply, self._reply)
            case Planned():
                self._plan(event)
            case ResultRead():
                self._apply_result(event)
            case TookOutputs():
                self._compare(event, "outputs", event.outputs, scheduler.take_outputs())
            case Noted():
                self.notes.append(f"event {self.num_events}: {event.text}")
            case Started() | Raised():
                raise DifferenceError(f"event {self.num_events}: a second beginning")

    def _plan(self, event: Planned) -> None:
        plan = self.scheduler.plan()
        self._compare(event, "plan", event.plan, plan)
        if plan is not None:
            self._unread[plan.step_id] = plan

    def _apply_result(self, event: ResultRead) -> None:
        plan = self._unread.pop(event.step_id, None)
        if plan is None:
            raise DifferenceError(
                f"event {self.num_events}: the result of step {event.step_id}, which was not "
                "planned or was read before"
            )
        self.scheduler.apply_result(plan, event.results)

    def _compare(self, event: Event, path: str, recorded: Any, got: Any) -> None:
        words = first_difference(path, recorded, got)
        if words is not None:
            raise DifferenceError(f"event {self.num_events} ({type(event).__name__}), {words}")

    def _prove(self, event: Event) -> None:
        """The ledger's checks that were asked for besides those of the recording."""
        if self._check_memory == "off":
            return
        if self._check_memory == "busy":
            self._run_check(self.scheduler.check_balance)
        if self.scheduler.is_idle and isinstance(event, _MAY_REST):
            self._run_check(self.scheduler.audit)

    def _run_check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except LedgerError as error:
            raise DifferenceError(f"event {self.num_events}: {describe(error)}") from error
