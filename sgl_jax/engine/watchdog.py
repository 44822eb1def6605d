"""Notices when the engine loop stands still: a hung device never returns an error."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


def exit_process() -> None:
    """End this process at once, leaving the stack of every thread in the log."""
    faulthandler.dump_traceback()
    os._exit(1)


class Watchdog:
    """Calls `on_stall` once, from its own thread, when `feed` was not called for `timeout_s`.

    A context manager: watches from enter to exit.
    """

    def __init__(self, timeout_s: float, on_stall: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._fed_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def feed(self) -> None:
        """The loop is alive."""
        self._fed_at = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.feed()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 4)):
            silent_s = time.monotonic() - self._fed_at
            if silent_s > self._timeout_s:
                logger.critical("no step ended for %.0f s; the engine is stuck", silent_s)
                self._on_stall()
                return
