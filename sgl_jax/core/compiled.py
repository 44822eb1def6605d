"""Plain loops over columns of arrays, compiled by numba.

To plan and launch a step is to do a little for each of up to thousands of rows. With numpy calls
that is dozens of passes over memory that has left the processor's caches since the step before; as
a loop it is one. A loop is an ordinary function over arrays, marked with the types that it takes
(`compiled`). The engine has all of them compiled, or loaded from numba's cache, before its first
step (`compile_loops`), and none is compiled afterwards: a call with other types raises `TypeError`.

Rules for a loop:

- Indices are not checked. Its caller, or the loop itself, has proved that they are in range.
- Integers, so that all hosts compute the same; floating point only if rounded alike everywhere
  (no fast mathematics, no sums whose order is left open).
- It calls no compiled function and reads no constant of another file: numba's cache notices
  changes of the loop's own file alone.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import from_dtype, njit
from numba import types as numba_types

logger = logging.getLogger(__name__)

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

# Declared and not compiled yet: a loop, and the types of its arguments.
_pending: list[tuple[Any, str, dict[str, np.dtype[Any]]]] = []


def compiled(types: str, **records: np.dtype[Any]) -> Callable[[_Loop], _Loop]:
    """Declare a loop over arrays, to be compiled by `compile_loops`.

    `types` are its argument types in numba's notation, as "(int32[::1], int64)"; they may name
    the types of `records`.
    """

    def declare(function: _Loop) -> _Loop:
        try:
            loop = njit(cache=True)(function)
        except RuntimeError:  # no folder that could keep it can be written to
            loop = njit(function)
        _pending.append((loop, types, records))
        declared: _Loop = loop
        return declared

    return declare


def compile_loops() -> None:
    """Compile all loops that were declared, or load them from where numba keeps them."""
    start = time.monotonic()
    num_compiled = 0
    while _pending:
        loop, types, records = _pending.pop(0)  # in order: a loop calls loops declared before it
        if not hasattr(loop, "compile"):
            continue  # with NUMBA_DISABLE_JIT it is the plain function
        names = {name: from_dtype(dtype) for name, dtype in records.items()}
        loop.compile(eval(types, vars(numba_types) | names))
        loop.disable_compile()
        num_compiled += not loop.stats.cache_hits
    if num_compiled:
        seconds = time.monotonic() - start
        logger.info("compiled %d loops in %.1f s", num_compiled, seconds)
