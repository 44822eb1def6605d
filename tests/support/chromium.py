"""The system's Chromium, headless, driven by Playwright. Tests skip where either is missing."""

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_TIMEOUT_S = 30.0
OpenPage = Callable[..., Any]  # returns a page of Playwright


def wait_until(page: Any, script: str) -> None:
    """Wait until an expression is true. (Playwright's own wait needs a page that allows `eval`.)"""
    deadline = time.monotonic() + _TIMEOUT_S
    while not page.evaluate(script):
        assert time.monotonic() < deadline, f"never {script}: {page.inner_text('body')!r}"
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")  # until it ends, this thread has an event loop that runs
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Any) -> Iterator[OpenPage]:
    """`open_tab(url, **options of a browser's page)`. Any error in the page fails the test, one
    against the Content-Security-Policy included, except those that `expected_error` is in."""
    errors: list[str] = []
    contexts = []

    def open_tab(url: str, *, expected_error: str = "", **options: object) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: (
                errors.append(message.text)
                if message.type == "error"
                and not (expected_error and expected_error in message.text)
                else None
            ),
        )
        page.goto(url)
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert errors == []
