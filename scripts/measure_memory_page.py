"""Measure the time of the first paint of the memory view's page, and its frames per second.

    python scripts/measure_memory_page.py [--ranks 8] [--pages 65536] [--chromium /usr/bin/chromium]

It needs the extra `browser` and Chromium. A separate server sends ten frames per second, prepared
before the measurement so that it takes no time from the browser: requests take and return pages.
"""

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import uvicorn
from playwright.sync_api import Page, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sgl_jax.memory_view import MEMORY_PAGE
from sgl_jax.memory_view.frames import runs
from sgl_jax.server.static_pages import page_routes

NUM_FRAMES = 100
NUM_ROWS = 64
PAGES_CHANGED = 64  # of each rank between two frames
INTERVAL_S = 0.1
SECONDS = 4.0
SIZES = ((380, 800), (1600, 1000), (3840, 2160))
COUNT_FRAMES = """milliseconds => new Promise(resolve => {
  const root = document.documentElement;
  const [started, first] = [performance.now(), Number(root.dataset.number)];
  let [drawn, last, longest] = [0, started, 0];
  requestAnimationFrame(function count(now) {
    drawn++;
    longest = Math.max(longest, now - last);
    last = now;
    const seconds = (now - started) / 1000;
    if (seconds * 1000 < milliseconds) requestAnimationFrame(count);
    else resolve([drawn / seconds, longest, (Number(root.dataset.number) - first) / seconds]);
  });
})"""


def frames(num_ranks: int, num_pages: int) -> Iterator[dict[str, Any]]:
    """Yield a key frame and the frames after it."""
    random = np.random.default_rng(0)
    starts = np.sort(random.integers(0, num_pages, (num_ranks, num_pages // 40)))
    kinds = random.integers(-3, NUM_ROWS, (num_ranks, num_pages // 40 + 1))
    codes = [
        kinds[rank][np.searchsorted(starts[rank], np.arange(num_pages), side="right")]
        for rank in range(num_ranks)
    ]
    for number in range(NUM_FRAMES):
        before = [of_rank.copy() for of_rank in codes]
        for of_rank in codes:
            for first in random.integers(0, num_pages, PAGES_CHANGED // 4):
                of_rank[first : first + 4] = random.integers(-2, NUM_ROWS)
        changed = [
            np.ones(num_pages, bool) if number == 0 else codes[rank] != before[rank]
            for rank in range(num_ranks)
        ]
        ranks = [rank_of(rank, codes[rank], changed[rank]) for rank in range(num_ranks)]
        yield {
            "is_key": number == 0,
            "number": number,
            "step": number,
            "time_s": number / 10,
            "num_running": 400,
            "num_waiting": 3,
            "num_sessions": 0,
            "tokens_per_s": 1e4,
            "ranks": ranks,
            "waiting": [],
            "num_waiting_left_out": 0,
            "sessions": [],
            "num_sessions_left_out": 0,
            "marks": [],
        }


def rank_of(dp_rank: int, codes: np.ndarray, is_listed: np.ndarray) -> dict[str, Any]:
    names = ("free", "reserved", "cached_evictable", "cached_protected")
    pages = {name: int((codes == -code).sum()) for code, name in enumerate(names)}
    pages |= {"leased": int((codes > 0).sum()), "session_held": 0, "total": len(codes)}
    lease = {
        "session_id": None,
        "is_idle": False,
        "prompt_len": 9000,
        "num_output": 10,
        "protected": 4000,
        "committed": 9000,
        "allocated": 9200,
        "tokens_per_s": 30.0,
        "num_retractions": 0,
        "node": None,
    }
    return {
        "dp_rank": dp_rank,
        "is_closed": True,
        "defect": None,
        "defect_pages": [],
        "num_running": NUM_ROWS,
        "num_waiting": 0,
        "counters": {},
        "pools": [
            {
                "name": "full",
                "num_pages": len(codes),
                "pages": pages,
                "runs": runs(codes.astype(np.int32), is_listed),
            }
        ],
        "rows": {"free": 0, "running": NUM_ROWS, "session": 0, "total": NUM_ROWS},
        "leases": [{**lease, "row": row, "rid": f"request-{row}"} for row in range(1, NUM_ROWS)],
    }


def app(num_ranks: int, num_pages: int) -> Starlette:
    prepared = [
        b"event: frame\ndata: " + msgspec.json.encode(frame) + b"\n\n"
        for frame in frames(num_ranks, num_pages)
    ]
    facts = {
        "model": "measured",
        "version": "0",
        "is_recording": False,
        "shows_text": False,
        "dp_size": num_ranks,
        "page_size": 16,
        "num_frames": 0,
        "samples": [],
    }

    async def hello(request: Request) -> Response:
        return JSONResponse(facts)

    async def send_frames() -> AsyncIterator[bytes]:
        for event in prepared:
            yield event
            await asyncio.sleep(INTERVAL_S)

    async def events(request: Request) -> Response:
        return StreamingResponse(send_frames(), media_type="text/event-stream")

    routes = [Route("/memory/hello", hello), Route("/memory/events", events)]
    return Starlette(routes=[*page_routes(MEMORY_PAGE, "/memory", "index.html"), *routes])


def measure(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("html[data-number]", state="attached")
    first_frame = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByType('paint')[0].startTime")
    print(f"  first paint {paint:.0f} ms, first frame {first_frame:.0f} ms")
    for section in ("balance", "map"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
        drawn, longest, received = page.evaluate(COUNT_FRAMES, 1000 * SECONDS)
        print(
            f"  at the {section}: {drawn:.0f} frames/s drawn, the longest {longest:.0f} ms, "
            f"{received:.1f} frames/s received"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pages", type=int, default=65536, help="of each rank")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    config = uvicorn.Config(app(args.ranks, args.pages), log_level="error", port=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium)
        for width, height in SIZES:
            print(f"{args.ranks} ranks of {args.pages:,} pages on {width} x {height}:")
            page = browser.new_page(viewport={"width": width, "height": height})
            measure(page, f"http://127.0.0.1:{port}/memory")
            page.close()
        browser.close()
    server.should_exit = True
    thread.join(5)


if __name__ == "__main__":
    main()
