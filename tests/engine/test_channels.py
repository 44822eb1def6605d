"""Messages cross the process border whole, in order, and without waiting."""

import asyncio
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import (
    AbortRequest,
    EngineMessage,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    RequestOutput,
    TokenLogprobs,
)
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine import channels
from sgl_jax.engine.channels import ChannelError, ZmqChannel, ZmqEngineClient

REQUEST = GenerateRequest(
    rid="a#1",
    input_ids=[1, 2, 3],
    sampling=SamplingParams(max_new_tokens=4, stop=("x",), logit_bias={7: 1.5}, seed=-(2**63)),
)
OUTPUT = OutputBatch(
    [
        RequestOutput(
            "a#1", [4], 2, 1, FinishReason(type="stop", matched=4), [TokenLogprobs(4, -1.0, [], [])]
        )
    ],
    ["b#2"],
    b"\t\0\0\0",
)


@pytest.fixture
def client() -> Iterator[ZmqEngineClient]:
    client = ZmqEngineClient()
    yield client
    client.close()


@pytest.fixture
def channel(client: ZmqEngineClient) -> Iterator[ZmqChannel]:
    channel = ZmqChannel(client.folder)
    yield channel
    channel.close()


def test_requests_arrive_in_order(client: ZmqEngineClient, channel: ZmqChannel) -> None:
    client.send(REQUEST)
    client.send(AbortRequest(rid="a#1"))
    received = channel.poll(5.0)
    while len(received) < 2:
        received += channel.poll(5.0)
    assert received == [REQUEST, AbortRequest(rid="a#1")]


def test_polling_an_empty_channel_does_not_wait(channel: ZmqChannel) -> None:
    start = time.perf_counter()
    for _ in range(100):
        assert channel.poll(0) == []
    assert time.perf_counter() - start < 1.0


async def gather_messages(client: ZmqEngineClient, channel: ZmqChannel) -> list[EngineMessage]:
    received: list[EngineMessage] = []
    errors: list[ChannelError] = []
    channel.send(OUTPUT)  # before anyone listens
    await asyncio.sleep(0.05)
    client.listen(received.append, errors.append)
    for _ in range(100):
        channel.send(OUTPUT)
    deadline = time.monotonic() + 10
    while len(received) < 101 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert errors == []
    return received


def test_outputs_arrive_even_if_sent_before_listening(
    client: ZmqEngineClient, channel: ZmqChannel
) -> None:
    assert asyncio.run(gather_messages(client, channel)) == [OUTPUT] * 101


@pytest.mark.timeout(20)  # on failure it would wait for ever, in C
def test_a_send_to_an_engine_that_is_gone_does_not_wait(client: ZmqEngineClient) -> None:
    client.send(REQUEST)  # before there is one
    channel = ZmqChannel(client.folder)
    assert channel.poll(5.0) == [REQUEST]
    channel.close()
    start = time.perf_counter()
    for _ in range(1000):
        client.send(REQUEST)
    assert time.perf_counter() - start < 1.0


def test_the_sockets_lie_in_a_private_folder_that_goes_away(client: ZmqEngineClient) -> None:
    assert stat.S_IMODE(os.stat(client.folder).st_mode) == 0o700
    client.close()
    assert not os.path.exists(client.folder)


def test_a_closed_connection_raises(client: ZmqEngineClient) -> None:
    client.close()
    with pytest.raises(EngineDeadError):
        client.send(REQUEST)


def test_a_message_too_large_is_refused_by_its_sender(
    client: ZmqEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 16)
    with pytest.raises(ChannelError, match="GenerateRequest of"):
        client.send(REQUEST)


@pytest.mark.parametrize("data", [b"\xc1", msgspec.msgpack.encode({"type": "Unheard"})])
def test_a_message_that_makes_no_sense_is_an_error(client: ZmqEngineClient, data: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.bind(f"ipc://{client.folder}/to_front.sock")
    assert stranger.poll(5000, zmq.POLLOUT)
    stranger.send(data)

    async def listen() -> list[ChannelError]:
        errors: list[ChannelError] = []
        client.listen(lambda message: None, errors.append)
        deadline = time.monotonic() + 5
        while not errors and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return errors

    try:
        (error,) = asyncio.run(listen())
    finally:
        context.destroy(linger=0)
    assert "undecodable" in str(error)


def test_a_folder_too_deep_for_a_socket_is_an_error_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path_factory.mktemp("d" * 90)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ChannelError, match="TMPDIR"):
        ZmqEngineClient()
    assert list(deep.iterdir()) == []


FRONT_WITHOUT_FILES = """
import asyncio, resource, subprocess, sys
from sgl_jax.engine.channels import ZmqEngineClient

ENGINE = '''
import sys
from sgl_jax.core.messages import Heartbeat
from sgl_jax.engine.channels import ZmqChannel
sys.stdin.readline()
print("there", flush=True)
channel = ZmqChannel(sys.argv[1])
channel.send(Heartbeat(turn_s=None))
channel.close()
'''

async def hear(client):
    heard = asyncio.Event()
    client.listen(lambda message: heard.set(), lambda error: None)
    command = [sys.executable, "-c", ENGINE, client.folder]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    engine.stdin.write("go on\\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "there\\n"
    await asyncio.sleep(1.0)  # in which sockets try to meet
    assert not heard.is_set()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await asyncio.wait_for(heard.wait(), 20)
    engine.communicate(timeout=20)

client = ZmqEngineClient()
asyncio.run(hear(client))
client.close()
"""


def test_an_engine_without_a_front_gives_up(
    client: ZmqEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_FRONT_TIMEOUT_S", 0.5)
    client._pull.close()
    with pytest.raises(ChannelError, match="the front has not connected"):
        ZmqChannel(client.folder)


def test_a_front_without_files_lives_on_and_hears_the_engine_later() -> None:
    command = [sys.executable, "-c", FRONT_WITHOUT_FILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
