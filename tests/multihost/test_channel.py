"""The hosts' channel: commands in order, losses found, strangers refused."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from sgl_jax.core.array_codec import make_encoder
from sgl_jax.core.errors import GroupError
from sgl_jax.core.progress import Progress
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.multihost.channel import COMMANDS
from sgl_jax.multihost.commands import CallExecutor, End, Hello, Launch
from sgl_jax.multihost.coordinator_link import CoordinatorLink
from sgl_jax.multihost.group import MultihostGroup
from sgl_jax.multihost.worker_link import WorkerLink
from tests.multihost.live_group import two_free_ports
from tests.multihost.plans import decode_plan
from tests.support.waiting import until

SECRET = "a secret of sixteen or more"
FACTS = {"jax": "1", "--dp-size": "2"}
TIMEOUT_S = 3.0
MIB = 1 << 20


class Links:
    """Host 0's link and the others', and the losses that they found."""

    def __init__(self, num_hosts: int) -> None:
        self.port = two_free_ports()
        self.num_hosts = num_hosts
        self.lost: queue.Queue[str] = queue.Queue()
        self.workers: list[WorkerLink] = []
        self.coordinator = CoordinatorLink(self.group(0), SECRET, TIMEOUT_S)
        self.coordinator.on_lost = self.lost.put

    def group(self, rank: int) -> MultihostGroup:
        return MultihostGroup(self.num_hosts, rank, "127.0.0.1", self.port)

    def worker(self, rank: int, secret: str = SECRET) -> WorkerLink:
        link = WorkerLink(self.group(rank), secret, TIMEOUT_S, Progress())
        link.on_lost = self.lost.put
        self.workers.append(link)
        return link

    def meet(self) -> list[WorkerLink]:
        """All hosts, met."""
        others = [self.worker(rank) for rank in range(1, self.num_hosts)]
        threads = [threading.Thread(target=link.meet, args=(FACTS, 10.0)) for link in others]
        for thread in threads:
            thread.start()
        self.coordinator.meet(FACTS, 10.0)
        for thread in threads:
            thread.join()
        return others

    def close(self) -> None:
        for link in self.workers:
            link.end()
        threads = [threading.Thread(target=link.close) for link in self.workers]
        for thread in threads:
            thread.start()
        self.coordinator.close()
        for thread in threads:
            thread.join()


@pytest.fixture
def links_of() -> Iterator[Callable[[int], Links]]:
    made: list[Links] = []

    def make(num_hosts: int) -> Links:
        made.append(Links(num_hosts))
        return made[-1]

    yield make
    for links in made:
        links.close()


def obey(link: WorkerLink) -> list[Any]:
    """Commands up to `End`, as a host that ends well receives them."""
    received: list[Any] = []
    while not received or not isinstance(received[-1], End):
        command = link.receive(0.05)
        if command is not None:
            received.append(command)
    link.end()
    return received


def test_commands_arrive_in_order_and_equal(links_of: Callable[[int], Links]) -> None:
    links = links_of(3)
    others = links.meet()
    received: list[list[Any]] = []
    threads = [
        threading.Thread(target=lambda link=link: received.append(obey(link))) for link in others
    ]
    for thread in threads:
        thread.start()
    plans = [decode_plan(dp_size=2, num_rows=3, step_id=step) for step in range(20)]
    for plan in plans:
        links.coordinator.send(Launch(plan))
    links.coordinator.send(CallExecutor("reset"))
    links.coordinator.close()
    for thread in threads:
        thread.join()
    for commands in received:
        assert [type(command) for command in commands] == [Launch] * 20 + [CallExecutor, End]
        for command, plan in zip(commands, plans, strict=False):
            assert_equal_plans(command.plan, plan)
    assert links.lost.empty()


def assert_equal_plans(one: StepPlan, other: StepPlan) -> None:
    assert one.step_id == other.step_id
    for own, its in zip(one.page_changes, other.page_changes, strict=True):
        assert own.dtype == its.dtype  # type: ignore[attr-defined]
        np.testing.assert_array_equal(own, its)
    for rank, its_rank in zip(one.ranks, other.ranks, strict=True):
        for own, its in zip(rank, its_rank, strict=True):
            np.testing.assert_array_equal(own, its)


def test_figures_and_the_wish_to_leave_reach_host_0(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    (other,) = links.meet()
    left: list[int] = []
    links.coordinator.on_leaving = left.append
    other.figures = other.figures.plus(num_steps=7, launch_s=0.5)
    other.leave()
    until(lambda: left == [1], "host 0 hears of it")
    until(lambda: links.coordinator.reports()[0].figures.num_steps == 7, "figures come with a beat")


def test_a_silent_host_is_lost(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    (other,) = links.meet()
    other.close()
    assert "host 1 was silent for 3 s" in links.lost.get(timeout=10)


def test_host_0_that_ends_without_a_word_is_lost(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    links.meet()
    links.coordinator._stopped.set()  # no beats any more
    assert links.lost.get(timeout=10) == "host 0 was silent for 3 s"


def test_a_failed_host_ends_all_with_its_reason(links_of: Callable[[int], Links]) -> None:
    links = links_of(3)
    first, _ = links.meet()
    first.fail("no room for the weights")
    reasons = {links.lost.get(timeout=10) for _ in range(3)}
    assert reasons == {"the group of hosts ends: host 1 failed: no room for the weights"}


def test_a_lost_command_is_found(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    (other,) = links.meet()
    links.coordinator._num_commands += 1  # as if the network had dropped it
    with pytest.raises(GroupError, match="commands of host 0 were lost"):  # noqa: PT012
        for _ in range(200):
            other.receive(0.05)


def test_a_host_with_other_facts_is_refused_with_the_difference(
    links_of: Callable[[int], Links],
) -> None:
    links = links_of(2)
    other = links.worker(1)
    words = "host 1: --dp-size is '4' there and '2' on host 0"
    errors: list[str] = []

    def meet() -> None:
        with pytest.raises(GroupError, match=words) as caught:
            other.meet(FACTS | {"--dp-size": "4"}, 10.0)
        errors.append(str(caught.value))

    thread = threading.Thread(target=meet)
    thread.start()
    with pytest.raises(GroupError, match=words):
        links.coordinator.meet(FACTS, 10.0)
    assert links.coordinator._socket.closed  # after the other host was told
    thread.join()
    assert len(errors) == 1


def test_hosts_that_do_not_come_are_named(links_of: Callable[[int], Links]) -> None:
    links = links_of(3)
    with pytest.raises(GroupError, match=r"after 0.3 s the hosts \[1, 2\] have not come"):
        links.coordinator.meet(FACTS, 0.3)


def test_a_host_with_another_key_gets_no_answer(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    stranger = links.worker(1, secret="another secret of that length")
    refused = threading.Thread(target=links.coordinator.meet, args=(FACTS, 20.0))
    refused.start()
    with pytest.raises(GroupError, match="has another key"):
        stranger.meet(FACTS, 1.0)
    # Host 0 still waits for the right one.
    right = links.worker(1)
    right.meet(FACTS, 10.0)
    refused.join()


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_peer_without_curve_is_refused(mechanism: str, links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if mechanism == "plain":
            stranger.setsockopt(zmq.PLAIN_USERNAME, b"host")
            stranger.setsockopt(zmq.PLAIN_PASSWORD, b"1")
        stranger.connect(f"tcp://127.0.0.1:{links.port}")
        stranger.send(b"\1" + COMMANDS)
        stranger.send(make_encoder().encode(Hello(1, FACTS)))
        assert not stranger.poll(500)
        links.meet()
        assert not stranger.poll(100), "it hears the welcome of others"


def test_two_hosts_of_one_rank_are_refused(links_of: Callable[[int], Links]) -> None:
    links = links_of(3)
    meetings = [
        threading.Thread(target=refused, args=(links.worker(1), "two hosts have --node-rank 1"))
        for _ in range(2)
    ]
    for meeting in meetings:
        meeting.start()
    with pytest.raises(GroupError, match="two hosts have --node-rank 1"):
        links.coordinator.meet(FACTS, 10.0)
    for meeting in meetings:
        meeting.join()


def refused(link: WorkerLink, reason: str) -> None:
    with pytest.raises(GroupError, match=reason):
        link.meet(FACTS, 10.0)


def test_a_host_that_comes_late_ends_the_group(links_of: Callable[[int], Links]) -> None:
    """A host that was started again has none of the steps before."""
    links = links_of(2)
    links.meet()
    late = links.worker(1)
    with pytest.raises(GroupError, match="did not reply"):
        late.meet(FACTS, 1.0)
    assert "host 1 was started again" in links.lost.get(timeout=5.0)


def test_garbage_without_end_takes_no_memory(links_of: Callable[[int], Links]) -> None:
    links = links_of(2)
    before = psutil.Process(os.getpid()).memory_info().rss
    block = os.urandom(MIB)
    sent = 0
    while sent < 1024:  # MiB over all connections; each is closed by host 0 after some bytes
        with socket.create_connection(("127.0.0.1", links.port)) as stranger:
            stranger.settimeout(0.2)
            try:
                for _ in range(64):
                    stranger.sendall(block)
                    sent += 1
            except OSError:
                sent += 64
    assert psutil.Process(os.getpid()).memory_info().rss - before < 64 * MIB
    links.meet()


def test_a_handshake_cannot_be_replayed(links_of: Callable[[int], Links]) -> None:
    """The bytes of a host that was accepted, sent again to a host 0 with the same key."""
    first, second = links_of(2), links_of(2)
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        thread = threading.Thread(target=record, args=(relay, first.port, recorded), daemon=True)
        thread.start()
        group = MultihostGroup(2, 1, "127.0.0.1", relay.getsockname()[1])
        other = WorkerLink(group, SECRET, TIMEOUT_S, Progress())
        other.on_lost = first.lost.put
        first.workers.append(other)
        meeting = threading.Thread(target=first.coordinator.meet, args=(FACTS, 10.0))
        meeting.start()
        other.meet(FACTS, 10.0)
        meeting.join()
        assert len(recorded) > 300  # greeting, hello, initiate and a message
        with socket.create_connection(("127.0.0.1", second.port)) as stranger:
            stranger.sendall(bytes(recorded))
            time.sleep(0.5)
            assert second.coordinator._received() == []


def record(relay: socket.socket, port: int, recorded: bytearray) -> None:
    """Pass two connections on to `port`, and keep the bytes that the first one sends."""
    for number in range(2):
        client, _ = relay.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for source, target, kept in (
            (client, server, recorded if number == 0 else bytearray()),
            (server, client, bytearray()),
        ):
            threading.Thread(target=copy, args=(source, target, kept), daemon=True).start()


def copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with source, contextlib.suppress(OSError):  # either end may close first
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
