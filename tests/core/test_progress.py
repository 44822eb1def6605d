"""Phases of long work: counted, logged at most each second, and the last one reported."""

import logging

import pytest

from sgl_jax.core.progress import Phase, Progress


def test_the_phase_that_began_last_is_reported_until_it_ends() -> None:
    progress = Progress()
    assert progress.report is None
    with progress.phase("compiling_in_background", 4, "programs") as programs:
        programs.advance()
        with progress.phase("loading", 100, "bytes") as loading:
            loading.advance(30)
            report = progress.report
            assert report is not None
            assert (report.phase, report.done, report.total) == ("loading", 30, 100)
        report = progress.report
        assert report is not None
        assert (report.phase, report.done, report.unit) == (
            "compiling_in_background",
            1,
            "programs",
        )
    assert progress.report is None


def test_no_more_than_the_total_is_done() -> None:
    with Progress().phase("loading", 10, "bytes") as phase:
        phase.advance(7)
        phase.advance(7)
        assert phase.report.done == 10


def test_a_phase_that_fails_is_over() -> None:
    progress = Progress()
    with pytest.raises(ValueError, match="unreadable"), progress.phase("loading", 10, "bytes"):
        raise ValueError("unreadable")
    assert progress.report is None


def test_each_tenth_is_logged_but_at_most_a_line_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    phase = Phase("loading", 2000, "bytes", lambda: now_s)
    for step in range(20):
        now_s = 0.5 * step  # half a second and 5 %
        phase.advance(100)
    now_s = 10.5
    phase.log_end()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == [
        "loading: 2,000 bytes",
        "loading: 15 % of 2,000 bytes after 1.0 s",
        "loading: 25 % of 2,000 bytes after 2.0 s",
    ]
    assert lines[-1] == "loading: ended after 10.5 s"
    assert len(lines) == 2 + 9
