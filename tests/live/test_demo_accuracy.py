"""The demonstration model through the server: right on held-out questions, task by task."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.demo_model.evaluate import evaluate, parse_args
from tests.live.live_server import live_server


# By default tests/accuracy asks such questions.
@pytest.mark.long
def test_held_out_questions_are_answered_right(tmp_path: Path) -> None:
    """At least 95 % overall and 90 % of each task, on two ranks that share prefixes."""
    with live_server(tmp_path, "--dp-size", "2", "--check-memory", "busy") as server:
        options = ["--base-url", server.url, "--num-questions", "80", "--seed", "1"]
        assert asyncio.run(evaluate(parse_args(options)))
        server.assert_nothing_leaked()


@pytest.mark.long
def test_retracts_amid_decode_and_prefill_cost_no_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the running requests are taken away every third step; nothing is cached."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_NO_PREFILL_BS", "12")
    flags = ("--disable-radix-cache", "--chunked-prefill-size", "32", "--check-memory", "busy")
    with live_server(tmp_path, *flags) as server:
        options = ["--base-url", server.url, "--num-questions", "120", "--seed", "2"]
        assert asyncio.run(evaluate(parse_args(options)))
        server.assert_nothing_leaked()
        counters = server.get("/get_server_info")["counters"]
        assert counters["requests_force_retracted"] > 100
        assert counters["requests_retracted"] >= counters["requests_force_retracted"]
