"""The page at `/` in headless Chromium, on a server whose model repeats the message."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import SCRIPTED, running_server
from tests.support.chromium import OpenPage, browser, open_tab, wait_until

__all__ = ["browser", "open_tab"]
IS_IDLE = "document.getElementById('stop').disabled"
MESSAGES = "[...document.querySelectorAll('article p')].map((p) => p.textContent)"
HAS_ANSWER = f"{IS_IDLE} && ({MESSAGES}).length === 2"


@contextmanager
def server_url(model: Path, *flags: str) -> Iterator[str]:
    """A new server, with a token each 20 ms."""
    flags = ("--random-seed", "20", "--context-length", "2048", *flags)
    with running_server(SCRIPTED, model, *flags) as server:
        yield server.wait_ready().url + "/"


@pytest.fixture(scope="module")
def plain_url(model_folder: Path) -> Iterator[str]:
    """A server that several tests share."""
    with server_url(model_folder) as url:
        yield url


def enter(page: Any, text: str) -> None:
    """Type a line into the element with the focus."""
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")


def test_a_conversation_is_streamed_measured_stopped_and_reset(
    plain_url: str, open_tab: OpenPage
) -> None:
    markup = "<img src=x onerror=alert(1)> <b>bold</b>"
    page = open_tab(plain_url)
    enter(page, markup)
    wait_until(page, HAS_ANSWER)
    assert page.evaluate(MESSAGES) == [markup, markup]
    assert page.locator("#log img, #log b").count() == 0
    first, rate, num_tokens, num_prompt, num_cached = page.locator("dd").all_text_contents()
    assert first.endswith(" ms")
    assert 10 < float(rate) < 60
    assert int(num_cached) == int(num_prompt) // 2
    assert page.locator("#chart rect").count() == int(num_tokens)
    assert page.locator("#chart rect.first").count() == 1

    enter(page, "on and on " * 100)
    wait_until(page, f"({MESSAGES})[3]?.length > 20")
    page.click("#stop")
    wait_until(page, IS_IDLE)
    assert 20 < len(page.evaluate(MESSAGES)[3]) < 900

    page.click("#reset")
    enter(page, "Again.")
    wait_until(page, HAS_ANSWER)
    assert page.evaluate(MESSAGES) == ["Again.", "Again."]


def test_a_refusal_is_shown_and_the_message_stays(plain_url: str, open_tab: OpenPage) -> None:
    page = open_tab(plain_url, expected_error="status of 400")
    page.evaluate("document.getElementById('max-tokens').value = -1")
    enter(page, "Hello.")
    wait_until(page, f"{IS_IDLE} && !document.getElementById('notice').hidden")
    assert "max_tokens" in page.text_content("#notice")
    assert page.input_value("#message") == "Hello."
    assert page.evaluate(MESSAGES) == []


def test_a_key_is_asked_for_when_the_server_needs_one(
    model_folder: Path, open_tab: OpenPage
) -> None:
    with server_url(model_folder, "--api-key", "hush") as url:
        page = open_tab(url, expected_error="status of 401")
        page.wait_for_selector("#key-form")
        enter(page, "wrong")
        page.wait_for_selector("#notice")
        page.wait_for_selector("#key-form")
        enter(page, "hush")
        wait_until(page, "document.getElementById('model').textContent !== ''")
        enter(page, "Hello.")
        wait_until(page, HAS_ANSWER)
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"


def test_a_model_without_a_chat_template_continues_the_text(
    model_folder: Path, tmp_path: Path, open_tab: OpenPage
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with server_url(folder) as url:
        page = open_tab(url, expected_error="status of 400")
        page.evaluate("document.getElementById('max-tokens').value = 6")
        enter(page, "Once upon")
        wait_until(page, HAS_ANSWER)
        assert page.evaluate(MESSAGES)[0] == "Once upon"
        assert "no chat template" in page.text_content("#notice")
