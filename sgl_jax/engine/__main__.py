"""Main program of the engine process, started by `EngineProcess`."""

import os
import sys

from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.process import Core, run_engine


def _build(args: ServerArgs, progress: Progress) -> Core:
    # Imported here, since importing jax takes seconds and heartbeats must start before that.
    from sgl_jax.engine.loop.core import EngineCore
    from sgl_jax.engine.multihost_worker import WorkerCore

    return WorkerCore(args, progress) if args.node_rank else EngineCore(args, progress)


def main() -> None:
    code = run_engine(_build)
    sys.stdout.flush()
    # A normal exit would wait for a running compilation, perhaps for a minute.
    os._exit(code)


if __name__ == "__main__":
    main()
