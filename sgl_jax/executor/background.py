"""Compilation beside the engine's loop, which runs on meanwhile."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from sgl_jax.executor.compile_watch import CompileWatch

logger = logging.getLogger(__name__)


class BackgroundCompilation:
    """Runs `jobs`, each of which compiles some programs, one after the other on a thread."""

    def __init__(self, jobs: Sequence[Callable[[], object]], watch: CompileWatch) -> None:
        self._watch = watch
        # One thread leaves the host's other cores to the loop.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._futures: list[Future[None]] = [self._pool.submit(self._run, job) for job in jobs]

    @property
    def is_done(self) -> bool:
        """True when every job has ended, with success or an error."""
        return all(future.done() for future in self._futures)

    @property
    def error(self) -> str | None:
        """The first failed job's error; None if none has failed."""
        errors = (f.exception() for f in self._futures if f.done() and not f.cancelled())
        return next((f"{type(error).__name__}: {error}" for error in errors if error), None)

    def close(self) -> None:
        """Start no further job. The one that runs cannot be interrupted, and is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Callable[[], object]) -> None:
        with self._watch.beside_loop():
            job()
