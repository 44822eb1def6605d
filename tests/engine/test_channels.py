"""Messages cross the process border whole, in order, and without waiting."""

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from sgl_jax.core.engine_messages import (
    EngineMessage,
    FinishReason,
    OutputBatch,
    RequestOutput,
    TokenLogprobs,
)
from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import AbortRequest, FrontMessage, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine import channels
from sgl_jax.engine.channels import ChannelError, EngineClient, SocketChannel

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
    [["b#2"]],
    b"\t\0\0\0",
)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient()
    yield client
    client.close()


@pytest.fixture
def channel(client: EngineClient) -> Iterator[SocketChannel]:
    channel = SocketChannel(client.engine_end)
    yield channel
    channel.close()


def test_requests_arrive_in_order(client: EngineClient, channel: SocketChannel) -> None:
    client.send(REQUEST)
    client.send(AbortRequest(rid="a#1"))
    received = channel.poll(5.0)
    while len(received) < 2:
        received += channel.poll(5.0)
    assert received == [REQUEST, AbortRequest(rid="a#1")]


def test_polling_an_empty_channel_does_not_wait(channel: SocketChannel) -> None:
    start = time.perf_counter()
    for _ in range(100):
        assert channel.poll(0) == []
    assert time.perf_counter() - start < 1.0


async def gather_messages(client: EngineClient, channel: SocketChannel) -> list[EngineMessage]:
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
    client: EngineClient, channel: SocketChannel
) -> None:
    assert asyncio.run(gather_messages(client, channel)) == [OUTPUT] * 101


def test_the_experts_of_many_prompts_arrive_in_several_messages(
    client: EngineClient, channel: SocketChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of all ranks may end in one step, with a gigabyte of experts."""
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 300)
    sizes = [60, 60, 40, 0, 200, 10]
    outputs = [
        RequestOutput(f"{i}", [i], 0, 0, token_values={"routed_experts": bytes(n)})
        for i, n in enumerate(sizes)
    ]
    batch = msgspec.structs.replace(OUTPUT, outputs=outputs, starts={"0": 1.0})

    async def received() -> list[EngineMessage]:
        found: list[EngineMessage] = []
        client.listen(found.append, lambda error: None)
        for part in batch.parts(most_bytes=100):
            channel.send(part)
        channel.send(OUTPUT)
        deadline = time.monotonic() + 10
        while OUTPUT not in found and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return found

    bounds = [0, 1, 4, 5, 6]
    parts = [OutputBatch(outputs[first:end]) for first, end in pairwise(bounds)]
    parts[0] = msgspec.structs.replace(batch, outputs=outputs[:1])
    assert asyncio.run(received()) == [*parts, OUTPUT]


@pytest.mark.timeout(20)  # on failure it would wait for ever, in C
def test_a_send_to_an_engine_that_is_gone_does_not_wait(client: EngineClient) -> None:
    client.send(REQUEST)  # before there is one
    channel = SocketChannel(client.engine_end)
    assert channel.poll(5.0) == [REQUEST]
    channel.close()
    start = time.perf_counter()
    for _ in range(1000):
        client.send(REQUEST)
    assert time.perf_counter() - start < 1.0


def test_a_closed_connection_raises(client: EngineClient) -> None:
    client.close()
    with pytest.raises(EngineDeadError):
        client.send(REQUEST)


def test_a_message_too_large_is_refused_by_its_sender(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 16)
    with pytest.raises(ChannelError, match="GenerateRequest of"):
        client.send(REQUEST)


@pytest.mark.parametrize(
    "data",
    [
        b"\1\0\0\0\xc1",
        b"\x0e\0\0\0" + msgspec.msgpack.encode({"type": "Unheard"}),
        b"\xff\xff\xff\xff",
    ],
)
def test_a_message_that_makes_no_sense_is_an_error(client: EngineClient, data: bytes) -> None:
    client.engine_end.sendall(data)

    async def listen() -> list[ChannelError]:
        errors: list[ChannelError] = []
        client.listen(lambda message: None, errors.append)
        deadline = time.monotonic() + 5
        while not errors and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return errors

    (error,) = asyncio.run(listen())
    assert "undecodable" in str(error)


def test_messages_may_arrive_in_any_pieces(
    client: EngineClient, channel: SocketChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_REST_TIMEOUT_S", 0.0)  # the rest comes with a later poll
    sent = [REQUEST, AbortRequest(rid="a#1"), REQUEST]
    data = b""
    for message in sent:
        client.send(message)
        data += client.engine_end.recv(1 << 16)
    for size in (1, 2, 3, 7, len(data)):
        received: list[FrontMessage] = []
        for at in range(0, len(data), size):
            client._socket.sendall(data[at : at + size])
            received += channel.poll(0)
        assert received == sent


def test_messages_longer_than_the_sockets_buffer_arrive_in_order(
    client: EngineClient, channel: SocketChannel
) -> None:
    """While nobody reads, no send waits; short messages do not overtake long ones."""
    ids = list(range(3_000_000))
    long = msgspec.structs.replace(REQUEST, input_ids=ids)
    start = time.perf_counter()
    for i in range(3):
        client.send(long)
        client.send(AbortRequest(rid=str(i)))
    assert time.perf_counter() - start < 5.0
    received: list[FrontMessage] = []
    deadline = time.monotonic() + 30
    while len(received) < 6 and time.monotonic() < deadline:
        received += channel.poll(0.1)
    assert received == [each for i in range(3) for each in (long, AbortRequest(rid=str(i)))]


def test_many_threads_may_send_while_the_other_end_is_behind(
    client: EngineClient, channel: SocketChannel
) -> None:
    def send(thread: int) -> None:
        for i in range(2000):
            client.send(AbortRequest(rid=f"{thread}-{i}", message="x" * 500))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    received: list[str] = []
    deadline = time.monotonic() + 30
    while len(received) < 8000 and time.monotonic() < deadline:
        time.sleep(0.001)
        received += [message.rid for message in channel.poll(0.1)]
    for thread in threads:
        thread.join()
    for number in range(4):
        own = [rid for rid in received if rid.startswith(f"{number}-")]
        assert own == [f"{number}-{i}" for i in range(2000)]


def test_what_was_sent_before_the_end_arrives(client: EngineClient, channel: SocketChannel) -> None:
    """Also what the kernel did not take at once."""
    for _ in range(3000):
        channel.send(OUTPUT)
    closing = threading.Thread(target=channel.close)
    closing.start()
    received: list[EngineMessage] = []

    async def listen() -> None:
        client.listen(received.append, lambda error: None)
        deadline = time.monotonic() + 10
        while len(received) < 3000 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    asyncio.run(listen())
    closing.join()
    assert len(received) == 3000


def test_an_engine_whose_front_has_gone_does_not_spin(
    client: EngineClient, channel: SocketChannel
) -> None:
    client._socket.close()
    channel.send(OUTPUT)
    start = time.process_time()
    for _ in range(5):
        assert channel.poll(0.1) == []
    assert time.process_time() - start < 0.2


def test_the_end_of_the_engine_stops_the_listening(client: EngineClient) -> None:
    async def listen() -> float:
        client.listen(lambda message: None, lambda error: None)
        client.engine_end.close()
        await asyncio.sleep(0.1)
        start = time.process_time()
        await asyncio.sleep(0.3)
        return time.process_time() - start

    assert asyncio.run(listen()) < 0.1
    client.send(REQUEST)  # is dropped
