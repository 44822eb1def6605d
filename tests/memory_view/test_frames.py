"""Differences add up to the key frame; counters become rates and marks."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core.messages import ReadMemory
from sgl_jax.memory_view.frames import FrameBuilder, runs
from sgl_jax.memory_view.reader import MemoryReader
from tests.memory_view.test_reader import DRIVERS, snapshots
from tests.scheduler.driver import Driver, generate, make_sizes

CODES = st.lists(st.sampled_from([-3, -2, -1, 0, 1, 2]), max_size=40)


@given(CODES, st.data())
def test_runs_cover_the_listed_pages_once_and_are_as_long_as_can_be(
    codes: list[int], data: st.DataObject
) -> None:
    is_listed = [data.draw(st.booleans()) for _ in codes]
    found = runs(np.array(codes, np.int32), np.array(is_listed, bool))
    pages = [(page, code) for first, count, code in found for page in range(first, first + count)]
    assert pages == [(i, code) for i, code in enumerate(codes) if is_listed[i]]
    for (first, count, code), (following, _, next_code) in pairwise(found):
        assert first + count < following or code != next_code


def test_differences_add_up_to_the_key_frame() -> None:
    for name, make in DRIVERS.items():
        frames = FrameBuilder()
        held: dict[tuple[int, int], np.ndarray] = {}
        for number, snapshot in enumerate(snapshots(make())):
            frame = frames.add(snapshot, number / 10)
            assert (frame["number"], frame["is_key"]) == (number, number == 0)
            key = frames.key_frame()
            assert key["is_key"]
            for rank, key_rank in zip(frame["ranks"], key["ranks"], strict=True):
                for pool, facts in enumerate(rank["pools"]):
                    place = rank["dp_rank"], pool
                    pages = held.setdefault(place, np.full(facts["num_pages"], 99))
                    for first, count, code in facts["runs"]:
                        pages[first : first + count] = code
                    whole = [
                        code
                        for _, count, code in key_rank["pools"][pool]["runs"]
                        for _ in range(count)
                    ]
                    assert pages.tolist() == whole, name
                    assert 99 not in whole
                    assert len(whole) == facts["pages"]["total"]
                    states = [n for n in facts["pages"] if n != "total"]
                    assert sum(facts["pages"][n] for n in states) == facts["pages"]["total"]


def test_rates_are_over_a_second_and_marks_since_the_frame_before() -> None:
    driver = Driver(make_sizes(num_pages=16))
    reader, frames = MemoryReader(driver.scheduler), FrameBuilder()
    frames.add(reader.read(ReadMemory()), 10.0)
    for i in range(3):
        driver.submit(generate(f"r{i}", [i] * 8, 40))
    while not any(rank.num_retracted for rank in driver.scheduler.ranks):
        driver.step()
    soon = frames.add(reader.read(ReadMemory()), 10.5)
    assert soon["tokens_per_s"] == 0.0
    retracts = sum(rank.num_retracted for rank in driver.scheduler.ranks)
    assert {"dp_rank": 0, "kind": "retract", "count": retracts} in soon["marks"]
    later = frames.add(reader.read(ReadMemory()), 12.0)
    assert later["tokens_per_s"] == driver.scheduler.counters()["generated_tokens"] / 2
    assert later["marks"] == []
    for lease in later["ranks"][0]["leases"]:
        assert lease["tokens_per_s"] == lease["num_output"] / 2
    sample = frames.sample()
    assert sample["ranks"][0]["pages"][0] == later["ranks"][0]["pools"][0]["pages"]
    assert (sample["time_s"], sample["num_running"]) == (12.0, later["num_running"])


def test_text_is_shown_only_if_it_can_be_decoded() -> None:
    driver = Driver(make_sizes(num_pages=40))
    driver.submit(generate("r", [1] * 20, 30))
    for _ in range(8):
        driver.step()
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory(has_tree=True, has_tokens=True))
    for decode, expected in ((None, None), (lambda ids: f"{len(ids)} ids", "20 ids")):
        frames = FrameBuilder(decode)
        (lease,) = frames.add(snapshot, 0.0)["ranks"][0]["leases"]
        assert ("text" in lease) == (decode is not None)
        nodes = frames.tree(snapshot)["ranks"][0]["nodes"]
        assert "tokens" not in lease
        assert not any("tokens" in node for node in nodes)
        assert expected is None or nodes[0]["text"] == expected


def test_a_sample_has_the_marks_of_all_frames_since_the_sample_before() -> None:
    driver = Driver(make_sizes(num_pages=16))
    counts = {"compiles_after_ready": 1, "compiles_in_background": 2}
    reader, frames = MemoryReader(driver.scheduler, lambda: counts), FrameBuilder()
    for i in range(4):
        driver.submit(generate(f"r{i}", [i] * 8, 40))
    sampled: Counter[tuple[int | None, str]] = Counter()
    for number in range(80):
        driver.step()
        counts["compiles_after_ready"] += number % 7 == 0
        frames.add(reader.read(ReadMemory()), number / 10)
        if number % 9 == 0 or number == 79:
            marks = frames.sample()["marks"]
            assert len({(mark["dp_rank"], mark["kind"]) for mark in marks}) == len(marks)
            sampled.update({(mark["dp_rank"], mark["kind"]): mark["count"] for mark in marks})
    assert sampled[0, "retract"] == driver.scheduler.ranks[0].num_retracted >= 2
    assert sampled[None, "compilation"] == 11


def test_output_from_before_a_retract_is_no_rate() -> None:
    driver = Driver(make_sizes(num_pages=16))
    reader, frames = MemoryReader(driver.scheduler), FrameBuilder()
    for i in range(3):
        driver.submit(generate(f"r{i}", [i] * 8, 40))
    num_resumed = 0
    for number in range(150):
        driver.step()
        frame = frames.add(reader.read(ReadMemory()), float(number))
        leases = frame["ranks"][0]["leases"]
        num_resumed += sum(lease["num_retractions"] for lease in leases)
        assert all(0.0 <= lease["tokens_per_s"] <= 2.0 for lease in leases)
    assert num_resumed > 5
