"""Audits the memory of a busy engine in slices, and records the defects that are found."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_jax.core.private_files import make_private_folder
from sgl_jax.mem_cache.dump import write_dump
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.mem_cache.rank_memory import RankMemory

logger = logging.getLogger(__name__)

# Upper bound on the host time of slices, as a share of all time.
MAX_SHARE = 0.006
# Seconds between the starts of two walks, if the share allows it. A walk that needs 0.24 s of host
# time takes 40 s at this share, so each record is verified at least once in 60 s.
PERIOD_S = 20.0
# Bounds the disk space: an engine that continues after a defect may find it repeatedly.
MAX_DUMPS = 10


class BackgroundAudit:
    """Runs the slices of `begin_walk()`, one walk after another, in a bounded share of the time.

    A slice never changes the scheduler's state, so a recording does not need to contain it.

    `thread_time` returns the processor time of the calling thread, in seconds.
    """

    def __init__(
        self,
        begin_walk: Callable[[], Iterator[None]],
        now_s: float,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._begin_walk = begin_walk
        self._thread_time = thread_time
        self.num_walks = 0  # complete walks
        self._started_s = self.due_s = self._proved_s = now_s
        self._walk = begin_walk()

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the end of the last verification of all records."""
        return now_s - self._proved_s

    def proved(self, now_s: float) -> None:
        """Record that all records were verified by other means or have not changed since."""
        self._proved_s = now_s

    def run_if_due(self, now_s: float) -> None:
        """Run the next slice unless `now_s` is before `due_s`.

        Raises `LedgerError` if the slice finds a defect. The walk then starts again.
        """
        if now_s < self.due_s:
            return
        started = self._thread_time()
        try:
            has_ended = next(self._walk, self) is self
        except MemoryDefectError:
            self._restart(now_s)
            raise
        cost_s = self._thread_time() - started
        self.due_s = now_s + cost_s / MAX_SHARE
        if has_ended:
            self.num_walks += 1
            self._proved_s = now_s
            self._restart(max(self.due_s, self._started_s + PERIOD_S))

    def _restart(self, due_s: float) -> None:
        self._walk = self._begin_walk()
        self._started_s = self.due_s = due_s


class DefectRecord:
    """The record of one engine's memory defects.

    Dumps go to `folder`, or if it is None, to a new temporary folder readable only by this user.
    """

    def __init__(self, folder: str | None) -> None:
        self.num_defects = 0
        self._folder = None if folder is None else Path(folder)

    def record(
        self, error: MemoryDefectError, memories: Sequence[RankMemory], context: dict[str, Any]
    ) -> str:
        """Log, dump and count a defect, and return a phrase with the path of the dump."""
        self.num_defects += 1
        where = self._dump(str(error), memories, context)
        logger.critical(
            "the records of the memory are wrong; %s; %s: %s",
            where,
            type(error).__name__,
            error,
            exc_info=error,
        )
        return where

    def _dump(self, reason: str, memories: Sequence[RankMemory], context: dict[str, Any]) -> str:
        if self.num_defects > MAX_DUMPS:
            return f"no memory dump: {MAX_DUMPS} were written already"
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="sgl-jax-memory-"))
            make_private_folder(self._folder)
            path = self._folder / f"memory-{os.getpid()}-{self.num_defects}.json"
            write_dump(path, memories, reason, context)
        except OSError as failure:
            return f"the memory dump could not be written: {failure}"
        return f"memory dump: {path}"
