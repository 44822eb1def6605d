"""Loops over arrays of rows, compiled by numba.

Planning and launching a step takes a little work for each of thousands of rows. numpy makes dozens
of passes over memory that has left the processor's caches; a compiled loop makes one. A loop is an
ordinary function over arrays, decorated with its argument types (`compiled`). The engine compiles
all loops, or loads them from numba's cache, before its first step (`compile_loops`). No loop is
compiled afterwards: a call with other types raises `TypeError`.

Rules for a loop:

- Indices are not checked: the loop or its caller must prove that they are in range.
- It computes with integers, so that all hosts get the same results. Floating point is allowed only
  where rounding is the same everywhere (no fast math, no sums in an unspecified order).
- It calls no compiled function and reads no constant of another file: numba's cache detects changes
  only in the loop's file.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import from_dtype, njit, typeof
from numba import types as numba_types
from numpy.typing import NDArray

from sgl_jax.core.progress import Progress

logger = logging.getLogger(__name__)

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

# Declared loops to compile, with their argument types.
_pending: list[tuple[Any, str, dict[str, Any]]] = []


def compiled(
    types: str, **records: np.dtype[Any] | tuple[NDArray[Any], ...]
) -> Callable[[_Loop], _Loop]:
    """Declare a loop over arrays; `compile_loops` compiles it.

    Args:
        types: argument types in numba's notation, such as "(int32[::1], int64)".
        records: numpy record types that `types` refers to by name, and NamedTuples of arrays: one
            of the same types stands for each.
    """

    def declare(function: _Loop) -> _Loop:
        try:
            loop = njit(cache=True)(function)
        except RuntimeError:  # no writable folder for numba's cache
            loop = njit(function)
        _pending.append((loop, types, records))
        declared: _Loop = loop
        return declared

    return declare


def compile_loops(progress: Progress | None = None) -> None:
    if not _pending:
        return
    num_compiled = 0
    with (progress or Progress()).phase("compiling_loops", len(_pending), "loops") as phase:
        while _pending:
            loop, types, records = _pending.pop(0)  # in order: a loop may call earlier loops
            if hasattr(loop, "compile"):  # False with NUMBA_DISABLE_JIT
                names = {
                    name: typeof(each) if isinstance(each, tuple) else from_dtype(each)
                    for name, each in records.items()
                }
                loop.compile(eval(types, vars(numba_types) | names))
                loop.disable_compile()
                num_compiled += not loop.stats.cache_hits
            phase.advance()
    if num_compiled:
        logger.info("compiled %d loops; the others were in the cache", num_compiled)
