"""Recordings: written as things happen, run again the same, and readable when something broke."""

import dataclasses
import errno
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.messages import (
    GenerateRequest,
)
from sgl_jax.replay.__main__ import main
from sgl_jax.replay.player import first_difference
from sgl_jax.scheduler.events import (
    OutputsTaken,
    Planned,
    Record,
    ResultRead,
    SessionReply,
)
from sgl_jax.scheduler.record.event_log import EventReader, EventWriter, RecordingError
from sgl_jax.scheduler.scheduler import Scheduler
from tests.scheduler.driver import Driver, generate, make_sizes


def changed(recording: bytes, change: Callable[[Record], Record | None]) -> bytes:
    """The recording with the first event that `change` has another version of."""
    reader, out = EventReader(io.BytesIO(recording)), io.BytesIO()
    writer = EventWriter(out)
    writer.write(reader.started)
    is_done = False
    for event in reader:
        other = None if is_done else change(event)
        is_done = is_done or other is not None
        writer.write(event if other is None else other)
    assert is_done
    return out.getvalue()


def test_an_eventful_run_is_decided_alike_again(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), "--check-memory", "busy"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("as recorded: ")
    for words in ("22 requests", "rank 0: 24 pages, 23 free", "rank 1: 24 pages", "0 running"):
        assert words in out
    assert " 0 retracts" not in out


