"""Feed recorded events to a new scheduler and compare its decisions with the recording.

The results of steps come from the recording, without a device or an executor.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_jax.core.calls import WithReply
from sgl_jax.core.messages import AbortRequest
from sgl_jax.mem_cache.errors import LedgerError
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

_MAX_CHARS = 200  # of a value in the text of a difference
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


def first_difference(path: str, recorded: Any, got: Any) -> str | None:
    """Return the place and kind of the first difference of two values; None if they are equal.
    Compares dataclasses, structs, named tuples, sequences, dictionaries and arrays recursively."""
    if isinstance(recorded, np.ndarray) and isinstance(got, np.ndarray):
        return _array_difference(path, recorded, got)
    parts, others = _parts(recorded), _parts(got)
    if type(recorded) is type(got) and parts is not None and others is not None:
        common = [place for place in parts if place in others]
        for place in common:
            words = first_difference(path + place, parts[place], others[place])
            if words is not None:
                return words
        if len(parts) != len(others):
            return f"{path}: recorded {len(parts)} of them, got {len(others)}"
        if len(common) == len(parts):
            return None
    is_same = recorded == got or (recorded != recorded and got != got)  # NaN equals NaN
    return None if is_same else f"{path}: recorded {_cut(recorded)}, got {_cut(got)}"


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a value, keyed by access suffix; None for a scalar."""
    if isinstance(value, dict):
        return {f"[{key!r}]": part for key, part in value.items()}
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None)
    if names is None and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    if names is not None:
        return {f".{name}": getattr(value, name) for name in names}
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return None


def _array_difference(path: str, recorded: np.ndarray, got: np.ndarray) -> str | None:
    if recorded.shape != got.shape:
        return (
            f"{path}: recorded shape {recorded.shape} {_short(recorded)}, "
            f"got shape {got.shape} {_short(got)}"
        )
    is_nan = (recorded != recorded) & (got != got)
    different = np.argwhere((recorded != got) & ~is_nan)
    if len(different) == 0:
        return None
    index = tuple(different[0].tolist())
    place = "".join(f"[{i}]" for i in index)
    return f"{path}{place}: recorded {recorded[index].item()}, got {got[index].item()}"


def _short(array: np.ndarray) -> str:
    return np.array2string(array, threshold=20, separator=", ")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
