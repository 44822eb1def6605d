"""sglang-router, with its flags in Kubernetes, finds an engine's pod by its label.

Both need the same key.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.clients.pod_api import NAMESPACE, PodApi, pod, pod_api
from tests.clients.router import STOP_TIMEOUT_S
from tests.live.live_server import LiveServer, bearer, free_port, live_server
from tests.test_fleet import ROUTER, pod_of
from tests.test_kubernetes import engine_pod

pytest.importorskip("sglang_router")
pytestmark = pytest.mark.long

TIMEOUT_S = 60.0
KEY = "hush"


def flags(**own: str) -> list[str]:
    """The manifest's flags with these values in place of its own."""
    (container,) = pod_of(ROUTER, "sgl-jax-router")["containers"]
    args = [arg.replace("$(NAMESPACE)", NAMESPACE) for arg in container["args"]]
    for name, value in own.items():
        args[args.index("--" + name.replace("_", "-")) + 1] = value
    return args


@pytest.fixture
def api() -> Iterator[PodApi]:
    with pod_api() as api:
        yield api


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path, "--api-key", KEY, key=KEY) as server:
        yield server


@pytest.fixture
def router(api: PodApi, worker: LiveServer, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    args = flags(
        host="127.0.0.1",
        port=str(port),
        prometheus_port=str(free_port()),
        service_discovery_port=str(httpx.URL(worker.url).port),
        api_key=KEY,
    )
    api.write_config(tmp_path / "config")
    with (tmp_path / "router.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *args],
            env=os.environ | {"KUBECONFIG": str(tmp_path / "config")},
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, "/liveness", 200)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def wait_for(url: str, path: str, status: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    seen = 0
    while time.monotonic() < deadline:
        try:
            seen = httpx.get(url + path, timeout=5).status_code
        except httpx.TransportError:
            seen = 0
        if seen == status:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} is {seen}, not {status}")


def test_an_engine_is_used_while_its_pod_is_ready(api: PodApi, router: str) -> None:
    labels = engine_pod(ROUTER)[0]["metadata"]["labels"]
    body = {"model": "demo", "prompt": "1", "max_tokens": 1}

    api.send("ADDED", pod("other", {"app": "other"}, "127.0.0.1", is_ready=True))
    api.send("ADDED", pod("engine", labels, "127.0.0.1", is_ready=False))
    time.sleep(1)
    assert httpx.get(router + "/readiness").status_code == 503

    api.send("MODIFIED", pod("engine", labels, "127.0.0.1", is_ready=True))
    wait_for(router, "/readiness", 200)
    asked = partial(httpx.post, router + "/v1/completions", json=body, timeout=60)
    asked(headers=bearer(KEY)).raise_for_status()
    for path in ("/v1/completions", "/flush_cache"):
        assert httpx.post(router + path, json=body, timeout=60).status_code == 401

    ending = pod("engine", labels, "127.0.0.1", is_ready=True)
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.send("MODIFIED", ending)
    wait_for(router, "/readiness", 503)
