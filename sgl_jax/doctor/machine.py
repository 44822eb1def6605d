"""Versions, devices and memory, and the bandwidth of memory, host link and collectives."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.doctor.report import Redaction, Section
from sgl_jax.layers.mesh_axes import MESH_AXES
from sgl_jax.planner.topology import CHIPS, GIB, Chip, generation_of

_PACKAGES = ("sgl-jax", "jax", "jaxlib", "libtpu", "flax", "numpy")
_VARIABLES = ("JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "XLA_FLAGS")
# Bytes of an array: more than caches hold, and a small share of a device's memory.
_ACCELERATOR_BYTES = 1 << 29
_CPU_BYTES = 1 << 26
_REPEATS = 8


def chip_of(mesh: Mesh) -> Chip | None:
    """Return the published rates of the mesh's devices; None if they are not known."""
    generation = generation_of(mesh.devices.flat[0].device_kind)
    return None if generation is None else CHIPS[generation]


def describe_machine(mesh: Mesh, redact: Redaction) -> Section:
    """Report versions, devices and memory."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    devices = list(mesh.devices.flat)
    memory: dict[str, int] = devices[0].memory_stats() or {}
    limit, in_use = (memory.get(name) for name in ("bytes_limit", "bytes_in_use"))
    variables = {name: redact(os.environ[name]) for name in _VARIABLES if os.environ.get(name)}
    facts = {
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_visible_devices": jax.device_count(),
        "mesh": dict(mesh.shape),
        "device_memory_bytes": limit,
        "device_memory_bytes_in_use": in_use,
        "variables": variables,
    }
    memory_text = "memory not reported" if limit is None else f"{limit / GIB:.2f} GiB each"
    lines = [
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"{facts['system']}, {facts['num_cpus']} CPUs",
        f"{len(devices)} of {jax.device_count()} devices: {devices[0].device_kind} "
        f"({devices[0].platform}), {memory_text}; dp {mesh.shape['data']} x tp "
        f"{mesh.shape['tensor']}",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    return Section("machine", lines, facts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure_bandwidth(mesh: Mesh) -> Section:
    """Measure the bandwidth of a device's memory, of its host link, and of all-reduces."""
    device, chip = mesh.devices.flat[0], chip_of(mesh)
    size = _CPU_BYTES if device.platform == "cpu" else _ACCELERATOR_BYTES
    section = Section("bandwidth")

    def note(name: str, text: str, rate: float, published: float | None) -> None:
        section.facts[name] = {"bytes_per_s": rate, "published_bytes_per_s": published}
        of = f" of {published / 1e9:,.0f} ({rate / published:.0%})" if published else ""
        section.lines.append(f"{text:34}{rate / 1e9:10,.1f} GB/s{of}")

    rate = _memory_rate(device, size)
    note(
        "memory",
        "device memory, read and write",
        rate,
        None if chip is None else chip.hbm_bytes_per_s,
    )
    if device.platform != "cpu":
        link = None if chip is None else chip.host_link_bytes_per_s
        to_device, to_host = _link_rates(device, size // 2)
        note("to_device", "host to device", to_device, link)
        note("to_host", "device to host", to_host, link)
    for axis in MESH_AXES:
        if mesh.shape[axis] > 1:
            text = f"all-reduce over {mesh.shape[axis]} devices ({axis})"
            note(f"all_reduce_{axis}", text, _all_reduce_rate(mesh, axis, size // 8), None)
    return section


def _best_s(run: Callable[[], Any]) -> float:
    """Return the shortest time of a few runs, after one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _memory_rate(device: Any, num_bytes: int) -> float:
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)

    @jax.jit
    def add(x: jax.Array) -> jax.Array:
        # Several passes in one launch, so that the launch takes a small share of the time.
        total: jax.Array = lax.fori_loop(0, _REPEATS, lambda _, y: y + 1, x)
        return total

    return 2 * num_bytes * _REPEATS / _best_s(partial(add, x))


def _link_rates(device: Any, num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second to the device, and from it."""
    numbers = np.ones(num_bytes // 4, np.float32)
    add = jax.jit(lambda x: x + 1)
    there = jax.device_put(numbers, device)
    seconds = []
    for _ in range(_REPEATS):  # an array keeps its copy on the host, so each needs a new one
        fresh = jax.block_until_ready(add(there))
        begin = time.perf_counter()
        np.asarray(fresh)
        seconds.append(time.perf_counter() - begin)
    to_device = _best_s(lambda: jax.device_put(numbers, device, may_alias=False))
    return num_bytes / to_device, num_bytes / min(seconds)


def _all_reduce_rate(mesh: Mesh, axis: str, num_bytes: int) -> float:
    """Return the bytes per second that each device sends in a ring: 2 (n - 1) / n of the array."""
    n: int = mesh.shape[axis]
    spec = P(MESH_AXES)
    shape = (mesh.size * num_bytes // 4,)
    x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
    reduce = jax.jit(
        jax.shard_map(
            lambda own: lax.psum(own, axis) / n,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    return 2 * (n - 1) / n * num_bytes / _best_s(partial(reduce, x))
