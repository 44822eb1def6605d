"""The demonstration model through the server: right on held-out questions, task by task."""

import asyncio
from pathlib import Path

from sgl_jax.bench.eval_demo import evaluate, parse_args
from tests.live.live_server import live_server


def test_held_out_questions_are_answered_right(tmp_path: Path) -> None:
    """At least 95 % overall and 90 % of each task, on two ranks that share prefixes."""
    with live_server(tmp_path, "--dp-size", "2", "--check-memory", "busy") as server:
        options = ["--base-url", server.url, "--num-questions", "600", "--seed", "1"]
        assert asyncio.run(evaluate(parse_args(options)))
        server.assert_nothing_leaked()
