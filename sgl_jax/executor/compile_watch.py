"""Counting compilations that happen when none should: after an engine said it was ready."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts the process's compilations between `arm` and `disarm`, and logs each as a defect."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self._armed = False
        # jax keeps listeners for the life of the process; this one must not keep the engine.
        watch_ref = weakref.ref(self)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            watch = watch_ref()
            if watch is not None and event == _COMPILE_EVENT:
                watch._count(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def arm(self) -> None:
        """From here on a compilation is a defect."""
        self._armed = True

    def disarm(self) -> bool:
        """Stop counting compilations. Returns whether they were counted."""
        was_armed, self._armed = self._armed, False
        return was_armed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is compiled within is wanted, and not counted."""
        was_armed = self.disarm()
        try:
            yield
        finally:
            self._armed = was_armed

    def _count(self, duration_s: float) -> None:
        if self._armed:
            self.num_compiles += 1
            logger.error(
                "defect: a program was compiled after ready (%.2f s, %d so far)",
                duration_s,
                self.num_compiles,
            )
