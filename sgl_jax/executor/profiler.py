"""Device traces, written to folders that clients name.

JAX opens the folder only when it writes a trace, and a trace that cannot be written stays open
forever, so a test file is written first. JAX writes `plugins/profile/TIME/HOST.xplane.pb` below the
folder, for TensorBoard's profile plugin and xprof.
"""

import contextlib
import logging
import tempfile
from pathlib import Path

import jax

from sgl_jax.core.private_files import make_private_folder

logger = logging.getLogger(__name__)


class Profiler:
    """Traces devices, one trace at a time."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.steps_left: int | None = None  # None: until `stop`, or no trace runs

    def start(self, folder: Path, num_steps: int | None = None) -> None:
        """Trace into `folder`, which is created, until `stop`, or until `num_steps` have ended.

        Raises RuntimeError if a trace is running, OSError (without creating the folder) if it is
        not writable.
        """
        if self._folder is not None:
            raise RuntimeError(f"a trace into {str(self._folder)!r} runs already")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            _try_to_write(folder)
            jax.profiler.start_trace(str(folder))
        except BaseException:
            for path in made:
                with contextlib.suppress(OSError):  # no longer empty
                    path.rmdir()
            raise
        self._folder, self.steps_left = folder, num_steps

    def after_step(self) -> None:
        """Count a finished step if `steps_left` is not None; the last step ends the trace."""
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left > 0:
            return
        self.steps_left = None
        try:
            logger.info("the trace is in %s", self.stop())
        except OSError as error:
            logger.error("the trace runs on, until it is stopped: %s", error)

    def stop(self) -> Path:
        """Write the trace and return its folder. Raises RuntimeError if none is running, OSError if
        it cannot be written now; the trace then continues."""
        if self._folder is None:
            raise RuntimeError("no trace runs")
        _try_to_write(self._folder)
        jax.profiler.stop_trace()
        folder, self._folder, self.steps_left = self._folder, None, None
        return folder


def _try_to_write(folder: Path) -> None:
    make_private_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
