"""Feed recorded events to a new scheduler and compare its decisions with the recording.

The results of steps come from the recording, without a device or an executor.
"""

from collections.abc import Callable

from sgl_jax.core.messages import AbortRequest, WithReply
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.replay.difference import first_difference
from sgl_jax.scheduler.events import (
    Decision,
    Event,
    FailAll,
    Note,
    OutputsTaken,
    Pause,
    Planned,
    Raised,
    Record,
    ResultRead,
    SessionReply,
    Started,
    TransfersTaken,
)
from sgl_jax.scheduler.record.event_log import RecordingError
from sgl_jax.scheduler.record.recorder import RecordedScheduler

# Events after which the scheduler may be idle.
_MAY_REST = (ResultRead, AbortRequest, Pause, FailAll, WithReply)


class DifferenceError(Exception):
    """The scheduler decided differently than recorded; the message names event and difference."""


class Player:
    """One replay. `check_memory` (off, idle, busy) sets when the ledger is also checked.

    Raises `RecordingError` if no scheduler can be created from `started`.
    """

    def __init__(self, started: Started, check_memory: str = "off") -> None:
        self._decision: Decision | None = None  # decision of the last event, until it is compared
        try:
            self.scheduler = RecordedScheduler(
                started.sizes, started.args, self._keep, started.max_skip_count
            )
        except (ValueError, IndexError, MemoryError) as error:
            raise RecordingError(f"no scheduler can be made of its sizes: {error}") from error
        self.num_events = 1
        self.num_raised = 0  # exceptions, as recorded
        self.notes: list[str] = []
        self._check_memory = check_memory

    def feed(self, record: Record) -> None:
        """Replay the next record. Raises `DifferenceError`."""
        self.num_events += 1
        match record:
            case Raised() | Planned() | TransfersTaken() | OutputsTaken() | SessionReply():
                self._compare(record)
            case Note():
                self.notes.append(f"event {self.num_events}: {record.text}")
            case Started():
                raise DifferenceError(f"event {self.num_events}: a second beginning")
            case _:
                self.finish()
                self._handle(record)

    def finish(self) -> None:
        """Check that the last event raised nothing that the recording lacks."""
        if isinstance(self._decision, Raised):
            raise DifferenceError(
                f"before event {self.num_events}: nothing raised in the recording, "
                f"got {self._decision.error}"
            )

    def _keep(self, record: Record) -> None:
        if isinstance(record, Decision):
            self._decision = record

    def _handle(self, event: Event) -> None:
        self._decision = None
        try:
            self.scheduler.handle(event)
        except Exception:  # the decision is then `Raised`, which must be recorded next
            return
        self._prove(event)

    def _compare(self, recorded: Decision) -> None:
        got, self._decision = self._decision, None
        self.num_raised += isinstance(recorded, Raised)
        words = first_difference("decision", recorded, got)
        if words is not None:
            kind = type(recorded).__name__
            place = words.removeprefix("decision.")
            raise DifferenceError(f"event {self.num_events} ({kind}), {place}")

    def _prove(self, event: Event) -> None:
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
            raise DifferenceError(f"event {self.num_events}: {error}") from error
