"""A server that takes 512 connections and prompts of half a million tokens, so that what is merely
long is worked on, not refused at once."""

from collections.abc import Iterator

import pytest

from tests.hostile.attacks import CHAT, chat
from tests.hostile.hostile_server import HostileServer, hostile_server
from tests.support.tokenizers import byte_level, save

MAX_CONNECTIONS = 512
FLAGS = ("--context-length", "524288", "--max-connections", str(MAX_CONNECTIONS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileServer]:
    folder = tmp_path_factory.mktemp("hostile")
    with hostile_server(folder, save(byte_level(), folder / "model"), *FLAGS) as server:
        assert server.post(CHAT, chat("hello" * 1000))[0] == 200  # its workers have started
        yield server
        assert server.post(CHAT, chat("hello"))[0] == 200
        assert "Traceback" not in server.log.read_text()
