"""However many clients read the engine's state, it is called seldom, and no answer is stale."""

import asyncio

import msgspec
import pytest

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import FindPrefix, GetState, ListSessions
from sgl_jax.server import shared_reads
from sgl_jax.server.shared_reads import SharedRun, Snapshot
from tests.scheduler.driver import Driver, make_sizes
from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio
ROUTES = {
    "/get_load": GetState,
    "/v1/loads": GetState,
    "/v1/loads?include=core&dp_rank=1": GetState,
    "/get_server_info": GetState,
    "/server_info": GetState,
    "/metrics": GetState,
    "/list_sessions": ListSessions,
}


def num_calls(rig: Rig, kind: type) -> int:
    return sum(isinstance(message, kind) for message in rig.engine.seen)


@pytest.mark.parametrize("route", ROUTES)
async def test_readers_together_cost_two_calls(rig: Rig, route: str) -> None:
    answers = await asyncio.gather(*(rig.http.get(route) for _ in range(32)))
    assert {answer.status_code for answer in answers} == {200}
    # Those that came while the first call was on its way share the second.
    assert num_calls(rig, ROUTES[route]) <= 2


async def test_a_client_that_reads_on_and_on_gets_ten_answers_a_second(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any route: a turn of the engine's loop is interrupted no more often."""
    monkeypatch.setattr(shared_reads, "_MIN_INTERVAL_S", 3600.0)
    assert (await rig.http.get("/get_load")).status_code == 200
    rig.refs.answer_timeout_s = 0.05
    for route in ("/get_load", "/get_server_info", "/v1/loads"):
        answer = await rig.http.get(route)
        assert answer.status_code == 503
        assert "no answer within 0.05 s" in answer.json()["error"]["message"]
    assert num_calls(rig, GetState) == 1


async def test_an_expensive_reading_delays_the_next_by_a_second_at_most(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else many keys, for each of which an answer is written, would delay an operator's scrape."""
    monkeypatch.setattr(shared_reads, "_REST", 1e9)
    rig.refs.answer_timeout_s = 10.0
    for num_sessions in range(2):
        told = (await rig.http.get("/get_server_info")).json()
        assert told["num_sessions"] == num_sessions
        await rig.http.post("/open_session", json={})
    rig.engine.scheduler = Driver(make_sizes()).scheduler
    for _ in range(2):
        found = await rig.http.post("/memory/find", json={"input_ids": [1]})
        assert found.status_code == 200


async def test_an_answer_is_never_older_than_its_request(rig: Rig) -> None:
    for number in range(4):
        await rig.http.post("/open_session", json={"session_id": f"s{number}"})
        told = (await rig.http.get("/get_server_info")).json()
        assert told["num_sessions"] == number + 1
        listed = (await rig.http.get("/list_sessions")).json()["sessions"]
        assert len(listed) == number + 1


async def test_reads_with_parameters_take_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine.scheduler = Driver(make_sizes()).scheduler
    bodies = [{"input_ids": [number]} for number in range(3)]
    for body in bodies:
        found = await rig.http.post("/memory/find", json=body)
        assert found.json()["num_tokens"] == 1
    page = {"dp_rank": 0, "pool": 0, "page": 1}
    assert (await rig.http.post("/memory/page", json=page)).status_code == 200
    bad = await rig.http.post("/memory/page", json=page | {"pool": 9})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "pool")
    monkeypatch.setattr(shared_reads, "_MIN_INTERVAL_S", 3600.0)
    await rig.http.post("/memory/find", json=bodies[0])
    rig.refs.answer_timeout_s = 0.05
    before = num_calls(rig, FindPrefix)
    assert (await rig.http.post("/memory/find", json=bodies[0])).status_code == 503
    assert num_calls(rig, FindPrefix) == before


async def test_each_run_serves_all_that_asked_before_it_and_none_that_asked_after() -> None:
    begun: list[int] = []
    may_end = asyncio.Event()

    async def make() -> int:
        begun.append(len(begun))
        await may_end.wait()
        return begun[-1]

    run = SharedRun(make, lambda last: 0.0)
    first = asyncio.ensure_future(run.get())
    while not begun:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(run.get()) for _ in range(5)]
    later[0].cancel()  # its client has gone
    may_end.set()
    assert await first == 0
    assert await asyncio.gather(*later[1:]) == [1, 1, 1, 1]
    assert await run.get() == 2


async def test_a_failing_run_fails_its_readers_only() -> None:
    results = iter([ValueError("once"), 7])

    async def make() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[return-value]

    run = SharedRun(make, lambda last: 0.0)
    with pytest.raises(ValueError, match="once"):
        await run.get()
    assert await run.get() == 7


def test_bytes_are_written_once_and_what_they_cost_delays_the_next_call() -> None:
    made = []

    def write(data: dict[str, int]) -> dict[str, int]:
        made.append(data)
        for _ in range(100_000):
            pass
        return data

    snapshot = Snapshot(Reply(rid="r", ok=True, data={"a": 1}, cost_s=0.5))
    bodies = {bytes(snapshot.json("key", write).body) for _ in range(3)}
    assert bodies == {msgspec.json.encode({"a": 1})}
    assert made == [{"a": 1}]
    assert snapshot.cost_s > 0.5
    assert shared_reads._interval_s(snapshot) == 1.0
    cheap = Snapshot(Reply(rid="r", ok=True, data={}, cost_s=0.005))
    assert shared_reads._interval_s(cheap) == 0.5
    assert shared_reads._interval_s(None) == 0.1


@pytest.mark.parametrize(("num_readers", "interval_s"), [(1, 0.1), (16, 0.32), (500, 1.0)])
def test_the_next_call_is_20_ms_later_for_each_reader(num_readers: int, interval_s: float) -> None:
    snapshot = Snapshot(Reply(rid="r", ok=True, data={}, cost_s=0.0))
    for number in range(num_readers):
        # An encoding of its own for each: written once, its time counts as well.
        snapshot.write(number % 2, bytes)
    assert shared_reads._interval_s(snapshot) == pytest.approx(interval_s, abs=0.02)
