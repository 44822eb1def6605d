"""What an operator does with a real server: pauses, other weights, traces, the end of it."""

import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import DEMO, live_server

pytestmark = pytest.mark.long
BODY = {
    "input_ids": [[5 + i] * 20 for i in range(4)],
    "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
}


def test_requests_outlive_pauses_and_updates_and_a_paused_server_ends(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(server.url + "/generate", json=BODY, timeout=300))

    def post(path: str, **body: object) -> httpx.Response:
        return httpx.post(server.url + path, json=body, timeout=300)

    with live_server(tmp_path, "--page-size", "4") as server:
        ask()
        threads = []
        for mode in ("in_place", "retract"):
            assert post("/pause_generation", mode=mode).json()["is_paused"]
            assert server.get("/health")["status"] == "paused"
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            assert post("/continue_generation").status_code == 200
            assert post("/update_weights_from_disk", model_path=str(DEMO)).json()["success"]
        refused = post("/update_weights_from_disk", model_path=str(tmp_path))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "other_model")
        post("/start_profile", output_dir=str(tmp_path / "trace"), num_steps=3).raise_for_status()
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        for thread in threads:
            thread.join()
        assert list((tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb"))
        server.assert_flush_frees_everything()
        assert server.get("/server_info")["counters"]["compiles_after_ready"] == 0
        post("/pause_generation").raise_for_status()
        last = threading.Thread(target=ask)
        last.start()
        while not server.get("/server_info")["num_waiting"]:
            assert last.is_alive()
        server.process.send_signal(signal.SIGTERM)
        last.join()
        assert server.process.wait(60) == 0
    outputs = [[one["output_ids"] for one in answer.json()] for answer in answers]
    assert len(outputs) == 5
    assert all(tokens == outputs[0] for tokens in outputs)
