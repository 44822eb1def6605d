"""`sgl-jax bench`: the two benchmarks that come with the package."""

import pytest

from sgl_jax.launch_server import main
from tests.bench.traced import EXCERPT


def test_trace_serves_recorded_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(EXCERPT), "--num-requests", "20", "--cache-only", "--capacity-blocks", "300"]
    assert main(["bench", "trace", *words]) == 0
    assert "tree, lru" in capsys.readouterr().out


def test_serve_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "no server responds at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["host"]])
def test_other_words_are_refused_with_the_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert "usage: sgl-jax bench {serve,trace,fleet}" in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "sgl-jax bench {serve,trace,fleet}" in capsys.readouterr().out
