"""The soak, for as many minutes as SGL_JAX_SOAK_MINUTES says, and what it notices."""

import os
from pathlib import Path

import psutil
import pytest

from tests.live.live_server import live_server
from tests.soak import conversations, faults
from tests.soak.conversations import Conversations
from tests.soak.faults import Faults
from tests.soak.load import Clients
from tests.soak.resident_memory import ResidentMemory, Sample, is_growing
from tests.soak.soak import FLAGS, Soak

MIB = 1 << 20
MINUTES = float(os.environ.get("SGL_JAX_SOAK_MINUTES", "2"))


def assert_all_well(soak: Soak) -> None:
    summary = soak.conclude()
    print(summary)
    assert not soak.failures, summary


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_mixed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    with live_server(tmp_path, *FLAGS) as server:
        soak = Soak(server, Clients(server.url), MINUTES, seed=0)
        soak.run()
    assert_all_well(soak)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_random_faults_change_no_answer(tmp_path: Path) -> None:
    with live_server(tmp_path, *FLAGS, *faults.FLAGS) as server:
        clients = Clients(server.url, may_refuse=True)
        soak = Soak(server, clients, MINUTES, seed=0, faults=Faults(server))
        soak.run()
    assert_all_well(soak)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_thousand_sessions_with_faults_are_all_right(tmp_path: Path) -> None:
    with live_server(tmp_path, *conversations.FLAGS, *faults.FLAGS) as server:
        soak = Soak(
            server,
            Conversations(server.url, 1000),
            MINUTES,
            seed=0,
            faults=Faults(server),
            keeps_sessions=True,
        )
        soak.run()
    assert_all_well(soak)


def grown(bytes_per_sample: int) -> tuple[int, int]:
    memory = ResidentMemory(psutil.Process().pid)
    memory.samples = [
        Sample(float(i), {"server": 300 * MIB + i * bytes_per_sample}) for i in range(60)
    ]
    return memory.growth()["server"]


def test_growth_is_noticed_and_noise_is_not() -> None:
    assert is_growing(*grown(MIB))
    assert not is_growing(*grown(0))
    assert not is_growing(*grown(MIB // 10))


def test_the_warm_up_does_not_count_as_growth() -> None:
    memory = ResidentMemory(psutil.Process().pid)
    memory.samples = [Sample(float(i), {"server": min(i, 15) * 20 * MIB}) for i in range(60)]
    assert not is_growing(*memory.growth()["server"])
