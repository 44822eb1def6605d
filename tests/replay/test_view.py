"""A recording opens in the memory view: a frame for each step, and questions about any of them."""

import io
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from sgl_jax.memory_view.frames import added_up
from sgl_jax.replay import view
from sgl_jax.replay.player import Player
from sgl_jax.replay.view import RecordedFrames, view_app
from sgl_jax.scheduler.events import Planned, TakeOutputs
from sgl_jax.scheduler.record.event_log import EventReader, EventWriter


@pytest.fixture
def client(path: Path) -> TestClient:
    return TestClient(view_app(RecordedFrames(path), path.name), base_url="http://127.0.0.1")


def test_pages_of_other_sites_read_no_recording(client: TestClient) -> None:
    for path in ("/memory/hello", "/memory/frame?number=0"):
        assert client.get(path).status_code == 200
        assert client.get(path, headers={"host": "evil.example"}).status_code == 403
        assert client.get(path, headers={"origin": "http://evil.example"}).status_code == 403


def test_each_step_has_a_frame_with_the_schedulers_counts(
    client: TestClient, recording: bytes
) -> None:
    hello = client.get("/memory/hello").json()
    assert hello["is_recording"]
    assert hello["num_frames"] == len(hello["samples"])
    reader = EventReader(io.BytesIO(recording))
    player = Player(reader.started)
    number = 0
    for event in reader:
        player.feed(event)
        if not isinstance(event, Planned) or event.plan is None:
            continue
        content = client.get("/memory/frame", params={"number": number}).json()
        frame, sample = content["frame"], hello["samples"][number]
        assert frame["is_key"]
        assert frame["step"] == sample["step"] == number + 1
        for rank, counts in zip(frame["ranks"], player.scheduler.memory_views(), strict=True):
            pages = rank["pools"][0]["pages"]
            assert (pages["free"], pages["leased"]) == (counts.free_pages, counts.leased_pages)
            assert sum(count for _, count, code in rank["pools"][0]["runs"] if code == 0) == (
                counts.free_pages
            )
            assert sample["ranks"][rank["dp_rank"]]["pages"][0] == pages
        number += 1
    assert number in (hello["num_frames"], hello["num_frames"] - 1)  # one may follow for the end
    marks = [mark["kind"] for sample in hello["samples"] for mark in sample["marks"]]
    assert {"retract", "page eviction"} <= set(marks)


def test_a_question_is_about_the_memory_in_that_frame(client: TestClient) -> None:
    histories = []
    for number in range(0, 40, 8):
        frame = client.get("/memory/frame", params={"number": number}).json()["frame"]
        body = {"dp_rank": 0, "pool": 0, "page": 3, "frame": number}
        found = client.post("/memory/page", json=body).json()
        code = next(
            code
            for first, count, code in frame["ranks"][0]["pools"][0]["runs"]
            if first <= 3 < first + count
        )
        owner = {0: "free", -2: "tree", -3: "tree"}.get(code, f"row {code}")
        assert found["owner"] == owner
        histories.append([move["clock"] for move in found["moves"]])
    assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(histories))
    assert len(histories[-1]) > len(histories[0])
    content = client.get("/memory/frame", params={"number": 60}).json()
    body = {"input_ids": list(range(20)), "frame": 60}
    found = client.post("/memory/find", json=body).json()
    for rank, tree in zip(found["ranks"], content["tree"]["ranks"], strict=True):
        assert set(rank["nodes"]) <= {node["id"] for node in tree["nodes"]}


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("GET", "/memory/frame", None),
        ("GET", "/memory/frame?number=100000", None),
        ("GET", "/memory/frame?number=-1", None),
        ("POST", "/memory/page", {"dp_rank": 0, "pool": 0, "page": 3}),
        ("POST", "/memory/page", {"dp_rank": 0, "pool": 0, "page": 3, "frame": 100_000}),
        ("POST", "/memory/page", {"dp_rank": 7, "pool": 0, "page": 3, "frame": 0}),
        ("GET", f"/memory/frame?number={'9' * 5000}", None),
        ("POST", "/memory/find", {"text": "a", "frame": 0}),
        ("POST", "/memory/find", {"input_ids": [1, 2**31], "frame": 0}),
        ("POST", "/memory/find", {"input_ids": [-1], "frame": 0}),
    ],
)
def test_a_wrong_question_is_refused(
    client: TestClient, method: str, route: str, body: dict[str, object] | None
) -> None:
    answer = client.request(method, route, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_long_recording_keeps_every_second_step(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RecordedFrames(path)
    monkeypatch.setattr(view, "MAX_FRAMES", 30)
    thinned = RecordedFrames(path)
    assert len(whole) > 2 * len(thinned)
    assert len(thinned) <= 32
    contents = [msgspec.json.decode(thinned.content(number)) for number in range(len(thinned))]
    assert [content["frame"]["number"] for content in contents] == list(range(len(thinned)))
    for content, sample in zip(contents, thinned.samples, strict=True):
        assert content["frame"]["marks"] == sample["marks"]
    marks = [
        added_up(mark for sample in each.samples for mark in sample["marks"])
        for each in (whole, thinned)
    ]
    assert by_kind(marks[0]) == by_kind(marks[1])
    steps = [sample["step"] for sample in thinned.samples]
    gaps = {after - before for before, after in pairwise(steps)}
    assert steps[0] == max(gaps) == 4


def by_kind(marks: list[Any]) -> dict[Any, int]:
    return {(mark["dp_rank"], mark["kind"]): mark["count"] for mark in marks}


def test_frames_are_left_out_where_they_take_too_much_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = sum(len(frame.content) for frame in RecordedFrames(path)._frames)
    monkeypatch.setattr(view, "_MAX_CONTENT_BYTES", num_bytes // 3)
    assert sum(len(frame.content) for frame in RecordedFrames(path)._frames) <= num_bytes // 3


def test_a_recording_that_is_cut_off_ends_with_its_last_whole_event(
    tmp_path: Path, path: Path, recording: bytes
) -> None:
    cut = tmp_path / "cut.events"
    cut.write_bytes(recording[: len(recording) // 2])
    whole, frames = RecordedFrames(path), RecordedFrames(cut)
    assert not frames.difference
    assert 10 < len(frames) < len(whole)
    assert frames.samples[:-1] == whole.samples[: len(frames) - 1]


def test_a_recording_that_is_not_repeated_ends_where_it_differs(
    tmp_path: Path, recording: bytes
) -> None:
    path = tmp_path / "other.events"
    file = io.BytesIO()
    reader = EventReader(io.BytesIO(recording))
    writer = EventWriter(file)
    writer.write(reader.started)
    num_plans = 0
    for event in reader:
        num_plans += isinstance(event, Planned)
        if num_plans == 20 and isinstance(event, Planned):
            continue
        writer.write(TakeOutputs() if num_plans == 20 else event)
    path.write_bytes(file.getvalue())
    frames = RecordedFrames(path)
    assert "event" in frames.difference
    assert 10 < len(frames) < 40


def test_the_command_serves_it_on_this_machine(path: Path) -> None:
    command = [sys.executable, "-m", "sgl_jax.replay", str(path), "--view"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"open (http://127\.0\.0\.1:\d+/memory)", process.stdout.readline())
            assert found
            assert httpx.get(found[1]).status_code == 200
            assert httpx.get(f"{found[1]}/hello").json()["model"] == "run.events"
        finally:
            process.terminate()
            process.wait(10)
