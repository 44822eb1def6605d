"""The group of hosts, from the flags or from the platform."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.multihost import group as group_module
from sgl_jax.multihost.group import MultihostGroup, group_key, group_of, with_group

KEY = "0123456789abcdef"
FLAGS: dict[str, Any] = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "coordinator:5000"}
LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}
GKE = {"TPU_WORKER_HOSTNAMES": "tpu-0.svc,tpu-1.svc", "TPU_WORKER_ID": "1"}


def args(**settings: Any) -> ServerArgs:
    return ServerArgs(**{"dp_size": 4, "host_key": KEY, **settings})


def found(environment: dict[str, str], **settings: Any) -> MultihostGroup:
    return group_of(with_group(args(**settings), environment, lambda name: None))


def test_a_host_without_flags_or_platform_is_alone() -> None:
    alone = with_group(ServerArgs(), {}, lambda name: None)
    assert (alone.nnodes, alone.node_rank) == (1, 0)


def test_flags_name_a_group() -> None:
    assert found({}, **FLAGS) == MultihostGroup(2, 1, "coordinator", 5000)
    assert found({}, **FLAGS | {"dist_init_addr": "[::1]:7"}) == MultihostGroup(2, 1, "::1", 7)


def test_the_platform_names_a_group() -> None:
    assert found(LWS) == MultihostGroup(4, 3, "lws-0.lws.default", 5000)
    assert found(GKE) == MultihostGroup(2, 1, "tpu-0.svc", 5000)
    # LeaderWorkerSet's pods on GKE have both; its group may have hosts of several slices.
    assert found(GKE | LWS).num_hosts == 4


def test_flags_win_over_the_platform() -> None:
    assert found(LWS, **FLAGS).num_hosts == 2
    alone = with_group(args(nnodes=1), LWS, lambda name: None)
    assert (alone.nnodes, alone.node_rank) == (1, 0)


def test_one_host_of_a_platform_is_alone() -> None:
    environment = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert with_group(ServerArgs(), environment, lambda name: None).nnodes == 1


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Cloud TPU VM's metadata, of host 1 of 2."""
    values = {
        "agent-worker-number": "1",
        "worker-network-endpoints": "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6",
    }

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path.rsplit("/", 1)[1])
            has_flavor = self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if has_flavor and value else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(group_module, "_TPU_DEVICES", (__file__,))
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    yield server.server_name
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("metadata_server")
def test_the_metadata_of_a_cloud_tpu_vm_names_a_group() -> None:
    assert group_of(with_group(args(), {})) == MultihostGroup(2, 1, "10.0.0.5", 5000)


def test_another_machine_has_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_TPU_DEVICES", ("/dev/none",))
    assert with_group(ServerArgs(), {}).nnodes == 1


@pytest.mark.parametrize(
    ("settings", "environment", "words"),
    [
        ({"nnodes": 2}, {}, "--node-rank, --dist-init-addr"),
        ({"node_rank": 1}, {}, "--nnodes"),
        (FLAGS | {"node_rank": 2}, {}, "--node-rank 2 must be below --nnodes 2"),
        (FLAGS | {"dist_init_addr": "coordinator"}, {}, "must be HOST:PORT"),
        (FLAGS | {"dist_init_addr": "coordinator:65535"}, {}, "below 65535"),
        (FLAGS | {"host_key": None}, {}, "SGL_JAX_HOST_KEY"),
        (FLAGS | {"host_key": "short"}, {}, "at least 16 characters"),
        ({}, LWS | {"LWS_WORKER_INDEX": "x"}, "LWS_WORKER_INDEX must be a number"),
    ],
)
def test_an_incomplete_group_is_refused(
    settings: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        with_group(args(**settings), environment, lambda name: None)


def test_devices_must_be_shared_evenly() -> None:
    with pytest.raises(ValueError, match="must be a multiple of --nnodes 3"):
        ServerArgs(dp_size=4, nnodes=3)


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    assert group_key(args(host_key=None, host_key_file=str(file))) == KEY
    with pytest.raises(ValueError, match="--host-key-file"):
        group_key(args(host_key_file=str(tmp_path / "none")))
