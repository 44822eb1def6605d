"""The real engine as a program, on a device that fails every step once it is ready."""

import sys

from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.process import run_engine
from tests.support.faults import EVERY, FaultyExecutor


def build(args: ServerArgs, progress: Progress) -> EngineCore:
    core = EngineCore(args, progress)
    faulty = FaultyExecutor(core.executor, failing_launches=EVERY)
    core.executor = core.steps._executor = faulty
    return core


if __name__ == "__main__":
    sys.exit(run_engine(build))
