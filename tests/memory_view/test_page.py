"""The page of the memory view shows the numbers of the frames, and draws every page."""

import json
from itertools import groupby
from typing import Any

import pytest

from tests.memory_view.conftest import OpenPage, Recording, RecordingOf
from tests.memory_view.drivers import DRIVERS, HOSTILE
from tests.support.long import long_but

Frame = dict[str, Any]

DASH = "\N{EN DASH}"
STATES = ("free", "leased", "cached_evictable", "cached_protected", "session_held", "reserved")
WORDS = ("free", "running", "cached", "protected", "sessions", "reserved")
HOST_WORDS = ("free", "arriving", "cached", "leaving", None, "reserved")
# One pixel of each cell, in the middle of its upper edge, as rgb of each page of a rank's map.
CELLS = """([rank, numPages]) => {
  const canvas = document.querySelectorAll("#maps canvas")[rank];
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const cell = numPages > 50000 ? 3 : 24;
  const columns = width / cell;
  return Array.from({ length: numPages }, (_, page) => {
    const x = (page % columns) * cell + cell / 2;
    const y = Math.floor(page / columns) * cell + cell / 6;
    const at = 4 * (Math.floor(y) * width + Math.floor(x));
    return data[at] * 65536 + data[at + 1] * 256 + data[at + 2];
  });
}"""
COLOURS = {
    "free": 0xE7E9EC,
    "running": 0x0072B2,
    "arriving": 0x0072B2,
    "cached": 0x009E73,
    "protected": 0x009E73,
    "leaving": 0x009E73,
    "sessions": 0xE69F00,
    "reserved": 0xCC79A7,
}


