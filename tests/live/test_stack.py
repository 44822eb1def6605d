"""The commands of deploy/compose.yaml, run as processes."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
ENGINES = {"engine-0": 30000, "engine-1": 30001}
START_TIMEOUT_S = 400.0
END_TIMEOUT_S = 60.0
SERVICES_TIMEOUT_S = 400.0  # of run_stack.py, for a service that does not end


def wait_for(url: str, process: subprocess.Popen[str]) -> httpx.Response:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the stack ended early"
        try:
            answer = httpx.get(url, timeout=5)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return answer
        time.sleep(0.5)
    raise TimeoutError(url)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_the_stack_answers_and_ends() -> None:
    if taken := [port for port in (*ENGINES.values(), 9090) if is_taken(port)]:
        pytest.skip(f"ports of the stack are in use: {taken}")
    has_prometheus = shutil.which("prometheus") is not None
    names = [*ENGINES, *(["prometheus"] if has_prometheus else [])]
    process = subprocess.Popen(
        [sys.executable, "scripts/run_stack.py", *names], cwd=ROOT, text=True
    )
    try:
        for port in ENGINES.values():
            wait_for(f"http://127.0.0.1:{port}/health", process)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            answer = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "What is 17 + 25?"}]
            )
            assert "42" in (answer.choices[0].message.content or "")
        if has_prometheus:
            up = "http://127.0.0.1:9090/api/v1/query?query=sum(up)"
            deadline = time.monotonic() + 60
            values: list[str] = []
            while values != ["2"] and time.monotonic() < deadline:
                time.sleep(1)
                found = wait_for(up, process).json()["data"]["result"]
                values = [each["value"][1] for each in found]
            assert values == ["2"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_TIMEOUT_S) == 0
    finally:
        process.terminate()  # it ends its services, which a kill would leave behind
        process.wait(SERVICES_TIMEOUT_S)
    assert not any(map(is_taken, ENGINES.values()))
