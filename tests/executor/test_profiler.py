"""A trace that cannot be written is refused at once, and leaves nothing behind."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from sgl_jax.executor.profiler import Profiler


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What JAX was asked: a folder to start, None to stop."""
    asked: list[str | None] = []
    monkeypatch.setattr("jax.profiler.start_trace", asked.append)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: asked.append(None))
    return asked


def test_a_folder_that_cannot_be_is_refused_and_the_next_trace_runs(
    tmp_path: Path, traces: list[str | None]
) -> None:
    profiler = Profiler()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(OSError):  # noqa: PT011 (each has another errno)
            profiler.start(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(RuntimeError, match="no trace runs"):
        profiler.stop()
    profiler.start(tmp_path / "a" / "b")
    with pytest.raises(RuntimeError, match="runs already"):
        profiler.start(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    profiler.stop()
    assert traces == [str(tmp_path / "a" / "b"), None]


def test_a_start_that_fails_takes_its_folders_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str) -> None:
        raise RuntimeError("the device says no")

    monkeypatch.setattr("jax.profiler.start_trace", refuse)
    with pytest.raises(RuntimeError, match="says no"):
        Profiler().start(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_went_away_is_made_again(tmp_path: Path, traces: list[str | None]) -> None:
    profiler = Profiler()
    profiler.start(tmp_path / "trace")
    (tmp_path / "trace").rmdir()
    profiler.stop()
    assert (tmp_path / "trace").is_dir()


def test_a_trace_ends_after_as_many_steps_as_were_asked_for(
    tmp_path: Path, traces: list[str | None]
) -> None:
    profiler = Profiler()
    profiler.start(tmp_path / "a", num_steps=2)
    profiler.after_step()
    assert traces == [str(tmp_path / "a")]
    profiler.after_step()
    assert traces == [str(tmp_path / "a"), None]
    with pytest.raises(RuntimeError, match="no trace runs"):
        profiler.stop()
    profiler.start(tmp_path / "b")
    for _ in range(5):
        profiler.after_step()
    assert profiler.stop() == tmp_path / "b"


def test_a_trace_that_cannot_be_written_when_its_steps_have_ended_can_be_stopped_later(
    tmp_path: Path, traces: list[str | None]
) -> None:
    profiler, folder = Profiler(), tmp_path / "trace"
    profiler.start(folder, num_steps=1)
    folder.rmdir()
    folder.write_text("in the way")
    profiler.after_step()
    assert traces == [str(folder)]
    folder.unlink()
    assert profiler.stop() == folder


def test_a_trace_lies_where_tensorboard_looks_for_it(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(tmp_path, num_steps=1)
    jnp.ones(3).block_until_ready()
    profiler.after_step()
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