def test_it_runs_as_a_program_and_without_jax(path: Path) -> None:
    code = (
        "import sys, sgl_jax.replay.__main__ as replay;"
        f"code = replay.main([{str(path)!r}]);"
        "assert not any(name.split('.')[0] in ('jax', 'jaxlib', 'flax') for name in sys.modules);"
        "sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    command = [sys.executable, "-m", "sgl_jax.replay", str(path), "--until", "9", "--verbose"]
    run = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert len(run.stdout.splitlines()) == 8 + 4
    assert "Planned step 0, rank 0: 0 decode, 1 prefill, 1 admitted, 8 tokens" in run.stdout


def other_page(event: Record) -> Record | None:
    if not isinstance(event, Planned) or event.plan is None or event.plan.step_id < 5:
        return None
    changes = event.plan.page_changes
    if not len(changes.pages):
        return None
    other = changes._replace(pages=changes.pages + 1)
    return Planned(dataclasses.replace(event.plan, page_changes=other))


def other_start(event: Record) -> Record | None:
    if not isinstance(event, Planned) or event.plan is None or event.plan.step_id < 5:
        return None
    first, *rest = event.plan.ranks
    first = first._replace(kv_starts=first.kv_starts + 1)
    return Planned(dataclasses.replace(event.plan, ranks=(first, *rest)))


def other_token(event: Record) -> Record | None:
    if not isinstance(event, OutputsTaken) or not event.outputs.tokens:
        return None
    outputs = event.outputs
    tokens = b"0" * 4 + outputs.tokens[4:]
    return OutputsTaken(type(outputs)(outputs.outputs, outputs.rid_lists, tokens))


def other_prompt(event: Record) -> Record | None:
    if not isinstance(event, GenerateRequest) or event.rid != "r5":
        return None
    return generate("r5", [7], 30)


def other_reply(event: Record) -> Record | None:
    if not isinstance(event, SessionReply) or "num_tokens" not in event.reply.data:
        return None
    data = event.reply.data | {"num_tokens": 1000}
    return SessionReply(type(event.reply)(rid=event.reply.rid, ok=True, data=data))


DIFFERENCES = {
    "page": (
        other_page,
        r"event \d+ \(Planned\), plan.page_changes.pages\[\d\]: recorded",
    ),
    "start": (other_start, r"plan.ranks\[0\].kv_starts\[0\]: recorded \d+, got \d+"),
    "token": (other_token, r"\(OutputsTaken\), outputs.tokens: recorded b'0000"),
    "prompt": (other_prompt, r"\(Planned\), plan.ranks\[\d\]"),
    "reply": (other_reply, r"\(SessionReply\), reply.data\['num_tokens'\]: recorded 1000, got"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_the_first_difference_is_named_and_is_exit_code_1(
    kind: str, recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = DIFFERENCES[kind]
    path = tmp_path / "other.events"
    path.write_bytes(changed(recording, change))
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "the scheduler does not do what was recorded" in out
    assert re.search(words, out), out


def test_a_run_cut_off_anywhere_is_read_up_to_its_last_event(recording: bytes) -> None:
    file = io.BytesIO(recording)
    ends = [file.tell() for _ in EventReader(file)]
    middle = ends[len(ends) // 2]
    for length in (len(recording) - 1, len(recording) - 100, middle - 1, middle, middle + 1):
        reader = EventReader(io.BytesIO(recording[:length]))
        assert sum(1 for _ in reader) == sum(end <= length for end in ends)
        assert reader.is_truncated == (length not in ends)


def test_a_cut_recording_replays_with_a_word_about_it(
    recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.events"
    path.write_bytes(recording[:-5])
    assert main([str(path)]) == 0
    assert "cut off" in capsys.readouterr().out


BAD_FILES = {
    "empty": b"",
    "text": b"this is not a recording at all\n",
    "only the beginning": EventWriter.__doc__.encode(),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_what_is_no_recording_is_exit_code_2(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(BAD_FILES[kind])
    assert main([str(path)]) == 2
    assert "this is no recording of scheduler events" in capsys.readouterr().err


def test_a_missing_file_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere/at/all"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_recording_of_other_structures_is_refused(recording: bytes) -> None:
    with pytest.raises(RecordingError, match="of another version"):
        EventReader(io.BytesIO(recording.replace(b"kv_starts", b"kv_begins", 1)))


@pytest.mark.parametrize("dtype", [b",i4", b"(,)", b"O8\x00", b"4<i"])
def test_an_array_of_a_damaged_dtype_is_named(
    dtype: bytes, recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.events"
    path.write_bytes(recording.replace(b"<i4", dtype))
    assert main([str(path)]) == 2
    assert "an array of an unknown dtype" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_never_ends_in_a_traceback(
    seed: int, recording: bytes, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    damaged = bytearray(recording)
    for index in rng.integers(0, len(damaged), 5).tolist():
        damaged[index] = int(rng.integers(256))
    path = tmp_path / "damaged.events"
    path.write_bytes(bytes(damaged))
    assert main([str(path)]) in (0, 1, 2)


def test_an_exception_is_recorded_and_is_no_difference_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Scheduler._apply_result

    def broken(self: Scheduler, event: ResultRead) -> None:
        if event.step_id == 9:
            raise RuntimeError("the tenth commit fails")
        real(self, event)

    driver = Driver(make_sizes())
    driver.submit(generate("a", [1, 2], 30))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_apply_result", broken)
        with pytest.raises(RuntimeError, match="tenth"):
            driver.run()
        path = driver.save_recording(tmp_path)
        assert main([str(path)]) == 0
        assert "1 errors" in capsys.readouterr().out
    assert main([str(path)]) == 1
    assert "RuntimeError: the tenth commit fails" in capsys.readouterr().out


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    class FullDisk(io.BytesIO):
        writes = 0

        def write(self, data: Any) -> int:
            if self.tell() > 3000:
                self.writes += 1
                raise OSError(errno.ENOSPC, "no space left")
            return super().write(data)

    disk = FullDisk()
    writer = EventWriter(disk)
    event = generate("a", [1] * 50, 3)
    for _ in range(100):
        writer.write(event)
    assert disk.writes == 1


def test_a_recording_ends_at_its_limit() -> None:
    file = io.BytesIO()
    writer = EventWriter(file, max_bytes=5000)
    for _ in range(100):
        writer.write(generate("a", [1] * 50, 3))
    assert 4000 < len(file.getvalue()) <= 5000


def test_page_tables_are_recorded_by_what_changed() -> None:
    """A long request decodes: a page is written once, not again in every step."""
    driver = Driver(make_sizes(page_size=1, num_pages=220))
    driver.submit(generate("a", list(range(100)), 100))
    driver.run()
    reader = EventReader(io.BytesIO(driver.recording.getvalue()))
    written = sum(
        len(event.plan.page_changes.pages)
        for event in reader
        if isinstance(event, Planned) and event.plan is not None
    )
    assert written < 250
    driver.check_replay()


def test_results_hold_what_the_device_said(recording: bytes) -> None:
    reader = EventReader(io.BytesIO(recording))
    commits = [event for event in reader if isinstance(event, ResultRead)]
    assert all(rank.tokens.dtype == np.int32 for event in commits for rank in event.results)
    assert any(rank.prompt_logprobs for event in commits for rank in event.results)


@pytest.mark.parametrize(
    ("recorded", "got", "words"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "x[1]: recorded 2, got 3"),
        ([1, 2], [1], "x: recorded 2 of them, got 1"),
        ({"a": (1,)}, {"a": (2,)}, "x['a'][0]: recorded 1, got 2"),
        (None, [1], "x: recorded None, got [1]"),
        (np.zeros((2, 2)), np.eye(2), "x[0][0]: recorded 0.0, got 1.0"),
        (np.zeros(2), np.zeros(3), "x: recorded shape (2,) [0., 0.], got shape (3,) [0., 0., 0.]"),
    ],
)
def test_a_difference_says_where(recorded: Any, got: Any, words: str | None) -> None:
    assert first_difference("x", recorded, got) == words
