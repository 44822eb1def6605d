"""Log lines as text and as JSON, with the request's id."""

import json
import logging
import sys

import pytest

from sgl_jax.core.log_lines import JsonLines, TextLines, log_to_terminal, request_id


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("sgl_jax.x", logging.WARNING, "x.py", 1, message, args, None)


@pytest.fixture
def named():
    token = request_id.set("req-1")
    yield
    request_id.reset(token)


def test_a_json_line_has_level_time_and_message() -> None:
    line = json.loads(JsonLines().format(record("%d pages\nleft", 3)))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "sgl_jax.x", "message": "3 pages\nleft"}


def test_a_json_line_has_the_exception() -> None:
    try:
        raise ValueError("no pages")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "no pages" in json.loads(JsonLines().format(failed))["exception"]


@pytest.mark.usefixtures("named")
def test_lines_have_the_requests_id() -> None:
    assert json.loads(JsonLines().format(record("x")))["request_id"] == "req-1"
    assert TextLines().format(record("x")).endswith("WARNING sgl_jax.x: x [req-1]")


def test_a_text_line_without_a_request_has_no_id() -> None:
    assert TextLines().format(record("x")).endswith("WARNING sgl_jax.x: x")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_logs_in_its_format(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.getLogger("sgl_jax")
    log_to_terminal("info", form)
    own.info("hello")
    logging.getLogger("library").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert (line.startswith("{")) == (form == "json")
    assert "hello" in line
