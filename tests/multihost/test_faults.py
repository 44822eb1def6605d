"""Every process of every host is killed or stopped, or its network cut, in each phase.

No client waits without an answer, nothing lives on beyond 30 seconds, exit codes are right.
"""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from sgl_jax.core.errors import FAILED, GROUP_REFUSED, HOST_LOST
from tests.fault_kit.faults import is_gone
from tests.multihost.live_group import Host, end, generate, live_group
from tests.multihost.machines import Machines, can_cut, machines
from tests.support.long import long_but
from tests.support.waiting import until

LIMIT_S = 30.0
CLIENT_S = 45.0  # of a client, more than any fault may take
# A log line by which a phase has begun; "serving" and "draining" begin when all are ready.
PHASES = {"meeting": "engine starts", "loading": "loading:", "compiling": "compiling_loops:"}
# A host waits so long for one that was lost before the hosts have met.
GROUP_FLAGS = ("--dp-size", "2", "--dist-timeout", "15")
NUM_CLIENTS = 16  # more than run at once, so that a drain takes a while


CUT = "cut"


class Fault(NamedTuple):
    """A signal to a process of a host, its front or its engine; or a cut of the host's network."""

    kind: str
    rank: int
    process: str
    phase: str

    def strike(self, host: Host, network: Machines | None) -> None:
        if self.kind == CUT:
            assert network is not None
            network.cut(self.rank)
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # a drain may have ended
            victim = host.engine if self.process == "engine" else host.front
            victim.send_signal(signal.Signals[self.kind])


def all_faults() -> list[Fault]:
    kinds = ("SIGKILL", "SIGSTOP")
    phases = (*PHASES, "serving", "draining")
    signals = [
        Fault(kind, rank, process, phase)
        for phase in phases
        for kind in kinds
        for rank in (0, 1)
        for process in ("engine", "front")
        # A front that is stopped answers nobody; its supervisor's probe finds it.
        if not (kind == "SIGSTOP" and process == "front")
    ]
    # Host 0's network is its clients', too: without it, none can have an answer.
    return signals + [Fault(CUT, 1, "network", phase) for phase in phases]


QUICK = Fault("SIGKILL", 1, "engine", "loading")


def name_of(fault: Fault) -> str:
    return f"{fault.kind} {fault.process} {fault.rank} {fault.phase}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", long_but(all_faults(), QUICK), ids=name_of)
def test_every_fault_ends_the_group(fault: Fault, tmp_path: Path) -> None:
    inject(fault, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_random_faults_end_the_group(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    inject(chance.choice(all_faults()), tmp_path, delay_s=chance.uniform(0, 3))


def inject(fault: Fault, folder: Path, delay_s: float = 0.2) -> None:
    if fault.kind == CUT and not can_cut():
        pytest.skip("only root may make networks")
    is_serving = fault.phase not in PHASES
    with (
        machines(2) if fault.kind == CUT else contextlib.nullcontext() as network,
        live_group(folder, 2, *GROUP_FLAGS, waits=is_serving, network=network) as hosts,
    ):
        if not is_serving:
            until_logged(hosts[fault.rank], PHASES[fault.phase])
        else:
            generate(hosts[0].url, [[5, 6, 7]])  # compiled from now on
        with clients(hosts[0].url, NUM_CLIENTS if is_serving else 0) as answers:
            if fault.phase == "draining":
                hosts[0].process.send_signal(signal.SIGTERM)
            time.sleep(delay_s)
            processes = family(hosts)
            fault.strike(hosts[fault.rank], network)
            begin_s = time.monotonic()
            codes = [host.wait(LIMIT_S + 10) for host in hosts]
            assert time.monotonic() - begin_s < LIMIT_S
        assert len(answers) == (NUM_CLIENTS if is_serving else 0)
        assert all(answer == 200 or answer >= 500 for answer in answers), answers
        own, other = codes[fault.rank], codes[1 - fault.rank]
        killed_front = fault.kind == "SIGKILL" and fault.process == "front"
        # A host that met nobody yet is refused by the end of the meeting; a drain may have ended.
        expected = {FAILED, GROUP_REFUSED, HOST_LOST} | (
            {0} if fault.phase == "draining" else set()
        )
        assert own in expected | ({-signal.SIGKILL} if killed_front else set()), codes
        assert other in expected - ({FAILED} if fault.phase == "serving" else set()), codes
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and not all(map(is_gone, processes)):
            time.sleep(0.1)
        assert [each for each in processes if not is_gone(each)] == []


def family(hosts: list[Host]) -> list[psutil.Process]:
    """All processes of all hosts."""
    found = []
    for host in hosts:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [host.front, *host.front.children(recursive=True)]
    return found


@contextlib.contextmanager
def clients(url: str, count: int) -> Iterator[list[int]]:
    """Clients of long requests; the list gets the status of each answer, 599 for a lost connection.

    All have theirs when the context ends.
    """
    answers: list[int] = []

    def ask(number: int) -> None:
        body = {
            "input_ids": [5 + number, 6, 7],
            "sampling_params": {"max_new_tokens": 90, "ignore_eos": True},
        }
        try:
            answers.append(httpx.post(url + "/generate", json=body, timeout=CLIENT_S).status_code)
        except httpx.TimeoutException:
            answers.append(0)
        except httpx.TransportError:
            answers.append(599)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(CLIENT_S)


def num_running(url: str) -> int:
    info = httpx.get(url + "/get_server_info", timeout=30).json()
    return sum(rank["num_running"] for rank in info["ranks"])


def until_logged(host: Host, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in host.output:
        assert host.process.poll() is None, host.output
        assert time.monotonic() < deadline, host.output
        time.sleep(0.05)


def test_a_host_with_other_settings_is_refused(tmp_path: Path) -> None:
    """The group ends with a code of its own, and both logs have the difference."""
    flags = ("--dp-size", "2", "--dist-timeout", "60")
    other = ("--page-size", "8")
    with live_group(tmp_path, 2, *flags, waits=False, last_flags=other) as hosts:
        assert [host.wait(120) for host in hosts] == [GROUP_REFUSED] * 2
        for host in hosts:
            assert "--page-size is '8' there and '4' on host 0" in host.output


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_host_ends_all_after_the_running_requests(
    rank: int, tmp_path: Path
) -> None:
    with live_group(tmp_path, 2, *GROUP_FLAGS) as hosts:
        generate(hosts[0].url, [[5, 6, 7]])
        with clients(hosts[0].url, 4) as answers:
            until(lambda: len(answers) + num_running(hosts[0].url) == 4, "all four run")
            assert end(hosts, rank) == [0, 0]
        assert answers == [200] * 4
