"""Progress of an engine's long work (loading, compiling), logged and sent with heartbeats.

The phases of a start, in order, except that `compiling` runs next to those before it:

    loading          bytes      weights are read from files
    compiling_loops  loops      the scheduler's loops (`core.compiled`)
    compiling        programs   the programs that `--warmup` names
    warming_up       programs   each runs once

After the start, `loading` (other weights) and `compiling_in_background` may follow.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

PhaseName = Literal[
    "loading", "compiling_loops", "compiling", "warming_up", "compiling_in_background"
]
_LOG_SHARE = 0.1
_LOG_INTERVAL_S = 1.0


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A phase at one moment; 0 <= done <= total. `since` is its start (ISO 8601 in UTC)."""

    phase: PhaseName
    done: int
    total: int
    unit: str
    since: str


class Phase:
    """One phase of a `Progress`. Thread-safe."""

    def __init__(
        self, name: PhaseName, total: int, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name: PhaseName = name
        self._total = total
        self._unit = unit
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._started_at = self._logged_at = clock()
        self._logged_done = 0
        logger.info("%s: %s %s", name, f"{total:,}", unit)

    @property
    def report(self) -> PhaseReport:
        return PhaseReport(
            phase=self._name,
            done=self._done,
            total=self._total,
            unit=self._unit,
            since=self._since,
        )

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done, up to the total. Logs every tenth of the total, but at
        most one line per second."""
        with self._lock:
            self._done = min(self._done + count, self._total)
            now = self._clock()
            gained = self._done - self._logged_done
            if gained < _LOG_SHARE * self._total or now - self._logged_at < _LOG_INTERVAL_S:
                return
            self._logged_done, self._logged_at = self._done, now
        logger.info(
            "%s: %d %% of %s %s after %.1f s",
            self._name,
            100 * self._done // self._total,
            f"{self._total:,}",
            self._unit,
            now - self._started_at,
        )

    def log_end(self) -> None:
        logger.info("%s: ended after %.1f s", self._name, self._clock() - self._started_at)


class Progress:
    """The phases under way in an engine process. Thread-safe."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []

    @contextmanager
    def phase(self, name: PhaseName, total: int, unit: str) -> Iterator[Phase]:
        """Report a phase until this context ends; `total` counts `unit`, a plural noun."""
        phase = Phase(name, total, unit)
        self._phases.append(phase)
        try:
            yield phase
            phase.log_end()
        finally:
            self._phases.remove(phase)

    @property
    def report(self) -> PhaseReport | None:
        """Return the active phase that began last, or None."""
        try:
            return self._phases[-1].report
        except IndexError:  # another thread may end the phase at any time
            return None
