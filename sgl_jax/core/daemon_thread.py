"""A thread that runs jobs in order and never prevents the process from ending.

A `ThreadPoolExecutor` joins its threads when the interpreter exits: a job that hangs in a file
system or a network would block the exit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonThread:
    """Runs jobs in order on a daemon thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Return True from the first `submit` until the last job after `close` has ended."""
        return self._thread.is_alive()

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `call(*args)` after all earlier jobs; the future gets its result or exception."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # the future raises it to the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the jobs submitted so far, without waiting."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
