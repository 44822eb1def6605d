"""Sends heartbeats to the frontend, and detects a hanging engine loop.

Both run in a separate thread. So heartbeats continue during a long step and while the model is
loaded and compiled, and a hung device, which never returns an error, is detected.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_jax.core.engine_messages import HEARTBEAT_INTERVAL_S, Heartbeat
from sgl_jax.core.progress import Progress

logger = logging.getLogger(__name__)


def exit_process() -> None:
    """End this process at once, with the stack of every thread in the log."""
    faulthandler.dump_traceback()
    os._exit(1)


class Watchdog:
    """A thread that calls `beat` every second, and `on_stall` once if `feed` is overdue.

    It runs while this object is entered as a context manager. Each heartbeat includes `progress`.
    `stall_timeout_s` is the time without `feed` that counts as a stall; None: no limit.
    """

    def __init__(
        self,
        beat: Callable[[Heartbeat], None],
        progress: Progress,
        stall_timeout_s: float | None = None,
        on_stall: Callable[[], None] = exit_process,
    ) -> None:
        self._beat = beat
        self._progress = progress
        self._stall_timeout_s = stall_timeout_s
        self._on_stall = on_stall
        self._fed_at = time.monotonic()
        self._is_patient = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def feed(self) -> None:
        """Record the start of a turn of the loop. Call this in each turn."""
        self._fed_at = time.monotonic()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allow a turn to take any time inside this context. Heartbeats continue."""
        self._is_patient = True
        try:
            yield
        finally:
            self.feed()
            self._is_patient = False

    def __enter__(self) -> "Watchdog":
        self.feed()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        timeout_s = self._stall_timeout_s
        interval_s = HEARTBEAT_INTERVAL_S
        if timeout_s is not None:
            interval_s = min(interval_s, timeout_s / 4)
        while True:
            turn_s = time.monotonic() - self._fed_at
            shown_s = None if timeout_s is None else turn_s
            self._beat(Heartbeat(turn_s=shown_s, progress=self._progress.report))
            if timeout_s is not None and turn_s > timeout_s and not self._is_patient:
                logger.critical("no step ended for %.0f s; the engine is stuck", turn_s)
                self._on_stall()
                return
            if self._stopped.wait(interval_s):
                return
