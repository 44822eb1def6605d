"""The group of a host, from the flags or from the platform that started it.

Reads settings and the environment. Connects only to a Cloud TPU VM's metadata server.
"""

import dataclasses
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag

DEFAULT_PORT = 5000
_LEAST_KEY_CHARS = 16
_METADATA_TIMEOUT_S = 2.0
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")


class MultihostGroup(NamedTuple):
    """The hosts of one engine, with this host's rank."""

    num_hosts: int
    rank: int
    address: str  # of host 0
    port: int  # of host 0's channel; jax's coordinator uses the next port


def with_group(
    args: ServerArgs,
    environment: Mapping[str, str] = os.environ,
    read_metadata: "Callable[[str], str | None] | None" = None,
) -> ServerArgs:
    """Return `args` with the group's flags filled in; `nnodes` is 1 for a single host.

    Flags take precedence over the environment: LeaderWorkerSet's variables, then GKE's, then the
    metadata of a Cloud TPU VM (`read_metadata`; by default from its server).

    Raises:
        ValueError: the group is incomplete or inconsistent.
    """
    if args.nnodes is None and args.node_rank is None and args.dist_init_addr is None:
        found = _from_platform(environment, read_metadata or _read_metadata)
        if found is None or found.num_hosts == 1:
            return dataclasses.replace(args, nnodes=1, node_rank=0)
        address = f"{found.address}:{found.port}"
        args = dataclasses.replace(
            args, nnodes=found.num_hosts, node_rank=found.rank, dist_init_addr=address
        )
    if args.nnodes == 1 and not args.node_rank:
        return dataclasses.replace(args, node_rank=0)
    missing = [
        name for name in ("nnodes", "node_rank", "dist_init_addr") if getattr(args, name) is None
    ]
    if missing:
        flags = ", ".join(map(flag, missing))
        raise ValueError(f"hosts that serve as one engine need {flags}, too")
    group_of(args)
    group_key(args)
    return args


def group_of(args: ServerArgs) -> MultihostGroup:
    """Return the group of complete settings (`with_group`). Raises ValueError if inconsistent."""
    assert args.nnodes is not None
    assert args.node_rank is not None
    if not args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}")
    address, _, port = (args.dist_init_addr or "").rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65535:
        raise ValueError(
            f"--dist-init-addr must be HOST:PORT with a port below 65535, got "
            f"{args.dist_init_addr!r}"
        )
    return MultihostGroup(args.nnodes, args.node_rank, address.strip("[]"), int(port))


def group_key(args: ServerArgs) -> str:
    """Return the secret of the hosts' channel. Raises ValueError if it is missing or too short."""
    key = args.host_key
    if args.host_key_file is not None:
        try:
            key = Path(args.host_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--host-key-file: {error}") from error
    if key is None:
        raise ValueError(
            "hosts that serve as one engine need a secret that they share: --host-key-file FILE, "
            "or SGL_JAX_HOST_KEY in the environment"
        )
    if len(key) < _LEAST_KEY_CHARS:
        raise ValueError(f"the hosts' key must have at least {_LEAST_KEY_CHARS} characters")
    return key


def _from_platform(
    environment: Mapping[str, str], read_metadata: Callable[[str], str | None]
) -> MultihostGroup | None:
    if "LWS_GROUP_SIZE" in environment:
        return MultihostGroup(
            _number(environment, "LWS_GROUP_SIZE"),
            _number(environment, "LWS_WORKER_INDEX"),
            environment.get("LWS_LEADER_ADDRESS", ""),
            DEFAULT_PORT,
        )
    if "TPU_WORKER_HOSTNAMES" in environment:
        names = environment["TPU_WORKER_HOSTNAMES"].split(",")
        rank = _number(environment, "TPU_WORKER_ID") if len(names) > 1 else 0
        return MultihostGroup(len(names), rank, names[0].strip(), DEFAULT_PORT)
    rank_text = read_metadata("agent-worker-number")
    endpoints = read_metadata("worker-network-endpoints")
    if not rank_text or not endpoints:
        return None
    # A comma-separated list of NAME:PORT:ADDRESS.
    addresses = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
    return MultihostGroup(len(addresses), int(rank_text), addresses[0], DEFAULT_PORT)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ValueError(f"the environment's {name} must be a number, got {text!r}")
    return int(text)


def _read_metadata(attribute: str) -> str | None:
    """Return a metadata attribute of this Cloud TPU VM; None on any other machine."""
    if not any(Path(device).exists() for device in _TPU_DEVICES):
        return None
    server = os.environ.get("GCE_METADATA_IP", "169.254.169.254")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text
    except (urllib.error.URLError, TimeoutError):
        return None
