"""The recording of `eventful_driver`, as bytes and as a file."""

from pathlib import Path

import pytest

from tests.replay.eventful_driver import eventful_driver


@pytest.fixture(scope="session")
def recording() -> bytes:
    return eventful_driver().recording.getvalue()


@pytest.fixture
def path(tmp_path: Path, recording: bytes) -> Path:
    path = tmp_path / "run.events"
    path.write_bytes(recording)
    return path
