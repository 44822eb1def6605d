"""TPUs by name: the rates of a device of each generation, and slices as meshes of devices.

HBM, its bandwidth, peak bf16 and interconnect are from Google Cloud's pages on the generations
(cloud.google.com/tpu/docs); the clock follows from the peak and the number of matrix units. A
device is a JAX device: a chip, except on tpu7x, where it is one of a chip's two TensorCores, with
half of its memory, bandwidth and links.

A slice is named as by Google Cloud, such as `v6e-8`: v5e and v6e count chips, v5p and tpu7x count
TensorCores, two per chip. Or it is named by its grid of chips: `v6e:2x4`. Its description comes
from libtpu, which must be installed; no TPU is accessed.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from sgl_jax.core.layer_configs import ActivationFormat
from sgl_jax.executor.devices import arrange_devices, check_devices

GIB = 2**30
# Latency between adjacent chips per step of an exchange (jax-ml.github.io/scaling-book).
ICI_HOP_S = 1e-6
_CHIPS_OF_A_HOST = 4  # in a slice with several hosts
_MOST_CHIPS_OF_A_HOST = 8  # v5e and v6e


@dataclass(frozen=True)
class Chip:
    """One device; all bandwidths are peaks in bytes per second."""

    device_kind: str  # JAX's name
    devices_per_chip: int
    usable_hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    clock_hz: float
    ici_link_bytes_per_s: float  # one link in one direction
    cores_in_name: int  # counted per chip in the name of a slice
    fast_format: ActivationFormat  # multiplied at twice the rate of bf16
    # Share of host memory in the smallest machine type (cloud.google.com/tpu/docs).
    host_memory_bytes: int
    # Of a chip, in one direction: on v5e and tpu7x as measured (examples/microbenchmarks of
    # github.com/AI-Hypercomputer/tpu-raiden), else PCIe's (jax-ml.github.io/scaling-book).
    host_link_bytes_per_s: float
    grids: tuple[tuple[int, ...], ...]  # grids of chips for rent, smallest first

    def matrix_seconds(self, flops: float, activation: ActivationFormat | None = None) -> float:
        """Return the minimum time of products in bf16, or with 8-bit activations."""
        return flops / self.bf16_flops_per_s / (2 if activation == self.fast_format else 1)


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    *((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    *((4, 4, 4), (4, 4, 8), (4, 8, 8)),
)
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip(
            *("TPU v5 lite", 1, int(15.75 * GIB), 819e9, 197e12, 1.5e9, 50e9, 1, "int8"),
            *(48 * GIB, 13e9, _FLAT),
        ),
        "v6e": Chip(
            *("TPU v6 lite", 1, int(31.25 * GIB), 1640e9, 918e12, 1.75e9, 100e9, 1, "int8"),
            *(176 * GIB, 32e9, _FLAT),
        ),
        "v5p": Chip(
            *("TPU v5", 1, int(95.74 * GIB), 2765e9, 459e12, 1.75e9, 100e9, 2, "int8"),
            *(112 * GIB, 15e9, _CUBES),
        ),
        "tpu7x": Chip(
            *("TPU7x", 2, int(94.75 * GIB), 3690e9, 1154e12, 2.2e9, 50e9, 2, "fp8"),
            *(240 * GIB, 46e9, _CUBES),
        ),
    }
)


class Topology(NamedTuple):
    """A slice: a generation and a grid of chips."""

    generation: str
    grid: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Read a name such as `v6e-8` or `v6e:2x4`. Raises ValueError with the allowed names."""
        match = re.fullmatch(r"([a-z0-9]+)[-:](\d+(?:x\d+)*)", name)
        if match is None or match[1] not in CHIPS:
            known = ", ".join(CHIPS)
            raise ValueError(f"--topology must be like v6e-8, of {known}, got {name!r}")
        generation, shape = match[1], match[2]
        slices = cls.all_of(generation)
        if ":" in name:
            kind, asked, got = "grids", shape, shape
            named = {"x".join(map(str, each.grid)): each for each in slices}
        else:
            kind, asked, got = "sizes", name, repr(name)
            named = {each.name: each for each in slices}
        if asked not in named:
            raise ValueError(
                f"--topology: {kind} of {generation} are {', '.join(named)}, got {got}"
            )
        return named[asked]

    @classmethod
    def all_of(cls, generation: str) -> list["Topology"]:
        """Return every slice of a generation, smallest first."""
        return [cls(generation, grid) for grid in CHIPS[generation].grids]

    @property
    def name(self) -> str:
        """Return Google Cloud's name, such as `v6e-8`."""
        return f"{self.generation}-{self.num_chips * self.chip.cores_in_name}"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def num_chips(self) -> int:
        return math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Return the number of machines; a flat slice of up to eight chips is one machine."""
        most = _MOST_CHIPS_OF_A_HOST if self.chip.grids is _FLAT else _CHIPS_OF_A_HOST
        return 1 if self.num_chips <= most else self.num_chips // _CHIPS_OF_A_HOST

    @property
    def host_memory_bytes(self) -> int:
        """Return the memory of each machine."""
        return self.chip.host_memory_bytes * self.num_chips // self.num_hosts

    def meshes(self) -> list[tuple[int, int]]:
        """Return (dp_size, tp_size) of each mesh of the whole slice, most ranks first."""
        devices = self.num_devices
        return [(devices // n, n) for n in range(1, devices + 1) if devices % n == 0]

    def check_mesh(self, dp_size: int, tp_size: int) -> None:
        """Raise ValueError if `serve` would not start on the slice with this mesh."""
        try:
            check_devices(self.num_devices, self.num_hosts, dp_size, tp_size)
        except ValueError as error:
            raise ValueError(f"{error} in {self.name}") from error


def generation_of(device_kind: str) -> str | None:
    """Return the generation of the devices that JAX names so; None if it is unknown."""
    kinds = {chip.device_kind: generation for generation, chip in CHIPS.items()}
    return kinds.get(device_kind)


def topology_mesh(topology: Topology, dp_size: int, tp_size: int) -> Mesh:
    """Return the mesh ('data', 'tensor') that an engine would create on the slice.

    Raises:
        RuntimeError: libtpu is not installed.
        ValueError: the slice has fewer devices.
    """
    topology.check_mesh(dp_size, tp_size)
    return arrange_devices(_devices(topology), dp_size, tp_size)


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _devices(topology: Topology) -> list[topologies.TopologyDescription]:
    if not has_tpu_compiler():
        raise RuntimeError(
            "the TPU's compiler is not installed: pip install 'sgl-jax[tpu]' brings libtpu, which "
            "needs no TPU to compile"
        )
    # Read when libtpu loads: query no metadata server, and allow other processes to load it, too.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("TPU_ACCELERATOR_TYPE", topology.name),
    ):
        os.environ.setdefault(name, value)
    grid = "x".join(map(str, topology.grid))
    # A host has four chips, unless these bounds are set.
    is_other = topology.num_hosts == 1 and topology.num_chips != _CHIPS_OF_A_HOST
    bounds = {"chips_per_host_bounds": (*topology.grid, 1)[:3]} if is_other else {}
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{topology.generation}:{grid}", **bounds
    )
    return list(description.devices)
