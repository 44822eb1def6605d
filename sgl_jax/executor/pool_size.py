"""How many KV pages each rank gets: from the arguments, the device's memory, or the machine's.

Only decides and explains; makes no array.
"""

import logging
import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import platform_of
from sgl_jax.mem_cache.device_pool import KVPoolLayout

logger = logging.getLogger(__name__)

# A CPU run is for trying and testing: it takes this much for KV on its own account, and more only
# so that one request of the full context fits.
_CPU_DEFAULT_BYTES = 1 << 30
_CPU_MEMORY_SHARE = 0.25


def choose_num_pages(
    args: ServerArgs,
    layout: KVPoolLayout,
    mesh: Mesh,
    rows_per_rank: int,
    pages_per_row: int,
    workspace_bytes: int,
) -> int:
    """Pages of one rank, the null page included. Called when the weights are on the devices.

    Args:
        args: `max_total_tokens` decides if set; else the memory that is left does.
        layout: what one page holds.
        mesh: the devices in use.
        rows_per_rank: requests that run on a rank at most.
        pages_per_row: pages of a request of the full context.
        workspace_bytes: what a step needs on each device for a while, beside weights and pages.

    Raises:
        RuntimeError: not even one page beside the null page fits.
    """
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // layout.page_size
        reason = f"--max-total-tokens {args.max_total_tokens}"
    elif platform_of(mesh) == "cpu":
        affordable = int(_available_host_bytes() * _CPU_MEMORY_SHARE)
        affordable //= mesh.shape["data"] * layout.page_bytes
        default = max(pages_per_row, _CPU_DEFAULT_BYTES // layout.page_bytes)
        num_pages = min(rows_per_rank * pages_per_row, default, affordable - 1)
        reason = "the share of this machine's memory that a CPU run takes"
    else:
        # All there is: what requests leave over holds prefixes for later ones.
        free_bytes = min(
            _free_device_bytes(device, args.mem_fraction_static) for device in mesh.local_devices
        )
        num_pages = pages_that_fit(free_bytes, layout, mesh.shape["tensor"], workspace_bytes)
        reason = (
            f"--mem-fraction-static {args.mem_fraction_static} after weights and a step's logits"
        )
    if num_pages < 1:
        raise RuntimeError(
            f"no memory for KV: not one page of {layout.page_size} tokens "
            f"({layout.page_bytes} bytes) fits within {reason}; use a smaller model, more chips "
            "per rank (--tp-size), or a larger --mem-fraction-static"
        )
    logger.info(
        "KV pool: %d pages of %d tokens on each of %d ranks, %.2f GiB per rank, from %s",
        num_pages,
        layout.page_size,
        mesh.shape["data"],
        num_pages * layout.page_bytes / (1 << 30),
        reason,
    )
    return num_pages + 1


def pages_that_fit(
    free_bytes: int, layout: KVPoolLayout, tp_size: int, workspace_bytes: int
) -> int:
    """Pages, beside the null page, in a device's `free_bytes`; 0 or less if there is no room."""
    return (free_bytes - workspace_bytes) // (layout.page_bytes // tp_size) - 1


def _free_device_bytes(device: jax.Device, fraction: float) -> int:
    """What `fraction` of the device's memory leaves beside what is in use now."""
    stats: dict[str, Any] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise RuntimeError(
            f"{device} does not say how much memory it has; set --max-total-tokens instead"
        )
    return int(stats["bytes_limit"] * fraction) - int(stats.get("bytes_in_use", 0))


def _available_host_bytes() -> int:
    """Memory this process could still take: the machine's, within a container's limit."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:  # not Linux: the whole memory is the best that is known
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (
        (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
        (
            Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
            Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        ),
    )
    for limit_file, usage_file in limits:
        if limit_file.is_file() and (limit := limit_file.read_text().strip()) != "max":
            available = min(available, int(limit) - int(usage_file.read_text()))
    return available
