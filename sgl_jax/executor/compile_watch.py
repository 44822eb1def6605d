"""Compilations: counted at start, beside the engine's loop and in it, which is a defect; and run
beside it."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax.monitoring

from sgl_jax.core.progress import Progress

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts the process's compilations, loads from the persistent cache among them.

    Attributes:
        num_at_start: until `arm`.
        num_beside_loop: within `beside_loop`.
        num_in_loop: all others from `arm` to `disarm`; each is logged as a defect.
    """

    def __init__(self) -> None:
        self.num_at_start = self.num_beside_loop = self.num_in_loop = 0
        self._num_before_arm = 0
        self._armed = False
        self._threads_beside: set[int] = set()
        # jax keeps listeners for the life of the process; this one must not keep the engine.
        watch_ref = weakref.ref(self)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            watch = watch_ref()
            if watch is not None and event == _COMPILE_EVENT:
                watch._count(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def arm(self) -> None:
        """From here on a compilation is a defect, unless it runs beside the loop."""
        self.num_at_start = self._num_before_arm
        self._armed = True

    def disarm(self) -> bool:
        """Stop counting defects. Returns whether they were counted."""
        was_armed, self._armed = self._armed, False
        return was_armed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compilations within are expected and not counted as defects."""
        was_armed = self.disarm()
        try:
            yield
        finally:
            self._armed = was_armed

    @contextmanager
    def beside_loop(self) -> Iterator[None]:
        """This thread's compilations within delay no step."""
        own = threading.get_ident()
        self._threads_beside.add(own)
        try:
            yield
        finally:
            self._threads_beside.remove(own)

    def _count(self, duration_s: float) -> None:
        if threading.get_ident() in self._threads_beside:
            self.num_beside_loop += 1
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
    """Runs `jobs`, each of which compiles some programs, one after the other on a thread.

    Attributes:
        error: of the first job that failed; None if none has failed.
    """

    def __init__(
        self, jobs: Sequence[Callable[[], object]], watch: CompileWatch, progress: Progress
    ) -> None:
        self.error: str | None = None
        self._jobs = jobs
        self._watch = watch
        self._progress = progress
        self._is_closed = False
        # One thread leaves the host's other cores to the loop.
        self._thread = threading.Thread(target=self._run, name="compile")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True when every job has ended, with success or an error."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Start no further job. The one that runs cannot be interrupted, and is not waited for."""
        self._is_closed = True

    def _run(self) -> None:
        total = len(self._jobs)
        with (
            self._watch.beside_loop(),
            self._progress.phase("compiling_in_background", total, "programs") as phase,
        ):
            for job in self._jobs:
                if self._is_closed:
                    return
                try:
                    job()
                except Exception as error:  # of any type: the compiler's, the devices' memory
                    self.error = self.error or f"{type(error).__name__}: {error}"
                phase.advance()
