"""A browser with the memory view's page, and servers for it. Skipped where there is no Chromium."""

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
from tests.support.chromium import OpenPage, browser, open_tab

__all__ = ["browser", "open_tab"]


@pytest.fixture
def open_page(open_tab: OpenPage) -> OpenPage:
    """`open_page(url)` of a server opens the view there, and waits for its first frame."""

    def open_page(url: str, *, has_frame: bool = True, **options: object) -> Any:
        page = open_tab(f"{url}/memory", **options)
        if has_frame:
            page.wait_for_selector("html[data-number]", state="attached")
        return page

    return open_page


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
