"""Main program of the engine process. Started by `EngineProcess`, not by hand."""

import sys

from sgl_jax.engine.core import EngineCore
from sgl_jax.engine.process import run_engine

if __name__ == "__main__":
    sys.exit(run_engine(EngineCore))
