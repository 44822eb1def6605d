"""Kernels compiled by the TPU compiler, and their schedules.

Import this before anything loads libtpu: it makes the compiler write schedules.
"""

import atexit
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernels.schedule import Loop, Schedule, read_schedules, request_dumps

DUMPS = Path(tempfile.mkdtemp(prefix="kernel_cost"))
request_dumps(DUMPS)  # before anything loads libtpu
atexit.register(shutil.rmtree, DUMPS, ignore_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from sgl_jax.planner.topology import Topology, topology_mesh  # noqa: E402

Shape = tuple[tuple[int, ...], Any]  # and the dtype


class Kernel(NamedTuple):
    """A kernel at one shape."""

    name: str
    function: Callable[..., Any]
    shapes: list[Shape]  # of its arguments
    donated: int | None
    unit: str  # for which bundles are counted
    cost: Callable[[Schedule], tuple[float, Loop]]  # bundles per unit, and the loop they are of
    dma: str  # contents of one DMA


def hot_loop(schedule: Schedule) -> Loop:
    """Return the cheapest of the loops that use the matrix unit most: the one without masks."""
    most = schedule.hot_loops[0].units["MXU"]
    loops = [loop for loop in schedule.hot_loops if loop.units["MXU"] > 0.9 * most]
    return min(loops, key=lambda loop: loop.bundles)


def per(amount: float) -> Callable[[Schedule], tuple[float, Loop]]:
    """Return a cost: the hot loop's bundles per unit; a turn does `amount` units of work."""

    def cost(schedule: Schedule) -> tuple[float, Loop]:
        loop = hot_loop(schedule)
        return loop.bundles / amount, loop

    return cost


def longest_loop(schedule: Schedule) -> tuple[float, Loop]:
    """Return the longest loop's bundles per turn, and that loop."""
    loop = max(schedule.loops, key=lambda loop: loop.bundles)
    return loop.bundles, loop


def per_innermost(amount: float) -> Callable[[Schedule], tuple[float, Loop]]:
    """Return a cost: the innermost loop's bundles per unit; a turn does `amount` units of work."""

    def cost(schedule: Schedule) -> tuple[float, Loop]:
        loop = max(schedule.loops, key=lambda loop: loop.depth)
        return loop.bundles / amount, loop

    return cost


class Compiled(NamedTuple):
    """A kernel's program for one chip."""

    schedule: Schedule
    vmem_bytes: int | None
    temp_bytes: int
    compile_s: float


class Schedules(NamedTuple):
    """A program, and the schedules of its kernels and of operations that are scheduled alike."""

    program: jax.stages.Compiled
    schedules: list[Schedule]  # in the order of their compilation
    compile_s: float  # with the time to write schedules


def compile_schedules(lowered: jax.stages.Lowered) -> Schedules:
    """Compile a program for a TPU, and read the schedules that the compiler writes."""
    shutil.rmtree(DUMPS, ignore_errors=True)
    DUMPS.mkdir()
    start = time.process_time()
    program = lowered.compile()
    compile_s = time.process_time() - start
    return Schedules(program, read_schedules(DUMPS), compile_s)


def compile_for(chip: str, make: Callable[[], Kernel]) -> tuple[Kernel, Compiled]:
    """Compile a kernel for one chip of a kind, and read its schedule."""
    mesh = topology_mesh(Topology.all_of(chip)[0], 1, 1)
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        kernel = make()
        structs = [jax.ShapeDtypeStruct(s, dtype, sharding=whole) for s, dtype in kernel.shapes]
        donated = () if kernel.donated is None else (kernel.donated,)
        lowered = jax.jit(kernel.function, donate_argnums=donated).lower(*structs)
    compiled, schedules, compile_s = compile_schedules(lowered)
    lines = (compiled.as_text() or "").splitlines()
    found = (re.search(r"%([A-Za-z_]\w*)", line) for line in lines if '"tpu_custom_call"' in line)
    # A kernel may have another that plans its work, in some bundles.
    names = {name.group(1) for name in found if name}
    schedule = max((s for s in schedules if s.kernel in names), key=lambda s: s.bundles)
    call = next(line for line in lines if f"%{schedule.kernel}" in line and "custom-call(" in line)
    vmem = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', call)
    memory = compiled.memory_analysis()
    assert memory is not None, "libtpu reports the memory of what it compiles"
    return kernel, Compiled(
        schedule, int(vmem.group(1)) if vmem else None, memory.temp_size_in_bytes, compile_s
    )