def content_of(recording: Recording, number: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(recording.frames.content(number))
    return content


def go_to(page: Any, number: int) -> None:
    page.locator("#position").fill(str(number))
    page.wait_for_selector(f"html[data-number='{number}']", state="attached")


def kinds_of(frame: Frame, rank: int, pool: int) -> list[str]:
    """The kind of each page, and its row or transfer if it has one."""
    leases, facts = frame["ranks"][rank]["leases"], frame["ranks"][rank]["pools"][pool]
    idle = {lease["row"] for lease in leases if lease["is_idle"]}
    words = {0: "free", -1: "reserved", -2: "cached"}
    words[-3] = "leaving" if facts["is_host"] else "protected"

    def words_of(code: int) -> str:
        if facts["is_host"]:
            return f"arriving, transfer {code}"
        return f"{'sessions' if code in idle else 'running'}, row {code}"

    return [
        words[code] if code <= 0 else words_of(code)
        for _, count, code in facts["runs"]
        for _ in range(count)
    ]


def open_table(page: Any, section: str) -> list[list[str]]:
    """Opens the table of a section; texts of its rows."""
    button = page.locator(f"#{section} .table-toggle")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    page.mouse.move(0, 0)
    page.wait_for_timeout(1100)
    rows = page.locator(f"#{section} tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


@pytest.mark.parametrize("name", DRIVERS)
def test_each_number_is_the_frames(
    name: str, recording_of: RecordingOf, open_page: OpenPage
) -> None:
    recording = recording_of(name)
    page = open_page(recording.url)
    last = len(recording.frames) - 1
    for number in {0, last // 4, last // 2, 3 * last // 4, last}:
        go_to(page, number)
        frame = content_of(recording, number)["frame"]
        for total in ("step", "num_running", "num_waiting", "num_sessions", "tokens_per_s"):
            shown = page.locator(f"#total-{total}").get_attribute("data-value")
            assert float(shown or "") == frame[total], total
        for rank in frame["ranks"]:
            for pool, facts in enumerate(rank["pools"]):
                line = page.locator(f"li[data-rank='{rank['dp_rank']}'][data-pool='{pool}']")
                pages = facts["pages"]
                words = zip(HOST_WORDS if facts["is_host"] else WORDS, STATES, strict=True)
                terms = [f"{word} {pages[state]:,}" for word, state in words if word]
                sentence = f"Rank {rank['dp_rank']}, {facts['name']}: closed: {' + '.join(terms)}"
                assert line.locator("p").inner_text() == f"{sentence} = {pages['total']:,}"
                for state, count in pages.items():
                    if facts["is_host"] and state == "session_held":
                        assert count == 0
                        continue
                    value = line.locator(f"[data-state='{state}']").get_attribute("data-value")
                    assert value == str(count)


@pytest.mark.parametrize("name", long_but(DRIVERS, "two ranks", "host"))
def test_every_page_is_drawn_and_listed(
    name: str, recording_of: RecordingOf, open_page: OpenPage
) -> None:
    recording = recording_of(name)
    page = open_page(recording.url, reduced_motion="reduce")
    for number in (len(recording.frames) - 1, len(recording.frames) // 2):
        go_to(page, number)
        frame = content_of(recording, number)["frame"]
        for pool in range(len(frame["ranks"][0]["pools"])):
            page.locator("#pool").select_option(index=pool)
            listed = open_table(page, "map")
            expected = []
            for rank in range(len(frame["ranks"])):
                kinds = kinds_of(frame, rank, pool)
                page.locator("#maps canvas").nth(rank).scroll_into_view_if_needed()
                page.wait_for_timeout(100)
                drawn = page.evaluate(CELLS, [rank, len(kinds)])
                assert drawn == [COLOURS[kind.split(",")[0]] for kind in kinds]
                first = 0
                for kind, pages in groupby(kinds):
                    count = len(list(pages))
                    expected.append([str(rank), str(first), str(count), kind])
                    first += count
            assert listed == expected[:100]


def test_requests_and_their_reasons_are_listed(
    recording_of: RecordingOf, open_page: OpenPage
) -> None:
    recording = recording_of("two ranks")
    samples = recording.frames.samples
    number = max(range(len(samples)), key=lambda i: samples[i]["num_waiting"])
    page = open_page(recording.url)
    go_to(page, number)
    frame = content_of(recording, number)["frame"]
    leases = [
        [rank["dp_rank"], *(lease[name] for name in ("row", "rid", "session_id")),
         *(lease[name] for name in ("protected", "committed", "allocated"))]
        for rank in frame["ranks"]
        for lease in rank["leases"]
    ]  # fmt: skip
    assert len(leases) > 2
    listed = [row[:7] for row in open_table(page, "leases")]
    assert listed == [[DASH if cell is None else str(cell) for cell in row] for row in leases]
    page.wait_for_timeout(1100)
    waiting = [[each["rid"], each["reason"]] for each in frame["waiting"]]
    assert any("pages short on rank" in reason for _, reason in waiting)
    rows = page.locator("#waiting tbody tr").all()
    assert [row.locator("th, td").all_inner_texts()[:2] for row in rows] == waiting
    assert any(HOSTILE in rid for rid, _ in waiting)
    assert page.title() == "Memory view"
    assert page.locator("img").count() == 0


def test_sessions_show_forks_and_rollbacks(recording_of: RecordingOf, open_page: OpenPage) -> None:
    recording = recording_of("two ranks")
    page = open_page(recording.url)
    go_to(page, len(recording.frames) - 1)
    rows = {row[0]: row for row in open_table(page, "sessions")}
    assert set(rows) == {"chat", "fork", HOSTILE}
    assert (rows["chat"][3], rows["chat"][-1]) == ("2", "1 after 2")
    assert rows["fork"][-2] == "chat"
    page.locator("#session-canvas").focus()
    spoken = []
    for _ in range(3):
        page.keyboard.press("ArrowDown")
        spoken.append(page.locator("#session-canvas").get_attribute("aria-valuetext") or "")
    assert [words for words in spoken if "forked from chat after 2 turns" in words]
    order = [words.split(" · ")[0] for words in spoken]
    assert order.index("fork") == order.index("chat") + 1, "a fork follows its source"


def test_the_tree_is_walked_and_searched(recording_of: RecordingOf, open_page: OpenPage) -> None:
    recording = recording_of("windows")
    contents = [content_of(recording, number) for number in range(len(recording.frames))]
    trees = [content["tree"]["ranks"][0]["nodes"] for content in contents]
    with_tombstones = [i for i, nodes in enumerate(trees) if any(n["tombstones"] for n in nodes)]
    number = max(with_tombstones, key=lambda i: len(trees[i]))
    nodes = trees[number]
    page = open_page(recording.url)
    go_to(page, number)
    listed = open_table(page, "tree")
    assert [row[1] for row in listed] == [str(node["id"]) for node in nodes]
    child = next(node for node in nodes if node["parent"] is not None)
    page.locator("#tree-canvas").focus()
    page.keyboard.press("Home")
    readout = page.locator("#tree-readout")
    assert readout.inner_text().startswith(f"node {nodes[0]['id']};")
    while not readout.inner_text().startswith(f"node {child['parent']};"):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert readout.inner_text().startswith(f"node {child['id']};")
    page.locator("#find-text").fill("[1, 1, 1, 1, 1]")
    page.keyboard.press("Enter")
    result = page.locator("#find-result")
    result.get_by_text("Found on rank 0:").wait_for()
    assert "of 5 tokens" in result.inner_text()
    page.locator("#find-text").fill("some text")
    page.keyboard.press("Enter")
    result.get_by_text("give token ids").wait_for()


def test_a_page_is_described_and_pinned(recording_of: RecordingOf, open_page: OpenPage) -> None:
    recording = recording_of("two ranks")
    page = open_page(recording.url)
    number = len(recording.frames) - 1
    go_to(page, number)
    kinds = kinds_of(content_of(recording, number)["frame"], 1, 0)
    cached = kinds.index("cached")
    canvas = page.locator("#maps canvas").nth(1)
    details = page.locator("#page-details")
    canvas.hover(position={"x": 24 * cached + 12, "y": 12})
    details.locator("[data-owner='tree']").wait_for()
    assert details.inner_text().startswith(f"Rank 1, full: page {cached}, cached")
    canvas.click(position={"x": 24 * cached + 12, "y": 12})
    details.get_by_text("give to the tree").first.wait_for()
    page.mouse.move(0, 0)
    details.get_by_role("button", name="Show it in the tree").click()
    assert page.locator("#tree-rank").input_value() == "1"
    assert page.locator("#tree-readout").inner_text().startswith("node ")
    details.get_by_role("button", name="Unpin").click()
    assert details.inner_text() == "Point at a page for details."


def test_an_instant_of_the_timeline_is_shown_in_the_head(
    recording_of: RecordingOf, open_page: OpenPage
) -> None:
    recording = recording_of("two ranks")
    page = open_page(recording.url)
    samples = recording.frames.samples
    timeline = page.locator("#timeline-canvas")
    timeline.focus()
    page.keyboard.press("End")
    for index in (len(samples) - 1, len(samples) - 2, len(samples) - 3):
        step = page.locator(f"#total-step[data-value='{samples[index]['step']}']")
        step.wait_for()
        free = page.locator("li[data-rank='1'] [data-state='free']")
        assert free.get_attribute("data-value") == str(
            samples[index]["ranks"][1]["pages"][0]["free"]
        )
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    page.locator("#total-step[data-value='1']").wait_for()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"html[data-number='{len(samples) - 1}']", state="attached")


def test_blocks_of_the_hosts_memory_have_a_legend_and_details(
    recording_of: RecordingOf, open_page: OpenPage
) -> None:
    recording = recording_of("host")
    contents = [content_of(recording, number)["frame"] for number in range(len(recording.frames))]
    kinds = [kinds_of(frame, 0, 2) for frame in contents]
    number = next(i for i, own in enumerate(kinds) if "leaving" in own)
    page = open_page(recording.url)
    go_to(page, number)
    assert page.locator("#host-legend li").all_inner_texts() == [
        "Blocks in host memory:",
        "free",
        "arriving: a transfer writes it",
        "cached: reusable until evicted",
        "leaving: cached, and a transfer reads it",
        "reserved: never given out",
    ]
    page.locator("#pool").select_option("host full")
    page.mouse.move(0, 0)
    block = kinds[number].index("leaving")
    canvas = page.locator("#maps canvas").first
    canvas.focus()
    page.keyboard.press("Home")
    for _ in range(block):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    details = page.locator("#page-details")
    details.get_by_text("1 lock").wait_for()
    assert details.inner_text().startswith(f"Rank 0, host full: block {block}, leaving")
    details.get_by_text("take, transfer").first.wait_for()
    assert details.get_by_role("button").all_inner_texts() == ["Unpin"]
