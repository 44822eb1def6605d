"""What one device of each TPU generation can do, from public documents.

HBM, its bandwidth, peak bf16 and interconnect are those of Google Cloud's pages on the generations
(cloud.google.com/tpu/docs); the clock is what peak and the number of matrix units give. A device is
what JAX calls one: a chip, but on tpu7x one of a chip's two TensorCores, with half of its memory,
bandwidth and links.

`usable_hbm_bytes` is what libtpu's compiler lets a program take, as its out-of-memory error says: a
little is kept back by the runtime.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device; bandwidths in bytes per second, all of them peaks."""

    device_kind: str  # as jax says
    devices_per_chip: int
    usable_hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    clock_hz: float
    ici_link_bytes_per_s: float  # of one link in one direction


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip("TPU v5 lite", 1, int(15.75 * GIB), 819e9, 197e12, 1.5e9, 50e9),
        "v6e": Chip("TPU v6 lite", 1, int(31.25 * GIB), 1640e9, 918e12, 1.75e9, 100e9),
        "v5p": Chip("TPU v5", 1, int(95.74 * GIB), 2765e9, 459e12, 1.75e9, 100e9),
        "tpu7x": Chip("TPU7x", 2, int(94.75 * GIB), 3690e9, 1154e12, 2.2e9, 50e9),
    }
)
