"""The page follows a live server: differences, a lost connection, a key, a defect, and freezing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sgl_jax.core.messages import ReadMemory
from sgl_jax.memory_view import MEMORY_PAGE
from sgl_jax.memory_view.frames import FrameBuilder
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.server.answer_stream import named_event
from sgl_jax.server.static_pages import page_routes
from tests.mem_cache.test_ledger import leak_a_page
from tests.memory_view.conftest import OpenPage, serving
from tests.memory_view.test_page import COLOURS, kinds_of
from tests.scheduler.driver import Driver, generate, make_sizes

CELLS = """numPages => {
  const context = document.querySelector("#maps canvas").getContext("2d");
  return Array.from({ length: numPages }, (_, page) => {
    const [r, g, b] = context.getImageData(24 * page + 12, 4, 1, 1).data;
    return r * 65536 + g * 256 + b;
  });
}"""

# Keeps every colour that each cell has had in `window.seen`.
RECORD_CELLS = """numPages => {
  const cells = CELLS;
  window.seen = Array.from({ length: numPages }, () => new Set());
  requestAnimationFrame(function look() {
    cells(numPages).forEach((colour, page) => window.seen[page].add(colour));
    requestAnimationFrame(look);
  });
}"""


class LiveServer:
    """Sends the frames of a driver to one viewer, as the engine's server does."""

    def __init__(self) -> None:
        self.driver = Driver(make_sizes(num_pages=24))
        self.key = ""
        self.is_broken = False
        self._reader = MemoryReader(self.driver.scheduler)
        self._frames = FrameBuilder()
        self._events: list[bytes] = []
        self.publish()

    @property
    def frame(self) -> dict[str, Any]:
        return self._frames.key_frame()

    def publish(self) -> None:
        snapshot = self._reader.read(ReadMemory(has_tree=True))
        frame = self._frames.add(snapshot, self._frames.number + 1.0)
        events = named_event("frame", frame) + named_event("tree", self._frames.tree(snapshot))
        self._events.append(events)

    def run(self, rid: str, num_steps: int) -> None:
        self.driver.submit(generate(rid, [len(rid)] * 12, 30))
        for _ in range(num_steps):
            self.driver.step()
            self.publish()

    def app(self) -> Starlette:
        routes = [Route("/memory/hello", self._hello), Route("/memory/events", self._stream)]
        return Starlette(routes=[*page_routes(MEMORY_PAGE, "/memory", "index.html"), *routes])

    async def _hello(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, status_code=401)
        return JSONResponse(
            {
                "model": "tiny",
                "version": "0",
                "is_recording": False,
                "shows_text": False,
                "dp_size": 1,
                "page_size": 4,
                "num_frames": 0,
                "samples": [self._frames.sample()],
            }
        )

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._pieces(), media_type="text/event-stream")

    async def _pieces(self) -> AsyncIterator[bytes]:
        sent = len(self._events)
        yield b": hello\n\n" + named_event("frame", self.frame)
        while not self.is_broken:
            events = b"".join(self._events[sent:])
            sent = len(self._events)
            for at in range(0, len(events), 1000):  # an event arrives in pieces
                yield events[at : at + 1000]
            await asyncio.sleep(0.02)
        self.is_broken = False


@pytest.fixture
def server() -> LiveServer:
    return LiveServer()


@pytest.fixture
def url(server: LiveServer) -> Iterator[str]:
    with serving(server.app()) as url:
        yield url


def wait_for_number(page: Any, number: int) -> None:
    page.wait_for_selector(f"html[data-number='{number}']", state="attached")


def test_differences_add_up_in_the_page(server: LiveServer, url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    for i in range(5):
        server.run("r" * (i + 1), 4)
        wait_for_number(page, server.frame["number"])
        page.wait_for_timeout(700)  # the changes have flashed
        expected = [COLOURS[kind.split(",")[0]] for kind in kinds_of(server.frame, 0, 0)]
        assert page.evaluate(CELLS, 24) == expected
        shown = page.locator("[data-state='leased']").get_attribute("data-value")
        assert shown == str(server.frame["ranks"][0]["pools"][0]["pages"]["leased"])


def test_changes_flash(server: LiveServer, url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.wait_for_timeout(700)
    page.evaluate(RECORD_CELLS.replace("CELLS", CELLS), 24)
    still = page.evaluate(CELLS, 24)
    server.run("r", 2)
    wait_for_number(page, server.frame["number"])
    page.wait_for_timeout(1000)
    settled = page.evaluate(CELLS, 24)
    changed = {i for i in range(24) if settled[i] != still[i]}
    assert changed
    num_seen = page.evaluate("() => window.seen.map(colours => colours.size)")
    assert {i for i in range(24) if num_seen[i] > 2} == changed
    assert all(num_seen[i] == 1 for i in range(24) if i not in changed)


def test_space_freezes_and_goes_on(server: LiveServer, url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.keyboard.press(" ")
    frozen = page.locator("html").get_attribute("data-number")
    page.wait_for_selector("html[data-frozen='true']", state="attached")
    still = page.evaluate(CELLS, 24)
    server.run("r", 6)
    page.locator("#zoom-fit").click()
    page.wait_for_timeout(400)
    assert page.locator("html").get_attribute("data-number") == frozen
    assert page.evaluate(CELLS, 24) == still
    page.locator("#zoom-fit").blur()
    page.keyboard.press(" ")
    wait_for_number(page, server.frame["number"])


def test_a_lost_connection_is_announced_and_renewed(
    server: LiveServer, url: str, open_page: OpenPage
) -> None:
    page = open_page(url)
    server.is_broken = True
    alert = page.locator("#connection")
    alert.get_by_text("No connection").wait_for()
    assert alert.get_attribute("role") == "alert"
    server.run("r", 3)
    wait_for_number(page, server.frame["number"])
    alert.wait_for(state="hidden")


def test_a_key_is_requested_and_kept_for_the_tab_alone(
    server: LiveServer, url: str, open_page: OpenPage
) -> None:
    server.key = "secret"
    page = open_page(url, has_frame=False, expected_error="401")
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.locator("#key").fill("secret")
    page.keyboard.press("Enter")
    wait_for_number(page, server.frame["number"])
    assert page.evaluate("() => [localStorage.length, sessionStorage.length]") == [0, 1]
    assert page.evaluate("() => document.cookie") == ""


def test_a_defect_is_put_into_words_with_its_pages(
    server: LiveServer, url: str, open_page: OpenPage
) -> None:
    page = open_page(url)
    assert page.locator("#defect-alert").is_hidden()
    server.run("r", 3)
    leak_a_page(server.driver.scheduler.ranks[0].memory)
    server.publish()
    wait_for_number(page, server.frame["number"])
    (rank,) = server.frame["ranks"]
    assert not rank["is_closed"]
    assert page.locator("#defect-alert").inner_text() == f"Rank 0 is not closed: {rank['defect']}."
    line = page.locator("li[data-rank='0']")
    assert line.get_attribute("data-closed") == "false"
    words = line.inner_text()
    assert "not closed:" in words
    assert rank["defect"] in words
