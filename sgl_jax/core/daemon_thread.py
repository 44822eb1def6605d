"""A thread that runs jobs one after another, and never keeps the process from ending.

A `ThreadPoolExecutor` waits for its threads when the interpreter ends: a job that hangs in a file
system or a network would hang the process.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonThread:
    """Runs jobs in order. The thread starts with the first job."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """True from the first job until the last one after `close` has ended."""
        return self._thread.is_alive()

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `call` after the jobs before it; the future gets its result or exception."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # of any type: it belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the jobs so far. Does not wait; takes no further job."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
