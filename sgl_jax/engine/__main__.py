"""Main program of the engine process. Started by `EngineProcess`, not by hand."""

import os
import sys

from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.process import Core, run_engine


def _build(args: ServerArgs, progress: Progress) -> Core:
    # Imported here, since jax takes seconds, in which heartbeats are sent already.
    from sgl_jax.engine.follower import FollowerCore
    from sgl_jax.engine.loop.core import EngineCore

    return FollowerCore(args, progress) if args.node_rank else EngineCore(args, progress)


def main() -> None:
    """Run the engine, and end the process with its exit code."""
    code = run_engine(_build)
    sys.stdout.flush()
    # The interpreter would wait for a program that is being compiled, perhaps for a minute.
    os._exit(code)


if __name__ == "__main__":
    main()
