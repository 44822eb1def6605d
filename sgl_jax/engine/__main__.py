"""Main program of the engine process. Started by `EngineProcess`, not by hand."""

import os
import sys

from sgl_jax.engine.core import EngineCore
from sgl_jax.engine.process import run_engine


def main() -> None:
    """Run the engine, and end the process with its exit code."""
    code = run_engine(EngineCore)
    sys.stdout.flush()
    # The interpreter would wait for a program that is being compiled, perhaps for a minute.
    os._exit(code)


if __name__ == "__main__":
    main()
