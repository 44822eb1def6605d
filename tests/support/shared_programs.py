"""Programs that all engines of a test process share, and fewer of them.

Tracing and loading a program takes an engine a second, and most engines of tests have the model,
the sizes and the mesh of another. A program depends on nothing else, unless a test replaces a
function that is traced: such tests have to compile their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.stages import Compiled, Lowered

from sgl_jax.executor import buckets
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.programs import Programs

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_shared: dict[Any, "_Lowered"] = {}
_lower = Programs._lower


class _Lowered:
    """A lowered program that is compiled once for each set of options."""

    def __init__(self, lowered: Lowered) -> None:
        self.out_info = lowered.out_info
        self._lowered = lowered
        self._compiled: dict[Any, Compiled] = {}

    def compile(self, compiler_options: dict[str, bool | str]) -> Compiled:
        key = tuple(compiler_options.items())
        if key in self._compiled:
            # An engine counts it like a program from the persistent cache.
            jax.monitoring.record_event_duration_secs(_COMPILE_EVENT, 0.0)
        else:
            self._compiled[key] = self._lowered.compile(compiler_options=compiler_options)
        return self._compiled[key]


def _lower_once(
    programs: Programs, bucket: Bucket, name: str, run: Any, out_specs: Any, *rest: Any
) -> _Lowered:
    key = (
        *(bucket, name, programs._graphdef, programs._params_tree, programs._weights),
        *jax.tree.flatten((programs._state, programs._row_params, rest)),
        *(programs._sizes, programs._mesh, programs._row_blocks),
    )
    key = tuple(tuple(part) if isinstance(part, list) else part for part in key)
    if key not in _shared:
        _shared[key] = _Lowered(_lower(programs, bucket, name, run, out_specs, *rest))
    return _shared[key]


@contextmanager
def shared_programs() -> Iterator[None]:
    """Let engines within use the programs of earlier engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_lower", _lower_once)
        yield


@contextmanager
def few_shapes() -> Iterator[None]:
    """Let engines made within pad steps to full batches and full chunks, for programs of few
    shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_CPU_TOKENS", buckets._CPU_TOKENS[-1:])
        yield


def forget_programs() -> None:
    """Let the memory of programs go that no engine uses."""
    _shared.clear()
