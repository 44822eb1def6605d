"""A browser with the memory view's page, and servers for it. Skipped where there is no Chromium."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from sgl_jax.replay.view import RecordedFrames, view_app
from tests.memory_view.drivers import DRIVERS

OpenPage = Callable[..., Any]  # returns a page of Playwright
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(url, **options of a browser's page)`. Any error in the page fails the test,
    one against the Content-Security-Policy included, except those that `expected_error` is in."""
    errors: list[str] = []
    contexts = []

    def open_page(
        url: str, *, expected_error: str = "", has_frame: bool = True, **options: object
    ) -> Any:
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
        page.goto(f"{url}/memory")
        if has_frame:
            page.wait_for_selector("html[data-number]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The address of `app`, which a thread serves."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


class Recording:
    """A server of the recording of a driver, and its frames."""

    def __init__(self, url: str, frames: RecordedFrames) -> None:
        self.url = url
        self.frames = frames


RecordingOf = Callable[[str], Recording]


@pytest.fixture(scope="session")
def recording_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingOf]:
    """`recording_of(name)` of a driver; each is made once."""
    made: dict[str, Recording] = {}
    servers = []

    def recording_of(name: str) -> Recording:
        if name not in made:
            path: Path = tmp_path_factory.mktemp("recording") / "run.events"
            path.write_bytes(DRIVERS[name]().recording.getvalue())
            frames = RecordedFrames(path)
            assert not frames.difference
            server = serving(view_app(frames, name))
            made[name] = Recording(server.__enter__(), frames)
            servers.append(server)
        return made[name]

    yield recording_of
    for server in servers:
        server.__exit__(None, None, None)
