"""Background compilation, and counts of compilations: at start, in the background, in the loop."""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax.monitoring

from sgl_jax.core.progress import Progress

logger = logging.getLogger(__name__)

_TURN_S = 0.0005  # tracing holds the interpreter, and each step needs it several times
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# The watch of each thread within `beside_loop`, of all engines of the process.
_watches_beside: dict[int, "CompileWatch"] = {}


class CompileWatch:
    """Counts the process's compilations, including loads from the persistent cache.

    Attributes:
        num_at_start: compilations until `arm`.
        num_beside_loop: compilations within this watch's `beside_loop`; those within another's
            belong to another engine of the process.
        num_in_loop: all other compilations from `arm` to `disarm`; each is logged as a defect.
    """

    def __init__(self) -> None:
        self.num_at_start = self.num_beside_loop = self.num_in_loop = 0
        self._num_before_arm = 0
        self._armed = False
        # jax keeps listeners until the process ends; this one must not keep the engine alive.
        watch_ref = weakref.ref(self)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            watch = watch_ref()
            if watch is not None and event == _COMPILE_EVENT:
                watch._count(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def arm(self) -> None:
        """Count compilations from now on as defects, except within `beside_loop`."""
        self.num_at_start = self._num_before_arm
        self._armed = True

    def disarm(self) -> bool:
        """Stop counting defects; return True if they were counted."""
        was_armed, self._armed = self._armed, False
        return was_armed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count compilations in this context as defects."""
        was_armed = self.disarm()
        try:
            yield
        finally:
            self._armed = was_armed

    @contextmanager
    def beside_loop(self) -> Iterator[None]:
        """Count this thread's compilations in this context as background compilations."""
        thread = threading.get_ident()
        _watches_beside[thread] = self
        try:
            yield
        finally:
            del _watches_beside[thread]

    def _count(self, duration_s: float) -> None:
        beside = _watches_beside.get(threading.get_ident())
        if beside is not None:
            self.num_beside_loop += beside is self
        elif self._armed:
            self.num_in_loop += 1
            logger.error(
                "defect: a program was compiled in the engine's loop (%.2f s, %d so far)",
                duration_s,
                self.num_in_loop,
            )
        else:
            self._num_before_arm += 1


class BackgroundCompilation:
    """Runs `jobs`, each of which compiles some programs, in order on one thread.

    Attributes:
        error: the error of the first failed job; None if none has failed.
        num_done: ended jobs.
    """

    def __init__(
        self, jobs: Sequence[Callable[[], object]], watch: CompileWatch, progress: Progress
    ) -> None:
        self.error: str | None = None
        self.num_done = 0
        self._jobs = jobs
        self._watch = watch
        self._progress = progress
        self._is_closed = False
        # One thread: the host's other cores are left to the loop.
        self._thread = threading.Thread(target=self._run, name="compile")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """Start no further job. A running job cannot be interrupted; this does not wait for it."""
        self._is_closed = True

    def _run(self) -> None:
        total = len(self._jobs)
        # At the loop's priority: a thread of a lower one would keep the interpreter from the loop
        # while steps take all cores. On a CPU, XLA compiles in threads of the usual priority.
        with (
            self._watch.beside_loop(),
            self._progress.phase("compiling_in_background", total, "programs") as phase,
            _short_turns(),
        ):
            for job in self._jobs:
                # A program may end without a close; its end waits for this thread.
                if self._is_closed or not threading.main_thread().is_alive():
                    return
                try:
                    job()
                except Exception as error:  # of the compiler, or out of memory
                    self.error = self.error or f"{type(error).__name__}: {error}"
                self.num_done += 1
                phase.advance()


@contextmanager
def _short_turns() -> Iterator[None]:
    """Let other threads wait for the interpreter for at most `_TURN_S` in this context."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_s, _TURN_S))
    try:
        yield
    finally:  # another engine may have changed it in the meantime
        sys.setswitchinterval(max(usual_s, sys.getswitchinterval()))
