"""Flushes of the prefix caches that wait until no prefix is being written to the store."""

import time
from collections.abc import Callable

from sgl_jax.core.calls import Flushed
from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import FlushCache
from sgl_jax.engine.loop.controls import answer, refusal
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.scheduler.events import Flush
from sgl_jax.scheduler.scheduler import Scheduler

# Timeout after which a flush is refused.
_LIMIT_S = 20.0


class PendingFlushes:
    """The pending flushes of one engine.

    Attributes:
        calls: the calls without a reply, each with its deadline by `time.monotonic()`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.calls: list[tuple[FlushCache, float]] = []

    def add(self, message: FlushCache) -> None:
        self.calls.append((message, time.monotonic() + _LIMIT_S))

    def take(self, rid: str) -> list[FlushCache]:
        taken = [message for message, _ in self.calls if message.rid == rid]
        self.calls = [each for each in self.calls if each[0].rid != rid]
        return taken

    def answer_all(self, send: Callable[[Reply], object], defect_text: str) -> None:
        """Flush if that is possible now, and reply to the calls that need not wait any longer.

        If the flush finds a defect of the memory, all calls are refused with `defect_text` and
        `MemoryDefectError` is raised.
        """
        # Removed first, so that a flush that finds a defect of the memory is not repeated.
        calls, self.calls = self.calls, []
        is_running = self._scheduler.num_running > 0
        may_flush = not is_running and not self._scheduler.is_moving_out
        try:
            is_flushed = may_flush and self._scheduler.handle(Flush())
        except MemoryDefectError:
            for message, _ in calls:
                send(refusal(message, defect_text, status_code=500))
            raise
        if is_flushed:
            for message, _ in calls:
                send(answer(message, Flushed()))
            return
        what = "requests are running" if is_running else "the store still writes prefixes"
        now_s = time.monotonic()
        for message, until_s in calls:
            if is_running or until_s < now_s:
                send(refusal(message, f"{what}; the cache was not flushed", code="busy"))
            else:
                self.calls.append((message, until_s))
