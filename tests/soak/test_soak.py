"""The soak, for as many minutes as SGL_JAX_SOAK_MINUTES says, and what it notices."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from tests.live.live_server import live_server
from tests.soak import conversations, faults, rollouts
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


@pytest.mark.long
@pytest.mark.timeout(0)
def test_rollouts_are_of_the_weights_that_they_name(tmp_path: Path) -> None:
    with live_server(tmp_path, *rollouts.FLAGS, is_quickly_compiled=True) as server:
        # Sixty updates, if the machine is fast enough.
        load = rollouts.Rollouts(server.url, update_every_s=MINUTES, folder=tmp_path)
        soak = Soak(server, load, MINUTES, seed=0)
        soak.run()
    assert_all_well(soak)


@pytest.mark.anyio
async def test_tokens_of_other_weights_than_named_are_noticed(tmp_path: Path) -> None:
    load = rollouts.Rollouts("http://127.0.0.1:1", update_every_s=1, folder=tmp_path)

    def answer(*versions: tuple[int, str], **meta: bool) -> Any:
        entries = [[-0.5, 7, None], [-1.5, 8, None]]
        ends = [*(start for start, _ in versions[1:]), 2]
        facts = {
            "finish_reason": {"type": "length"},
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (start, version), end in zip(versions, ends, strict=True)
            ],
            "weight_version": versions[-1][1],
            "output_token_logprobs": entries,
        }
        return {"output_ids": [7, 8], "meta_info": facts | meta}

    load._check([5], answer((0, "4:2"), (1, "5:0")), random.Random(0))
    for wrong in (answer((0, "5:0"), (1, "4:2")), answer((0, "5:0"), (2, "6:1"))):
        with pytest.raises(AssertionError):
            load._check([5], wrong, random.Random(0))
    with pytest.raises(AssertionError, match="old KV without keep_cache"):
        load._check([5], answer((0, "4:2"), (1, "5:0"), has_old_kv=True), random.Random(0))

    async def score(span: rollouts.Span) -> tuple[list[float], str]:
        assert span == ([5, 7], [8], [-1.5])  # of policy 0, which is served
        return [-1.4], "0:0"

    with (
        patch.object(load, "_scored", score),
        pytest.raises(AssertionError, match=r"has -1\.4, not -1\.5"),
    ):
        await load.score(random.Random(0))
    async with load:
        pass


def grown(bytes_per_sample: int) -> tuple[int, int]:
    memory = ResidentMemory(psutil.Process().pid)
    # This process may have children: servers that tests share.
    memory.sample(0.0)
    names = list(memory.mib)
    memory.samples = [
        Sample(float(i), dict.fromkeys(names, 300 * MIB + i * bytes_per_sample)) for i in range(60)
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


@dataclass
class OneStream:
    """A server of one event; `segment_bytes` are those of its connections."""

    url: str = ""
    segment_bytes: list[int] = field(default_factory=list)


@asynccontextmanager
async def one_stream(*, ends: bool) -> AsyncIterator[OneStream]:
    """Streams an event to each client that connects, and then ends or stands still."""
    stream = OneStream()
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        connection = writer.get_extra_info("socket")
        stream.segment_bytes.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"n": 1}\n\n')
        if not ends:
            await gone.wait()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    stream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stream
    finally:
        gone.set()
        server.close()


async def slowly_read(stream: OneStream) -> list[bytes]:
    return await faults.read_slowly(stream.url, random.Random(0), {"a": 1})


@pytest.mark.anyio
async def test_a_slow_reader_has_room_for_segments() -> None:
    """Without, its kernel announces none after a read, and a stream takes minutes."""
    async with one_stream(ends=True) as stream:
        assert await slowly_read(stream) == [b'{"n": 1}']
        assert 8 * stream.segment_bytes[0] <= faults.SLOW_RECEIVE_BYTES


@pytest.mark.anyio
async def test_a_stream_that_stands_still_is_noticed() -> None:
    async with one_stream(ends=False) as stream:
        with (
            patch.object(faults, "LONGEST_STILL_S", 0.2),
            pytest.raises(AssertionError, match=r"nothing in 0.2 s after 35 bytes, 1 events"),
        ):
            await slowly_read(stream)
