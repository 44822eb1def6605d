"""Compiling for a chip that is only described, and how long that took."""

import time

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.planner.topology import CHIPS

MAX_COMPILE_S = 10  # of one kernel


def struct(dtype, *dims):
    """An array that is not there."""
    return jax.ShapeDtypeStruct(dims, dtype)


def num_bytes(array):
    """Of an array with its dtype, unpadded."""
    return array.size * array.dtype.itemsize


def compile_on(mesh, function, *arguments, donated=()):
    """`function` of such arrays, or of None, as a program for a chip; and the seconds of work."""
    lowered = lower_on(mesh, function, *arguments, donated=donated)
    # Of all threads of this process alone: the machine may be busy.
    start = time.process_time()
    return lowered.compile(), time.process_time() - start


def lower_on(mesh, function, *arguments, donated=()):
    """`function` of such arrays for a chip, before it is compiled."""
    whole = NamedSharding(mesh, P())
    placed = jax.tree.map(lambda array: array.update(sharding=whole), arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donated).lower(*placed)


def num_kernels(program):
    """Pallas calls of a compiled program."""
    return program.as_text().count('custom_call_target="tpu_custom_call"')


def generations(*by_default):
    """Parameters of a test: every generation of chip, of which the others are long."""
    return [
        pytest.param(name, marks=() if name in by_default else pytest.mark.long) for name in CHIPS
    ]


def check_states_in_place(compiled, seconds, state_bytes, most_temporary):
    """A recurrence's program of three kernels updates all states in place, and copies none."""
    memory = compiled.memory_analysis()
    assert num_kernels(compiled) == 3
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < most_temporary
    assert seconds < 3 * MAX_COMPILE_S
