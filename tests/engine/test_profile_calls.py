"""Device traces that clients ask for: their folders, and why one is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_jax.core.profile_messages import StartProfile, StopProfile
from sgl_jax.engine.loop.controls import Controls
from sgl_jax.executor.profiler import Profiler


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Controls:
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    executor = SimpleNamespace(profiler=Profiler(), compile_counts=dict)
    core: Any = SimpleNamespace(executor=executor, scheduler=None)
    return Controls(core, None)


def test_a_trace_without_a_folder_gets_one_and_its_end_names_it(
    core: Controls, tmp_path: Path
) -> None:
    started = core.start_profile(StartProfile(rid="a"))
    assert started.ok
    assert [str(path) for path in tmp_path.iterdir()] == [started.data["output_dir"]]
    assert core.stop_profile(StopProfile(rid="b")).data == started.data


def test_a_refused_trace_leaves_no_folder(core: Controls, tmp_path: Path) -> None:
    assert core.start_profile(StartProfile(rid="a", output_dir=str(tmp_path / "trace"))).ok
    refused = core.start_profile(StartProfile(rid="b"))
    assert (refused.ok, refused.data["code"]) == (False, "profile_refused")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("folder", ["a\0b", "/dev/null/trace"])
def test_a_folder_that_cannot_be_is_the_fields_fault(core: Controls, folder: str) -> None:
    refused = core.start_profile(StartProfile(rid="a", output_dir=folder))
    assert (refused.ok, refused.data["param"]) == (False, "output_dir")
    assert not core.stop_profile(StopProfile(rid="b")).ok
