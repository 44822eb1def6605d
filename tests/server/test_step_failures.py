"""A server whose steps fail: not ready after three, alive all the time, and ended in the end."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sgl_jax.core.errors import STEPS_FAILED
from tests.live.live_server import DEMO
from tests.server.conftest import Rig
from tests.server.server_process import running_server


@pytest.mark.anyio
async def test_health_follows_the_failures_in_a_row_and_liveness_does_not(rig: Rig) -> None:
    facts = rig.refs.engine_info
    for count, status in ((2, 200), (3, 503), (19, 503), (0, 200)):
        facts["failed_steps"] = count
        answer = await rig.http.get("/health")
        assert answer.status_code == status, count
        if status == 503:
            assert answer.json()["status"] == "failing"
            assert answer.json()["error"]["code"] == "steps_fail"
            assert f"the last {count} steps" in answer.json()["error"]["message"]
        assert (await rig.http.get("/liveness")).status_code == 200
        # A request is taken, which may show that the device works again.
        assert (await rig.http.post("/generate", json={"text": "hi"})).status_code == 200


@pytest.mark.anyio
async def test_a_draining_server_is_alive_and_one_whose_engine_has_ended_is_not(rig: Rig) -> None:
    rig.refs.draining = True
    assert (await rig.http.get("/liveness")).status_code == 200
    rig.front.fail("the engine has ended")
    answer = await rig.http.get("/liveness")
    assert (answer.status_code, answer.json()["status"]) == (503, "dead")


def test_a_server_ends_with_its_own_code_once_every_client_has_an_answer() -> None:
    flags = ("--warmup", "none", "--max-step-failures", "4", "--max-total-tokens", "2048")
    with running_server("tests.server.failing_server", DEMO, *flags) as server:
        server.wait_ready(120)

        def generate(_: int = 0) -> httpx.Response:
            return httpx.post(f"{server.url}/generate", json={"text": "hi"}, timeout=30)

        for failed in range(1, 4):
            answer = generate()
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            health = httpx.get(f"{server.url}/health")
            assert health.status_code == (503 if failed == 3 else 200)
            assert httpx.get(f"{server.url}/liveness").status_code == 200
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        (line,) = (each for each in lines if each.startswith("sglang:step_failures_total"))
        assert line.endswith(" 3.0")

        def last_status(number: int) -> int | None:
            """None if the server had ended before it read the request: then the connection is
            refused, reset or closed."""
            closed = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)
            with contextlib.suppress(*closed):
                return generate(number).status_code
            return None

        with ThreadPoolExecutor(8) as pool:
            statuses = set(pool.map(last_status, range(8)))
        assert 500 in statuses <= {500, 503, None}
        assert server.wait_exit() == STEPS_FAILED, server.printed
        assert any("--max-step-failures" in line for line in server.printed)
