"""Choose the platform, its devices, the mesh over them, and the folder of compiled programs.

Sets the process-wide jax settings of an engine once, before the first device is used. Never
holds an array.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from sgl_jax.core.private_files import check_private_folder, user_cache_folder
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.layers.mesh_axes import MESH_AXES

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 10  # until all hosts have left


def make_mesh(args: ServerArgs) -> Mesh:
    """Return the mesh ('data', 'tensor') of dp x tp devices for `args`. On a CPU, as many devices
    as needed are created. Raises RuntimeError if there are too few."""
    _request_platform(args)
    try:
        devices = jax.devices(None if args.device == "auto" else args.device)
    except RuntimeError as error:
        raise RuntimeError(f"--device {args.device}: jax finds no such device: {error}") from error
    try:
        check_devices(len(devices), args.num_hosts, args.dp_size, args.tp_size)
    except ValueError as error:
        raise RuntimeError(f"{error} ({devices[0].platform})") from error
    return arrange_devices(devices, args.dp_size, args.tp_size)


def check_devices(num_devices: int, num_hosts: int, dp_size: int, tp_size: int) -> None:
    """Raise ValueError unless an engine of dp x tp devices can run on `num_devices` of `num_hosts`
    hosts. With several hosts, the mesh must use all devices."""
    needed = dp_size * tp_size
    if needed > num_devices or (num_hosts > 1 and needed != num_devices):
        each = " (all of several hosts)" if needed < num_devices else ""
        raise ValueError(
            f"--dp-size {dp_size} x --tp-size {tp_size} needs {needed} devices{each}, found "
            f"{num_devices}"
        )


def join_hosts(args: ServerArgs, address: str, port: int) -> None:
    """Connect the hosts of `args`, so that every host sees the devices of all hosts.

    Call this before the first device is used. jax's coordinator runs on host 0, at `address` and
    `port`. Raises RuntimeError if the hosts do not find each other in time.
    """
    _request_platform(args)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The command channel (multihost/channel.py) detects a lost host and reports the reason; jax
    # would abort host 0. jax would also catch SIGTERM, which the server process handles.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    host = f"[{address}]" if ":" in address else address
    jax.distributed.initialize(
        f"{host}:{port}",
        args.nnodes,
        args.node_rank,
        initialization_timeout=int(args.dist_timeout),
        shutdown_timeout_seconds=_LEAVE_TIMEOUT_S,
        coordinator_bind_address=f"{host}:{port}",
    )


def leave_hosts() -> None:
    """Undo `join_hosts` on all hosts together; a host that exits without this aborts the rest."""
    jax.distributed.shutdown()


def arrange_devices(devices: Sequence[Any], dp_size: int, tp_size: int) -> Mesh:
    """Return the mesh ('data', 'tensor') over the first dp x tp of `devices`.

    If that is a whole slice of TPUs, the chips of one rank are adjacent on its interconnect. They
    are on one host if whole ranks fit on each host.
    """
    if len(devices) == dp_size * tp_size > 1 and devices[0].platform == "tpu":
        parts = _by_host(devices)
        if any(len(own) % tp_size for own in parts):
            parts = [list(devices)]
        ranks = [
            mesh_utils.create_device_mesh(
                (len(own) // tp_size, tp_size), own, allow_split_physical_axes=True
            )
            for own in parts
        ]
        return Mesh(np.concatenate(ranks), MESH_AXES)
    return Mesh(np.array(devices[: dp_size * tp_size]).reshape(dp_size, tp_size), MESH_AXES)


def _by_host(devices: Sequence[Any]) -> list[list[Any]]:
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return list(hosts.values())


def platform_of(mesh: Mesh) -> str:
    """Return the platform of the mesh's devices: 'cpu', 'tpu' or 'gpu'."""
    return str(mesh.devices.flat[0].platform)


def _request_platform(args: ServerArgs) -> None:
    if args.device == "cpu":  # do not initialize an unused accelerator
        jax.config.update("jax_platforms", "cpu")
    configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    has_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if args.num_host_devices > max(configured, 1) and not has_flag:
        try:
            jax.config.update("jax_num_cpu_devices", args.num_host_devices)
        except RuntimeError:
            # Other code in the process has started jax; make_mesh counts its devices.
            logger.debug("jax is running already; its CPU devices stay as they are")


def set_compilation_cache(directory: str | None) -> Path | None:
    """Keep compiled programs in `directory`; None: a private folder of this user; 'none': no cache.

    The folder holds machine code that later starts load, so it must belong to this user and not be
    writable by other users. Raises PermissionError otherwise.
    """
    # jax reads these settings once, at its first compilation, unless the cache is reset.
    compilation_cache.reset_cache()
    if directory == "none":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    path = Path(directory) if directory else user_cache_folder("xla")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        check_private_folder(path)
    except PermissionError as error:
        raise PermissionError(
            f"compilation cache: {error}; name another with --compilation-cache-dir, or 'none'"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Small programs, too, shorten a restart.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
