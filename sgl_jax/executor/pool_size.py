"""The number of pages or states of each pool, from the arguments or from available memory.

Decides and explains; makes no array.
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.devices import platform_of
from sgl_jax.layers.mesh_axes import of_each_host
from sgl_jax.mem_cache.device_pool import KVPoolLayout

logger = logging.getLogger(__name__)

# CPU runs are for tests and experiments: by default they take this much for KV, and more only if
# one request of the full context needs it.
_CPU_DEFAULT_BYTES = 1 << 30
_CPU_MEMORY_SHARE = 0.25


# Window pages that the prefix cache may add: one per this many pages of the first pool. All windows
# take at most this multiple of the first pool's bytes.
# docs/measurements/eviction.md compares smaller shares.
_CACHED_PER_WINDOW_PAGE = 2
_MOST_WINDOW_BYTES = 3


# Bytes of snapshots of states per byte of the first pool's pages; docs/measurements/eviction.md
# compares other shares. The states of running rows take at most as many bytes as these pages.
_SNAPSHOT_BYTES = 0.75
_MOST_OWN_BYTES = 1.0
_ROW_SNAPSHOTS = 2  # per row: the last, and one that may still be undone


class StateSizes(NamedTuple):
    """The size and number of slots for recurrent states."""

    slot_bytes: int  # bytes of one state: all recurrent layers, over all chips of a rank
    row_slots: int  # slots of each row
    max_snapshots: int | None = None  # set by the user; None: a share of memory
    # True if the arguments set the numbers of pages and rows, so that memory is not divided here.
    is_given: bool = False


class KVPools(NamedTuple):
    """The pools of one rank and the division of memory among them; null pages are extra.

    The first pool decides admission and gets the memory that the other pools leave. Each other pool
    holds windows, and has pages for the windows of all rows at once, so that a row never waits for
    one: if memory is too small for that, there are fewer rows.
    """

    layouts: tuple[KVPoolLayout, ...]  # one per pool
    num_tables: tuple[int, ...]  # cache groups in each pool
    resting_pages: tuple[int, ...]  # maximum pages of each pool per row between steps
    step_pages: tuple[int, ...]  # pages of each pool for the prompts of one step
    num_rows: int  # maximum
    window_tokens_ratio: float | None = None  # tokens of another pool per token of the first
    states: StateSizes | None = None  # recurrent layers: an additional pool, the last

    def pages(self, num_first: int) -> tuple[int, ...]:
        """Return the pages of each pool if the first has `num_first`."""
        others = range(1, len(self.layouts))
        pages = num_first, *(self._num_window_pages(pool, num_first) for pool in others)
        return pages if self.states is None else (*pages, self._num_snapshots(num_first))

    def _num_snapshots(self, num_first: int) -> int:
        assert self.states is not None
        if self.states.max_snapshots is not None:
            return self.states.max_snapshots
        first_bytes = num_first * self.layouts[0].page_bytes
        least = _ROW_SNAPSHOTS * self.num_rows if self.states.is_given else 1
        return max(least, int(_SNAPSHOT_BYTES * first_bytes) // self.states.slot_bytes)

    def _num_window_pages(self, pool: int, num_first: int) -> int:
        if self.window_tokens_ratio is not None:
            per_page = self.num_tables[pool] / self.num_tables[0]
            return int(num_first * self.window_tokens_ratio * per_page)
        held = self.num_rows * self.resting_pages[pool] + self.step_pages[pool]
        first_bytes = num_first * self.layouts[0].page_bytes
        most = _MOST_WINDOW_BYTES * first_bytes // self.layouts[pool].page_bytes
        least = self.resting_pages[pool] + self.step_pages[pool]  # for one row
        return max(least, min(most, held + num_first // _CACHED_PER_WINDOW_PAGE))

    def num_bytes(self, num_first: int) -> int:
        """Return the bytes of all pools, null pages included."""
        pages = self.pages(num_first)
        in_pages = sum(
            (num + 1) * layout.page_bytes for num, layout in zip(pages, self.layouts, strict=False)
        )
        if self.states is None:
            return in_pages
        num_rows = max(self.rows_within(pages), 1) + 1  # plus the null row
        num_slots = pages[-1] + 1 + num_rows * self.states.row_slots
        return in_pages + num_slots * self.states.slot_bytes

    def num_that_fit(self, num_bytes: int) -> int:
        """Return the maximum pages of the first pool if all pools take `num_bytes`; < 0: none."""
        most = num_bytes // self.layouts[0].page_bytes
        return bisect_right(range(most + 1), num_bytes, key=self.num_bytes) - 1

    def rows_within(self, pages: Sequence[int]) -> int:
        """Return the number of rows with windows and states that all fit in pools of `pages`."""
        each = [
            (pages[pool] - self.step_pages[pool]) // self.resting_pages[pool]
            for pool in range(1, len(self.layouts))
        ]
        if self.states is not None and not self.states.is_given:
            own_bytes = int(_MOST_OWN_BYTES * pages[0] * self.layouts[0].page_bytes)
            each.append(max(1, own_bytes // (self.states.row_slots * self.states.slot_bytes)))
        return min([self.num_rows, *each])

    def require_a_row(self, pages: Sequence[int]) -> None:
        """Raise ValueError if pools of `pages` have no room for the windows of one row."""
        if self.rows_within(pages) < 1:
            raise ValueError(
                f"--swa-full-tokens-ratio {self.window_tokens_ratio} gives sliding windows too few "
                f"pages for one request: {pages[1:]} with {pages[0]} of the first pool; raise it"
            )


def choose_pool_pages(
    args: ServerArgs,
    pools: KVPools,
    mesh: Mesh,
    pages_per_row: int,
    workspace_bytes: int,
    unloaded_bytes: int = 0,
) -> tuple[int, ...]:
    """Return the pages of each pool of one rank, null pages included.

    Args:
        args: `max_total_tokens` decides if set, else free memory.
        pools: the pools of the rank.
        mesh: the devices in use.
        pages_per_row: pages of one group for a request of the full context.
        workspace_bytes: a step's temporary arrays on each device, excluding weights and pages.
        unloaded_bytes: weights that each device still has to load.

    Raises:
        RuntimeError: no page fits in addition to the null page.
        ValueError: `--swa-full-tokens-ratio` leaves windows too few pages.
    """
    layout, tables = pools.layouts[0], pools.num_tables[0]
    if args.max_total_tokens is not None:
        num_first = args.max_total_tokens // layout.page_size * tables
        reason = f"--max-total-tokens {args.max_total_tokens}"
    elif platform_of(mesh) == "cpu":
        ranks_here = max(1, mesh.shape["data"] // jax.process_count())
        available = _available_host_bytes() - unloaded_bytes * len(mesh.local_devices)
        affordable = int(available * _CPU_MEMORY_SHARE) // ranks_here
        default = max(pages_per_row * tables, _CPU_DEFAULT_BYTES // layout.page_bytes)
        filled = pools.num_rows * pages_per_row * tables
        num_first = min(filled, default, pools.num_that_fit(affordable))
        reason = "the share of this machine's memory that a CPU run takes"
    else:
        # All free memory: pages not used by requests cache prefixes.
        free_bytes = min(
            _free_device_bytes(device, args.mem_fraction_static) for device in mesh.local_devices
        )
        free_bytes -= unloaded_bytes
        num_first = pages_that_fit(free_bytes, pools, mesh.shape["tensor"], workspace_bytes)
        reason = (
            f"--mem-fraction-static {args.mem_fraction_static} after weights and a step's logits"
        )
    num_first = min(of_each_host(num_first))
    if num_first < 1:
        raise RuntimeError(
            f"no memory for KV: not one page of {layout.page_size} tokens "
            f"({layout.page_bytes} bytes) fits within {reason}; use a smaller model, more chips "
            "per rank (--tp-size), or a larger --mem-fraction-static"
        )
    pages = pools.pages(num_first)
    pools.require_a_row(pages)
    # Called again after loading, to check: only the first choice is used, unless it no longer fits.
    logger.log(
        logging.INFO if unloaded_bytes else logging.DEBUG,
        "KV pool: %s pages of %d tokens on each of %d ranks, %.2f GiB per rank, from %s",
        " and ".join(map(str, pages)),
        layout.page_size,
        mesh.shape["data"],
        pools.num_bytes(num_first) / (1 << 30),
        reason,
    )
    return tuple(num + 1 for num in pages)


def pages_that_fit(free_bytes: int, pools: KVPools, tp_size: int, workspace_bytes: int) -> int:
    """Return the pages of the first pool, without the null page, if all pools share a device's
    `free_bytes`; 0 or less if there is no room."""
    return pools.num_that_fit((free_bytes - workspace_bytes) * tp_size)


def _free_device_bytes(device: jax.Device, fraction: float) -> int:
    stats: dict[str, Any] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise RuntimeError(
            f"{device} does not say how much memory it has; set --max-total-tokens instead"
        )
    return int(stats["bytes_limit"] * fraction) - int(stats.get("bytes_in_use", 0))


def require_host_bytes(num_bytes: int) -> None:
    """Raise RuntimeError if this host has less than `num_bytes` of free memory."""
    available = _available_host_bytes()
    if num_bytes > available:
        raise RuntimeError(
            f"the prefixes in host memory would take {num_bytes / 1e9:.1f} GB of the "
            f"{available / 1e9:.1f} GB that are available: lower --hicache-ratio or --hicache-size"
        )
    logger.info("%.2f GB of host memory are for prefixes", num_bytes / 1e9)


def _available_host_bytes() -> int:
    """Return the memory available to this process, within a container's limit."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:  # not Linux: only the total is available
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
