"""No request freezes the server, fills its memory, or makes it answer with a defect.

Each attack runs against a server that takes 512 connections and prompts of half a million tokens,
so that what is merely long is worked on, not refused at once.
"""

from collections.abc import Iterator

import pytest

from tests.hostile.attacks import CHAT, LONG, NAMED, QUICK, Attack, chat
from tests.hostile.hostile_server import HostileServer, assert_unharmed, hostile_server
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


def name_of(attack: Attack) -> str:
    return attack.name


def resist(server: HostileServer, attack: Attack) -> None:
    def run() -> None:
        assert set(attack.run(server)) <= set(attack.allowed)

    assert_unharmed(server, attack.name, run)


@pytest.mark.parametrize("attack", NAMED, ids=name_of)
def test_what_froze_it_does_so_no_more(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)


@pytest.mark.parametrize("attack", QUICK, ids=name_of)
def test_what_is_no_request_harms_no_one(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)


@pytest.mark.long
@pytest.mark.parametrize("attack", LONG, ids=name_of)
def test_what_is_merely_long_harms_no_one(server: HostileServer, attack: Attack) -> None:
    resist(server, attack)
