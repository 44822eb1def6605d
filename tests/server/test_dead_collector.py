"""A collector that does not answer slows no request, fills no log, and holds up no end."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import SCRIPTED, running_server
from tests.support.long import long

NUM_REQUESTS = 60
MOST_END_S = 15.0  # 5 s for the spans that wait
# Many tries in the time of the test.
ENVIRONMENT = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


@contextmanager
def dead_port(*, is_silent: bool) -> Iterator[int]:
    """A port that refuses connections, or takes them and stays silent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.long
@pytest.mark.parametrize("is_silent", [*long(False), True])
def test_the_server_serves_and_ends_as_ever(model_folder: Path, is_silent: bool) -> None:
    with dead_port(is_silent=is_silent) as port:
        flags = ("--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{port}")
        with running_server(SCRIPTED, model_folder, *flags, environment=ENVIRONMENT) as server:
            server.wait_ready()
            body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}}
            took: list[float] = []
            with httpx.Client(base_url=server.url) as client:
                for _ in range(NUM_REQUESTS):
                    began = time.monotonic()
                    client.post("/generate", json=body).raise_for_status()
                    took.append(time.monotonic() - began)
                    time.sleep(0.05)
            assert max(took) < 1  # the time of one try
            server.process.terminate()
            began = time.monotonic()
            assert server.wait_exit() == 0
            assert time.monotonic() - began < MOST_END_S
            lines = [line for line in server.printed if "xport" in line or "grpc" in line.lower()]
            assert 1 <= len(lines) <= 2, lines
