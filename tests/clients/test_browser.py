"""npm's openai in headless Chromium, in a page of another origin than the server's."""

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.live.live_server import LiveServer
from tests.support.chromium import CHROMIUM

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]

PACKAGES = ("openai@6", "esbuild@0.28")
PAGE = '<!doctype html><meta charset="utf-8"><script type="module" src="bundle.js"></script>'
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class _Pages(SimpleHTTPRequestHandler):
    """Serves the files of a folder, and puts what is posted into `results`."""

    def __init__(self, results: "queue.Queue[Any]", *arguments: Any, **settings: Any) -> None:
        self.results = results
        super().__init__(*arguments, **settings)

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.results.put(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: what matters is in `results`."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and its script, bundled with npm's openai."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(Path(__file__).parent / "page.js", folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
    subprocess.run(install, check=True, timeout=300)
    bundler = str(folder / "node_modules" / ".bin" / "esbuild")
    bundle = [bundler, "page.js", "--bundle", "--format=esm", "--outfile=site/bundle.js"]
    subprocess.run(bundle, check=True, timeout=60, cwd=folder)
    (folder / "site" / "index.html").write_text(PAGE)
    return folder / "site"


@pytest.fixture
def origin(pages: Path) -> Iterator[tuple[str, "queue.Queue[Any]"]]:
    """The URL of the page, and what it posts."""
    results: queue.Queue[Any] = queue.Queue()
    handler = partial(_Pages, results, directory=str(pages))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_address[1]}/index.html", results
        site.shutdown()
        thread.join()


def _result_of_page(
    origin: tuple[str, "queue.Queue[Any]"], server: LiveServer, profile: Path
) -> Any:
    page, results = origin
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", f"{page}?server={server.url}"]
    with (profile / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        return results.get(timeout=90)
    finally:
        process.terminate()
        process.wait(30)


def test_a_page_of_another_origin_chats(
    origin: tuple[str, "queue.Queue[Any]"], worker: LiveServer, tmp_path: Path
) -> None:
    assert _result_of_page(origin, worker, tmp_path) == {
        "whole": "17 + 25 = 42.",
        "streamed": "17 + 25 = 42.",
        "refused": {"status": 400, "param": "top_p"},
    }


def test_a_page_is_kept_out_where_no_origin_is_let_in(
    origin: tuple[str, "queue.Queue[Any]"], second_worker: LiveServer, tmp_path: Path
) -> None:
    assert _result_of_page(origin, second_worker, tmp_path) == {"error": "APIConnectionError"}
