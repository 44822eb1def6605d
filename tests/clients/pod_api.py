"""The part of Kubernetes' API that finds pods: their list, and a watch of their changes."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "fleet"
_POLL_S = 0.1


class PodApi(ThreadingHTTPServer):
    """A server without pods at first; `send` passes a change on to the watch."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.changes: queue.Queue[dict[str, Any]] = queue.Queue()
        self.is_open = True

    def send(self, change: str, pod: dict[str, Any]) -> None:
        self.changes.put({"type": change, "object": pod})

    def write_config(self, path: Path) -> None:
        """A client's configuration with this server's address."""
        named = {
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
            ],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        }
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}
        path.write_text(yaml.safe_dump(config))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PodApi

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self.send_error(403)
        elif "watch=true" in query:
            self._watch()
        else:
            self._list()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _list(self) -> None:
        body = json.dumps(
            {
                "apiVersion": "v1",
                "kind": "PodList",
                "metadata": {"resourceVersion": "1"},
                "items": [],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while self.server.is_open:
            try:
                change = self.server.changes.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            line = json.dumps(change).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


@contextmanager
def pod_api() -> Iterator[PodApi]:
    api = PodApi()
    thread = threading.Thread(target=api.serve_forever)
    thread.start()
    try:
        yield api
    finally:
        api.is_open = False
        api.shutdown()
        thread.join()
        api.server_close()


def pod(name: str, labels: dict[str, str], address: str, is_ready: bool) -> dict[str, Any]:
    """A running pod."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": name,
            "resourceVersion": "2",
            "labels": labels,
        },
        "spec": {"containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": str(is_ready)}],
        },
    }
