"""A server process from its first line to its exit code."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.scripted_engine import CRASH_SEED, MAX_RUNNING, SLOW_CRASH_SEED, SLOW_START_SEED
from tests.server.server_process import SCRIPTED, Server, running_server
from tests.support.long import long
from tests.support.waiting import until

STEP_MS = 20


@pytest.fixture
def start(model_folder: Path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(running_server(SCRIPTED, model_folder, *flags))


@contextlib.contextmanager
def streaming(server: Server, tokens: int = 200) -> Iterator[Iterator[str]]:
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": tokens}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=30) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def test_it_serves_drops_gone_clients_and_drains_on_sigterm(
    start: Callable[..., Server],
) -> None:
    server = start("--random-seed", str(STEP_MS)).wait_ready()
    assert any("warming up" in line for line in server.printed)

    with streaming(server) as _:  # read one event, then go away
        assert server.num_running() == 1
    until(lambda: server.num_running() == 0, "a client that went away from a stream")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json={"text": "hello"}, timeout=0.5)
    until(lambda: server.num_running() == 0, "a client that gave up waiting")

    with streaming(server, tokens=100) as lines:
        # A service manager signals every process of the service, not only the first.
        server.engine.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = httpx.post(f"{server.url}/generate", json={"text": "hello"})
        assert refused.status_code == 503
        *_, last, done = lines
    assert done == "data: [DONE]"
    meta = json.loads(last.removeprefix("data: "))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 100}
    assert server.wait_exit() == 0, server.printed


def test_what_does_not_finish_in_time_ends_with_an_error(start: Callable[..., Server]) -> None:
    server = start("--random-seed", "100", "--drain-timeout", "0.2").wait_ready()
    with streaming(server) as lines:
        server.process.send_signal(signal.SIGINT)
        *_, last = lines
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "shutting down" in error["message"]
    assert error["code"] == "shutting_down"
    assert server.wait_exit() == 0


@pytest.mark.long
@pytest.mark.parametrize("is_abstract", [False, *long(True)])
def test_systemd_is_notified_of_ready_and_stopping(
    model_folder: Path, tmp_path: Path, is_abstract: bool
) -> None:
    address = f"{'@' if is_abstract else ''}{tmp_path}/notify"
    environment = {"NOTIFY_SOCKET": address}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind("\0" + address[1:] if is_abstract else address)
        with running_server(SCRIPTED, model_folder, environment=environment) as server:
            assert manager.recv(100) == b"READY=1"
            server.process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait_exit() == 0


def test_a_second_signal_ends_it_at_once(start: Callable[..., Server]) -> None:
    server = start("--random-seed", "100").wait_ready()
    engine = server.engine
    with streaming(server):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(10) == 128 + signal.SIGTERM
    until(lambda: not engine.is_running(), "the engine lives on")
    assert not server.left_behind()


@pytest.mark.long
def test_signals_while_it_ends_do_not_change_the_exit_code(start: Callable[..., Server]) -> None:
    """Often enough that some of them meet the last milliseconds."""
    server = start("--random-seed", str(CRASH_SEED))
    server.wait_line("(cannot serve)")
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert server.wait_exit() == 1


def test_when_the_engine_dies_so_does_the_server_and_says_why(
    start: Callable[..., Server],
) -> None:
    server = start("--random-seed", str(STEP_MS)).wait_ready()
    with streaming(server) as lines:
        os.kill(server.engine.pid, signal.SIGKILL)
        *_, last = lines
    assert "killed by signal 9" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.wait_exit() == 1
    assert any("killed by signal 9" in line for line in server.printed)


@pytest.mark.long
@pytest.mark.parametrize("signalled", [False, *long(True)])
def test_an_engine_that_fails_and_lingers_holds_up_nothing(
    start: Callable[..., Server], signalled: bool
) -> None:
    """It has closed its sockets, but its process has not ended yet."""
    server = start().wait_ready()
    body = {"text": "hello", "sampling_params": {"seed": SLOW_CRASH_SEED}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=10)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert "the script says" not in answer.text  # what the engine printed is for the operator
    if signalled:
        server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(15) == 1, server.printed
    assert any("the script says to crash and to linger" in line for line in server.printed)


@pytest.mark.long
def test_what_a_client_names_a_request_cannot_forge_lines_of_the_log(
    start: Callable[..., Server],
) -> None:
    server = start("--log-requests").wait_ready()
    rid = "a\nERROR forged\x1b[31m\u2028b"
    body = {"text": "hello", "rid": rid, "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{server.url}/generate", json=body, timeout=10).status_code == 200
    until(lambda: sum("forged" in line for line in server.printed) == 2, "start and end are logged")
    for line in server.printed:
        assert not line.startswith("ERROR forged")
        assert "\x1b" not in line
        assert "\u2028" not in line


@pytest.mark.long
def test_an_engine_that_does_not_start_is_explained(start: Callable[..., Server]) -> None:
    server = start("--random-seed", str(CRASH_SEED))
    assert server.wait_exit() == 1
    assert any(
        "cannot serve" in line and "the script says not to start" in line for line in server.printed
    )


def test_a_port_that_is_taken_is_said_at_once(start: Callable[..., Server]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait_exit() == 1
    assert any(f"cannot listen on 127.0.0.1:{port}" in line for line in server.printed)


@pytest.mark.long
def test_a_server_that_starts_says_so_and_a_second_on_its_port_learns_it_at_once(
    start: Callable[..., Server],
) -> None:
    server = start("--random-seed", str(SLOW_START_SEED), "--api-key", "hush")
    url = server.wait_line(r"listening at (http://\S+);")
    second = start("--port", url.rpartition(":")[2])
    starting = {"status": "starting"}
    for path, told in (("/health", starting), ("/ping", starting), ("/v1/models", {})):
        answer = httpx.get(url + path, timeout=2)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "starting"
        assert answer.json().items() >= told.items()
        assert "retry-after" in answer.headers
    alive = httpx.get(url + "/liveness", timeout=2)
    assert (alive.status_code, alive.json()["status"]) == (200, "starting")
    assert httpx.get(url + "/" + "a" * 9000, timeout=2).status_code == 414

    def progress() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(url + "/health", timeout=2).json().get("progress", {})
        return found

    until(lambda: bool(progress()), "the engine reports a phase")
    told = progress()
    assert datetime.fromisoformat(told.pop("since")) < datetime.now(UTC)
    assert told == {"phase": "loading", "done": 5, "total": 20, "unit": "bytes"}
    assert second.wait_exit() == 1
    assert not any("warming up" in line for line in second.printed)
    assert sum("cannot listen on" in line for line in second.printed) == 1, second.printed
    server.wait_ready()
    assert httpx.get(url + "/health", timeout=2).json() == {"status": "ready"}
    assert httpx.get(url + "/v1/models", timeout=2).status_code == 401


@pytest.mark.long
def test_a_page_of_an_allowed_origin_can_read_that_the_server_is_starting(
    start: Callable[..., Server],
) -> None:
    origin = "https://page.example"
    server = start("--random-seed", str(SLOW_START_SEED), "--cors-allow-origins", origin)
    url = server.wait_line(r"listening at (http://\S+);")
    asks = {"origin": origin, "access-control-request-method": "POST"}
    assert httpx.options(url + "/v1/models", headers=asks, timeout=2).status_code == 200
    for path in ("/health", "/v1/models"):
        answer = httpx.get(url + path, headers={"origin": origin}, timeout=2)
        assert answer.json()["error"]["code"] == "starting"
        assert answer.headers["access-control-allow-origin"] == origin
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    server.wait_ready()
    answer = httpx.get(url + "/health", headers={"origin": origin}, timeout=2)
    assert answer.headers.get_list("access-control-allow-origin") == [origin]


@pytest.mark.long
def test_a_stopped_engine_is_stuck_and_goes_on_when_it_may(start: Callable[..., Server]) -> None:
    server = start("--engine-heartbeat-timeout", "3", "--max-queued-requests", "3").wait_ready()
    engine = server.engine
    engine.suspend()
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}

    def told() -> dict[str, str]:
        answer: dict[str, str] = httpx.get(f"{server.url}/health", timeout=2).json()
        return answer

    with futures.ThreadPoolExecutor(12) as pool, httpx.Client(timeout=30) as client:
        asked = [pool.submit(client.post, f"{server.url}/generate", json=body) for _ in range(12)]
        until(lambda: told()["status"] == "stuck", "a stopped engine is noticed")
        assert datetime.fromisoformat(told()["since"]) < datetime.now(UTC)
        refused = httpx.post(f"{server.url}/generate", json=body, timeout=2)
        assert refused.json()["error"]["code"] == "engine_stuck"
        engine.resume()
        answers = [answer.result() for answer in asked]
    until(lambda: told() == {"status": "ready"}, "it goes on")
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == 3 + MAX_RUNNING, codes
    assert {a.json()["error"]["code"] for a in answers if a.status_code == 503} == {"queue_full"}


@pytest.mark.long
@pytest.mark.parametrize("busy", [*long(False), True])
def test_a_stopped_engine_does_not_hold_up_the_end(
    start: Callable[..., Server], busy: bool
) -> None:
    server = start("--random-seed", "100", "--engine-heartbeat-timeout", "2").wait_ready()
    engine = server.engine
    with streaming(server) if busy else contextlib.nullcontext() as lines:
        engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        if lines is not None:
            *_, last = lines
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.wait_exit(25) == 0
    until(lambda: not engine.is_running(), "the engine lives on")
    assert not server.left_behind()


def test_a_signal_while_starting_ends_it(start: Callable[..., Server]) -> None:
    server = start()
    until(lambda: any("warming up" in line for line in server.printed), "the engine starts")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
