"""Clients take turns."""

import asyncio

import pytest

from sgl_jax.server.text_pool import FairQueue

pytestmark = pytest.mark.anyio


async def order(queue: FairQueue[str], count: int) -> list[str]:
    """The work handed out, each piece done before the next is asked for."""
    given = []
    for _ in range(count):
        client, work = await asyncio.wait_for(queue.get(), 1)
        given.append(work)
        queue.done(client)
    return given


async def test_one_clients_work_is_done_in_its_order() -> None:
    queue: FairQueue[str] = FairQueue(1)
    for work in "abc":
        queue.put("one", work)
    assert await order(queue, 3) == ["a", "b", "c"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.05)


async def test_who_brings_much_does_not_keep_others_waiting() -> None:
    queue: FairQueue[str] = FairQueue(1)
    for number in range(100):
        queue.put("greedy", f"g{number}")
    queue.put("modest", "m0")
    queue.put("modest", "m1")
    assert await order(queue, 5) == ["g0", "m0", "g1", "m1", "g2"]


async def test_one_client_never_has_more_out_than_its_share() -> None:
    queue: FairQueue[str] = FairQueue(2)
    for work in "abc":
        queue.put("one", work)
    assert [(await queue.get())[1], (await queue.get())[1]] == ["a", "b"]
    third = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not third.done()
    queue.put("two", "x")
    assert (await asyncio.wait_for(third, 1)) == ("two", "x")
    fourth = asyncio.ensure_future(queue.get())
    queue.done("one")
    assert (await asyncio.wait_for(fourth, 1)) == ("one", "c")
