"""The server that several files share: one start for all of them."""

from collections.abc import Iterator

import pytest

from tests.live.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a user's settings, but for a ledger that is proved in every step."""
    with live_server(tmp_path_factory.mktemp("demo"), "--check-memory", "busy") as server:
        yield server
