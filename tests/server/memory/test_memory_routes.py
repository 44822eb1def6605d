"""The memory view over HTTP: its page, live frames for any number of viewers, and its questions."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import ReadMemory
from sgl_jax.memory_view.frames import FrameBuilder
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.server.memory import memory_watch
from sgl_jax.server.memory.memory_watch import _EVENTS_WAITING, MAX_VIEWERS, MemoryWatch, _Viewer
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import DP_SIZE, PAGE_SIZE
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.server.conftest import Rig, serving
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio
DATA_ROUTES = [
    ("GET", "/memory/hello"),
    ("GET", "/memory/events"),
    ("POST", "/memory/page"),
    ("POST", "/memory/find"),
]


@pytest.fixture
def driver(rig: Rig) -> Driver:
    """Runs the scheduler that the scripted engine reads."""
    driver = Driver(make_sizes(dp_size=DP_SIZE, page_size=PAGE_SIZE, num_pages=40))
    rig.engine.scheduler = driver.scheduler
    return driver


def run(rig: Rig, driver: Driver, rid: str, prompt: list[int]) -> None:
    rig.engine.stand_still()
    driver.submit(generate(rid, prompt, 4))
    driver.run()
    rig.engine.go_on()


def watch_of(rig: Rig) -> MemoryWatch:
    watch = MemoryWatch(rig.refs)
    assert isinstance(watch, MemoryWatch)
    return watch


def parsed(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def take(events: AsyncIterator[bytes], name: str) -> Any:
    """The next event of that name."""
    while True:
        kind, value = parsed(await asyncio.wait_for(anext(events), 10))
        if kind == name:
            return value


async def test_the_page_is_static_and_strict(rig: Rig) -> None:
    answer = await rig.http.get("/memory")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for path in ("/memory/index.html", "/memory/../app.py", "/memory/%2e%2e/app.py", "/memory/no"):
        assert (await rig.http.get(path)).status_code == 404


async def test_the_data_need_an_admin_and_the_page_needs_no_key(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    keys: dict[str, Any] = {"api_key": "client", "admin_api_key": "admin"}
    async with serving(model_folder, tokenizer, **keys) as rig:
        assert (await rig.http.get("/memory")).status_code == 200
        for method, path in DATA_ROUTES:
            for key in ("", "client"):
                headers = {"authorization": f"Bearer {key}"}
                answer = await rig.http.request(method, path, headers=headers)
                assert answer.status_code == 401, path
        hello = await rig.http.get("/memory/hello", headers={"authorization": "Bearer admin"})
        assert hello.status_code == 200


async def test_hello_has_the_facts_of_the_engine(rig: Rig) -> None:
    facts = (await rig.http.get("/memory/hello")).json()
    assert facts["model"] == rig.refs.model_name
    assert (facts["dp_size"], facts["page_size"]) == (DP_SIZE, PAGE_SIZE)
    assert (facts["is_recording"], facts["shows_text"], facts["samples"]) == (False, False, [])


async def test_frames_follow_the_engine_and_the_first_is_whole(rig: Rig, driver: Driver) -> None:
    watch = watch_of(rig)
    async with aclosing(watch.events()) as events:
        first = await take(events, "frame")
        assert first["is_key"]
        assert (await take(events, "tree"))["ranks"][0]["nodes"] == []
        run(rig, driver, "r", [1] * 20)
        counts = first
        while counts["step"] < driver.scheduler.counters()["steps_planned"]:
            counts = await take(events, "frame")
            assert not counts["is_key"]
        views = [view.as_dict() for view in driver.scheduler.memory_views()]
        for rank, view in zip(counts["ranks"], views, strict=True):
            assert rank["pools"][0]["pages"]["free"] == view["free_pages"]
            assert rank["rows"]["free"] == view["free_rows"]
        tree = await take(events, "tree")
        assert sum(len(rank["nodes"]) for rank in tree["ranks"]) == 1
    assert len(watch.samples()) >= 1


async def test_the_engine_is_read_only_while_somebody_watches(rig: Rig, driver: Driver) -> None:
    def num_read() -> int:
        return sum(isinstance(message, ReadMemory) for message in rig.engine.seen)

    watch = watch_of(rig)
    await asyncio.sleep(0.3)
    assert num_read() == 0
    async with aclosing(watch.events()) as first, aclosing(watch.events()) as second:
        for _ in range(3):
            await take(first, "frame")
            await take(second, "frame")
        assert 3 <= num_read() <= 5, "viewers share the readings"
    before = num_read()
    await asyncio.sleep(0.4)
    assert num_read() <= before + 1


async def test_the_engine_rests_as_its_readings_took_and_sends_no_tokens_unasked(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readings() -> list[bool]:
        """Those so far; True for one with trees."""
        found = [message for message in rig.engine.seen if isinstance(message, ReadMemory)]
        assert not any(message.has_tokens for message in found)
        return [message.has_tree for message in found]

    monkeypatch.setattr(memory_watch, "_MIN_TREE_INTERVAL_S", 0.0)
    monkeypatch.setattr(memory_watch, "_TREE_REST", 1e9)
    async with aclosing(watch_of(rig).events()) as events:
        for _ in range(4):
            await take(events, "frame")
        assert readings()[:4] == [True, False, False, False]
    rig.engine.seen.clear()
    monkeypatch.setattr(memory_watch, "_REST", 1e9)
    async with aclosing(watch_of(rig).events()) as events:
        for _ in range(2):
            await take(events, "frame")
        await asyncio.sleep(0.5)
        assert len(readings()) == 2


async def test_a_viewer_that_lags_skips_frames_and_goes_on_with_a_whole_one(
    rig: Rig, driver: Driver
) -> None:
    watch = watch_of(rig)
    async with aclosing(watch.events()) as reading, aclosing(watch.events()) as lagging:
        assert (await take(lagging, "frame"))["is_key"]
        number = 0
        while number < 2 * _EVENTS_WAITING:
            number = (await take(reading, "frame"))["number"]
        frame = await take(lagging, "frame")
        for _ in range(_EVENTS_WAITING):
            if frame["is_key"]:
                break
            frame = await take(lagging, "frame")
        assert frame["is_key"]
        assert frame["number"] > 2


async def test_events_of_any_kind_may_push_out_frames() -> None:
    viewer = _Viewer(None)
    for _ in range(2):
        viewer.put_frame(b"difference", lambda: b"key")
    for _ in range(_EVENTS_WAITING - 1):
        viewer.put(b": busy")
    viewer.put_frame(b"difference", lambda: b"key")
    assert [await viewer.take() for _ in range(2)] == [b": busy", b"key"]


async def test_a_later_viewer_gets_the_last_trees_after_its_first_frame(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_MIN_TREE_INTERVAL_S", 60.0)
    watch = watch_of(rig)
    async with aclosing(watch.events()) as first, aclosing(watch.events()) as later:
        await take(first, "tree")
        events = [parsed(await asyncio.wait_for(anext(later), 10)) for _ in range(2)]
        assert [name for name, _ in events] == ["frame", "tree"]
        assert events[0][1]["is_key"]


async def test_viewers_are_bounded(rig: Rig, driver: Driver) -> None:
    watch = rig.app.state.memory_watch  # type: ignore[attr-defined]
    streams = [watch.events() for _ in range(MAX_VIEWERS)]
    for stream in streams:
        await take(stream, "frame")
    answer = await rig.http.get("/memory/events")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    for stream in streams:
        await stream.aclose()


async def test_the_streams_end_with_the_server(rig: Rig, driver: Driver) -> None:
    async with aclosing(watch_of(rig).events()) as events:
        await take(events, "frame")
        rig.refs.draining = True
        async with asyncio.timeout(5):
            async for _ in events:
                pass


async def test_samples_are_a_second_apart_of_the_last_ten_minutes_whatever_the_clock_shows(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, now_s = watch_of(rig), time.monotonic()
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
    monkeypatch.setattr(memory_watch.time, "time", lambda: 0.0)  # type: ignore[attr-defined]
    reader = MemoryReader(driver.scheduler)
    for number in range(1001):
        watch._publish(reader.read(ReadMemory()))
        now_s += 0.7 if number < 1000 else 300.0
    times = [sample["time_s"] for sample in watch.samples()]
    assert {round(after - before, 6) for before, after in pairwise(times)} == {1.4}
    assert times[-1] == pytest.approx(700.0)
    assert times[0] == pytest.approx(400.4)


async def test_a_long_rest_does_not_hold_up_the_end_of_the_server(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_MIN_INTERVAL_S", 60.0)
    async with aclosing(watch_of(rig).events()) as events:
        await take(events, "tree")
        rig.refs.draining = True
        async with asyncio.timeout(5):
            assert await anext(events, None) is None


async def test_a_server_that_ends_refuses_viewers(rig: Rig, driver: Driver) -> None:
    watch = rig.app.state.memory_watch  # type: ignore[attr-defined]
    async with aclosing(watch.events()) as slow:
        await take(slow, "frame")
        rig.refs.draining = True
        await asyncio.sleep(0.7)  # the reading has ended, and this viewer has not taken that
        answer = await rig.http.get("/memory/events")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        async with aclosing(watch.events()) as late, asyncio.timeout(5):
            assert await anext(late, None) is None


async def test_a_frame_that_cannot_be_made_ends_the_streams_and_others_may_follow(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("a defect")

    watch = rig.app.state.memory_watch  # type: ignore[attr-defined]
    async with aclosing(watch.events()) as events, asyncio.timeout(10):
        await take(events, "tree")
        with monkeypatch.context() as broken:
            broken.setattr(FrameBuilder, "add", fail)
            assert [event async for event in events if b"event: frame" not in event] == []
            answer = await rig.http.get("/memory/events")
            assert answer.status_code == 503
        async with aclosing(watch.events()) as others:
            assert (await take(others, "frame"))["is_key"]


async def test_a_page_and_a_prefix_are_found(rig: Rig, driver: Driver) -> None:
    run(rig, driver, "r", [1] * 20)
    (rank,) = (rank for rank in driver.scheduler.ranks if rank.memory.cache.nodes())
    (node,) = rank.memory.cache.nodes()
    page = int(node.values[0][1])
    place: dict[str, Any] = {"dp_rank": rank.dp_rank, "pool": 0, "page": page}
    found = (await rig.http.post("/memory/page", json=place)).json()
    assert (found["owner"], found["tokens"], found["node"]) == ("tree", [4, 8], node.node_id)
    assert [move["action"] for move in found["moves"]] == ["take", "give to the tree"]
    answer = await rig.http.post("/memory/find", json={"input_ids": [1] * 14})
    ranks = {each["dp_rank"]: each for each in answer.json()["ranks"]}
    assert ranks[rank.dp_rank]["num_tokens"] == 12
    assert ranks[rank.dp_rank]["nodes"] == [node.node_id]
    assert ranks[1 - rank.dp_rank]["num_tokens"] == 0
    text = (await rig.http.post("/memory/find", json={"text": "hello"})).json()
    assert text["num_tokens"] == len(rig.refs.frontend.tokenizer.encode("hello"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/memory/page", {"dp_rank": 9, "pool": 0, "page": 1}, "dp_rank"),
        ("/memory/page", {"dp_rank": 0, "pool": 1, "page": 1}, "pool"),
        ("/memory/page", {"dp_rank": 0, "pool": 0, "page": 40}, "page"),
        ("/memory/page", {"dp_rank": 0, "pool": 0, "page": -1}, "page"),
        ("/memory/find", {}, "text"),
        ("/memory/find", {"text": "a", "input_ids": [1]}, "text"),
        ("/memory/find", {"input_ids": [-1]}, "input_ids"),
    ],
)
async def test_a_wrong_question_is_refused(
    rig: Rig, driver: Driver, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 400
    assert param in (answer.json()["error"]["param"] or "")


async def test_a_memory_that_cannot_be_read_ends_nothing(rig: Rig, driver: Driver) -> None:
    async with aclosing(watch_of(rig).events()) as events:
        await take(events, "frame")
        rig.engine.stand_still()
        await asyncio.sleep(0.2)
        rig.engine.go_on()
        await meanwhile_until(lambda: not rig.front.has_ended, "it serves on")
        assert (await take(events, "frame"))["number"] >= 1
