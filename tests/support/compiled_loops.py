"""Loops that the workers of a run compile together.

Compiling all takes a worker most of a minute. Each worker begins at another loop, and loads those
that another has compiled from numba's cache.
"""

import os

from sgl_jax.core import compiled
from sgl_jax.core.compiled import compile_loops


def compile_loops_together() -> None:
    """Compile the loops of all imported modules, in an order of this worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    loops = compiled._pending
    start = worker * len(loops) // num_workers
    loops[:] = loops[start:] + loops[:start]
    compile_loops()
