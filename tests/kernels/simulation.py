"""TPU kernels on the CPU, their DMAs and semaphores simulated.

`simulate` runs a function that contains Pallas kernels and fails on a race and on a semaphore
that a kernel left behind. Neither execution mode sees every mistake: with `LAZY` a DMA moves its
bytes only when it is waited for, so a missing wait gives wrong values; with `EAGER` it moves
them at once, and the race detector speaks. So every kernel is tested in both.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # holds the races flag
from jax.experimental.pallas import tpu as pltpu

# Memory that was not written is NaN in both: any read of it shows.
LAZY = pltpu.InterpretParams(dma_execution_mode="on_wait")
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)
MODES = {"lazy": LAZY, "eager": EAGER}

TOLERANCE = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 1e-2}


class SimulationError(AssertionError):
    """A race, an access out of bounds, or a semaphore that is not zero when its kernel ends."""


class NoWait:
    """A DMA that is not waited for: a fault to seed."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy

    def start(self) -> None:
        self.copy.start()

    def wait(self) -> None:
        pass


def simulate(function: Callable[..., Any], *args: Any) -> Any:
    """Run function(*args), which calls kernels in interpret mode, to its end.

    Raises:
        SimulationError: two accesses of which one is a write were not ordered, an access was out
            of bounds, or a semaphore was left with a count.
    """
    pltpu.reset_tpu_interpret_mode_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            result = jax.block_until_ready(function(*args))
        except jax.errors.JaxRuntimeError as error:
            dispatch.runtime_tokens.clear()  # else the error is raised again when Python exits
            raise SimulationError(str(error)) from error
    races = interpret_pallas_call.races
    if races is not None and races.races_found:
        raise SimulationError(f"race: {printed.getvalue()}")
    if "non-zero count" in printed.getvalue():
        raise SimulationError(printed.getvalue())
    return result


def product_rows(function: Callable[..., Any], *args: Any) -> set[int]:
    """Return the numbers of rows that the kernels of a function multiply at once."""
    found = set()

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.add(equation.outvars[0].aval.shape[0])
            for inner in jax.tree.leaves(equation.params, is_leaf=is_program):
                if is_program(inner):
                    visit(getattr(inner, "jaxpr", inner))

    def is_program(x: Any) -> bool:
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def assert_close(got: Any, want: np.ndarray, dtype: Any) -> None:
    """Within the tolerance of `dtype`, NaN only where the reference has NaN."""
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=0, atol=TOLERANCE[jnp.dtype(dtype)]
    )
