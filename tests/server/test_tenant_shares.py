"""Two keys on one server: what the one does, the other does not notice.

Each test drives the real routes. The engine is the real loop and scheduler wherever these decide.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.server.guards.keys import ApiKeys, Caller, SessionOwner
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import MAX_QUEUED, Rig, serving
from tests.server.oracle_engine import SIZES, CoreEngine, oracle_engine
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio
MAX_SESSIONS = 16
MAX_SESSION_TOKENS = 400
TURN: dict[str, Any] = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 2}}
ANN, BOB, ROOT, SHARED = "a1", "b2", "r0", "s3"
Serve = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def serve(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Serve:
    """Starts a server for the keys of ann and bob, for an admin's, and one that all others have."""
    (tmp_path / "keys").write_text("annika a1\nbertram b2\n")
    (tmp_path / "admins").write_text("root r0\n")

    def start(*, is_real: bool = True, **settings: Any) -> AbstractAsyncContextManager[Rig]:
        settings = {
            "api_key_file": str(tmp_path / "keys"),
            "admin_api_key_file": str(tmp_path / "admins"),
            "api_key": SHARED,
            "max_sessions": MAX_SESSIONS,
            "max_session_tokens": MAX_SESSION_TOKENS,
            "max_queued_requests": MAX_QUEUED,
        } | settings
        engine = oracle_engine(monkeypatch, **settings) if is_real else None  # type: ignore[arg-type]
        return serving(model_folder, tokenizer, engine=engine, **settings)  # type: ignore[arg-type]

    return start


@pytest.fixture
async def rig(serve: Serve) -> AsyncIterator[Rig]:
    async with serve() as rig:
        yield rig


async def send(rig: Rig, key: str, path: str, method: str = "POST", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    json = body if method == "POST" else None
    return await rig.http.request(method, path, json=json, headers=headers)


async def sessions_of(rig: Rig, key: str) -> list[str]:
    listed = (await send(rig, key, "/list_sessions")).json()["sessions"]
    return [entry["session_id"] for entry in listed]


async def open_all(rig: Rig, key: str, **fields: Any) -> httpx.Response:
    """Open sessions until one is refused, and return the refusal."""
    for number in range(2 * MAX_SESSIONS):
        session_id = f"{key} {number}"
        opened = await send(
            rig, key, "/open_session", session_id=session_id, streaming=True, **fields
        )
        if opened.status_code != 200:
            return opened
    raise AssertionError("no session was refused")


# -- sessions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 1e6])
async def test_a_key_cannot_open_all_sessions(rig: Rig, timeout: float | None) -> None:
    refused = await open_all(rig, ANN, timeout=timeout)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_sessions_full")
    assert "tenant 'annika'" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert len(await sessions_of(rig, ANN)) == 3 * MAX_SESSIONS // 4
    for key in (BOB, SHARED, ROOT):
        assert (await send(rig, key, "/open_session", session_id="one")).status_code == 200
    assert len(await sessions_of(rig, ANN)) == 3 * MAX_SESSIONS // 4


async def test_users_of_a_shared_key_cannot_together_open_all_sessions(rig: Rig) -> None:
    for number in range(2 * MAX_SESSIONS):
        await send(rig, SHARED, "/open_session", session_id="s", user=str(number), timeout=1e6)
    assert (await send(rig, ANN, "/open_session", session_id="one")).status_code == 200


async def test_idle_sessions_of_the_key_with_most_make_room_oldest_use_first(rig: Rig) -> None:
    await open_all(rig, ANN)
    before = await sessions_of(rig, ANN)
    used = await send(rig, ANN, "/generate", session_params={"id": before[0]}, **TURN)
    assert used.status_code == 200
    refused = await open_all(rig, BOB)
    assert refused.status_code == 429
    left = await sessions_of(rig, ANN)
    assert left == [before[0], *before[-len(left) + 1 :]]
    assert len(left) - len(await sessions_of(rig, BOB)) in (0, 1)


async def test_the_client_of_a_session_that_made_room_reads_that_it_is_closed(rig: Rig) -> None:
    await open_all(rig, ANN)
    oldest = f"{ANN} 0"
    await send(rig, ANN, "/generate", session_params={"id": oldest}, **TURN)
    for number in range(1, 3 * MAX_SESSIONS // 4):
        await send(rig, ANN, "/generate", session_params={"id": f"{ANN} {number}"}, **SHORT)
    while oldest in await sessions_of(rig, ANN):
        number = len(await sessions_of(rig, BOB))
        opened = await send(rig, BOB, "/open_session", session_id=f"b{number}")
        assert opened.status_code == 200
    gone = await send(rig, ANN, "/generate", session_params={"id": oldest}, **TURN)
    never = await send(rig, ANN, "/generate", session_params={"id": "never"}, **TURN)
    assert (gone.status_code, never.status_code) == (400, 400)
    assert gone.text.replace(oldest, "never") == never.text
    engine = rig.engine
    assert isinstance(engine, CoreEngine)
    assert engine.core.scheduler.counters()["sessions_displaced"] >= 1
    info = (await send(rig, ROOT, "/get_server_info", "GET")).json()
    assert info["num_sessions"] == len(await sessions_of(rig, ROOT)) < MAX_SESSIONS
    engine.core.scheduler.audit()


SHORT: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize("protects", ["a time-out", "a turn"])
async def test_a_session_in_use_or_with_a_time_out_never_makes_room(
    rig: Rig, protects: str
) -> None:
    await open_all(rig, ANN, timeout=1e6 if protects == "a time-out" else None)
    before = await sessions_of(rig, ANN)
    turns = []
    if protects == "a turn":
        await send(rig, ROOT, "/pause_generation", mode="in_place")
        for each in before:
            turn = send(rig, ANN, "/generate", session_params={"id": each}, **SHORT)
            turns.append(asyncio.create_task(turn))
        await meanwhile_until(lambda: rig.front.num_open == len(before), "all turns are sent")
    for key in (BOB, SHARED):
        assert (await open_all(rig, key)).status_code in (429, 503)
    assert await sessions_of(rig, ANN) == before
    if protects == "a turn":
        assert (await send(rig, ROOT, "/continue_generation")).status_code == 200
        assert {(await each).status_code for each in turns} == {200}


async def test_the_history_of_one_key_leaves_room_for_that_of_another(rig: Rig) -> None:
    for number in range(MAX_SESSIONS // 2):
        fields = {"session_id": f"a{number}", "streaming": True, "timeout": 1e6}
        assert (await send(rig, ANN, "/open_session", **fields)).status_code == 200  # type: ignore[arg-type]
        turn = await send(rig, ANN, "/generate", session_params={"id": f"a{number}"}, **TURN)
        if turn.status_code != 200:
            assert (turn.status_code, turn.json()["error"]["code"]) == (429, "tenant_sessions_full")
            break
    else:
        raise AssertionError("no turn was refused")
    await send(rig, BOB, "/open_session", session_id="b", streaming=True)
    turn = await send(rig, BOB, "/generate", session_params={"id": "b"}, **TURN)
    assert turn.status_code == 200


async def test_idle_histories_of_one_key_make_room_for_those_of_another(rig: Rig) -> None:
    for number in range(7):
        await send(rig, ANN, "/open_session", session_id=f"a{number}", streaming=True)
        turn = await send(rig, ANN, "/generate", session_params={"id": f"a{number}"}, **TURN)
        assert turn.status_code == 200
    for number in range(4):
        await send(rig, BOB, "/open_session", session_id=f"b{number}", streaming=True)
        turn = await send(rig, BOB, "/generate", session_params={"id": f"b{number}"}, **TURN)
        assert turn.status_code == 200
    left = await sessions_of(rig, ANN)
    assert left == [f"a{number}" for number in range(7 - len(left), 7)]
    assert 4 <= len(left) < 7


# -- the queue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"fair_share": "tokens"}])
@pytest.mark.parametrize("is_real", [False, True])
async def test_a_key_cannot_fill_the_queue(
    serve: Serve, is_real: bool, settings: dict[str, str]
) -> None:
    async with serve(is_real=is_real, **settings) as rig:
        if isinstance(rig.engine, CoreEngine):
            await send(rig, ROOT, "/pause_generation", mode="in_place")
        else:
            rig.engine.stand_still()
        asked = [asyncio.create_task(send(rig, ANN, "/generate", **SHORT)) for _ in range(150)]
        num_rows = rig.front.facts.max_running_requests
        most = 3 * (MAX_QUEUED + num_rows) // 4
        await meanwhile_until(
            lambda: sum(each.done() for each in asked) == 150 - most, "the rest is refused"
        )
        refused = next(each for each in asked if each.done()).result()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "tenant_queue_full")
        others = [
            asyncio.create_task(send(rig, key, "/generate", **SHORT)) for key in (BOB, ROOT, SHARED)
        ]
        await meanwhile_until(lambda: rig.front.num_open == most + 3, "all others are taken")
        if isinstance(rig.engine, CoreEngine):
            await send(rig, ROOT, "/continue_generation")
        else:
            rig.engine.go_on()
        assert {(await each).status_code for each in others} == {200}
        statuses = [(await each).status_code for each in asked]
        assert (statuses.count(200), statuses.count(429)) == (most, 150 - most)


async def test_a_limit_on_the_line_of_a_key_takes_the_place_of_its_share(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("annika a1 max_queued=90\nbertram b2 max_queued=2\n")
    async with serving(model_folder, tokenizer, api_key_file=str(tmp_path / "keys")) as rig:
        rig.engine.stand_still()
        num_rows = rig.front.facts.max_running_requests
        asked = [asyncio.create_task(send(rig, ANN, "/generate", **SHORT)) for _ in range(102)]
        asked += [asyncio.create_task(send(rig, BOB, "/generate", **SHORT)) for _ in range(9)]
        num_taken = 90 + 2 + 2 * num_rows
        await meanwhile_until(
            lambda: sum(each.done() for each in asked) == len(asked) - num_taken,
            "the rest is refused",
        )
        rig.engine.go_on()
        statuses = [(await each).status_code for each in asked]
        assert statuses[:102].count(200) == 90 + num_rows
        assert statuses[102:].count(200) == 2 + num_rows


async def test_users_of_a_shared_key_cannot_together_fill_the_queue(serve: Serve) -> None:
    async with serve(is_real=False) as rig:
        rig.engine.stand_still()
        asked = [
            asyncio.create_task(send(rig, SHARED, "/generate", user=str(number), **SHORT))
            for number in range(150)
        ]
        await meanwhile_until(lambda: any(each.done() for each in asked), "some are refused")
        other = asyncio.create_task(send(rig, ANN, "/generate", **SHORT))
        await meanwhile_until(
            lambda: rig.front.num_open == 3 * (MAX_QUEUED + 4) // 4 + 1, "the key's is taken"
        )
        rig.engine.go_on()
        assert (await other).status_code == 200
        await asyncio.gather(*asked)


async def test_a_call_of_more_prompts_than_a_key_may_ever_queue_is_a_400(rig: Rig) -> None:
    most = 3 * (MAX_QUEUED + SIZES.num_rows - 1) // 4
    body = {"input_ids": [[1]] * (most + 1), "sampling_params": {"max_new_tokens": 1}}
    refused = await send(rig, ANN, "/generate", **body)  # type: ignore[arg-type]
    assert refused.status_code == 400
    assert f"at most {most}, got {most + 1}" in refused.json()["error"]["message"]


async def test_a_server_that_tells_no_tenants_apart_has_no_shares(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"max_sessions": MAX_SESSIONS, "api_key": SHARED}
    engine = oracle_engine(monkeypatch, **settings)
    async with serving(model_folder, tokenizer, engine=engine, **settings) as rig:
        refused = await open_all(rig, SHARED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_sessions")
        assert len(await sessions_of(rig, SHARED)) == MAX_SESSIONS


# -- stored responses --------------------------------------------------------------------------


async def stored(rig: Rig, key: str, **fields: Any) -> str:
    body = {"input": "hi", "max_output_tokens": 1} | fields
    made = await send(rig, key, "/v1/responses", **body)  # type: ignore[arg-type]
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


@pytest.mark.parametrize("limit", ["max_stored_responses", "max_stored_response_bytes"])
async def test_responses_of_one_key_displace_none_of_another(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path, limit: str
) -> None:
    (tmp_path / "keys").write_text("annika a1\nbertram b2\n")
    limits = {limit: 8 if limit == "max_stored_responses" else 30_000}
    keys = str(tmp_path / "keys")
    async with serving(model_folder, tokenizer, limits=limits, api_key_file=keys) as rig:
        first = await stored(rig, BOB)
        largest = {str(number): "x" * 512 for number in range(16)}
        several = [await stored(rig, ANN, metadata=largest) for _ in range(20)]
        assert (await send(rig, BOB, f"/v1/responses/{first}", "GET")).status_code == 200
        statuses = [
            (await send(rig, ANN, f"/v1/responses/{each}", "GET")).status_code for each in several
        ]
        assert statuses == sorted(statuses, reverse=True)
        assert 200 in statuses
        assert (await send(rig, ANN, f"/v1/responses/{first}", "GET")).status_code == 404


async def test_responses_of_one_user_displace_none_of_another(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_stored_responses": 8}
    async with serving(model_folder, tokenizer, limits=limits, fair_share="tokens") as rig:
        first = await stored(rig, "", user="u")
        for _ in range(20):
            await stored(rig, "", user="v")
        assert (await send(rig, "", f"/v1/responses/{first}", "GET")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "metadata",
    [
        {str(number): "x" for number in range(17)},
        {"k" * 65: "x"},
        {"k": "x" * 513},
        {"k": 1},
        {"k": {"x": "y"}},
    ],
    ids=["pairs", "a key", "a value", "a number", "an object"],
)
async def test_metadata_has_openais_limits(
    model_folder: Path, tokenizer: Tokenizer, path: str, metadata: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"input": "hi"}
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with serving(model_folder, tokenizer) as rig:
        refused = await rig.http.post(path, json=body | {"metadata": metadata})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("metadata")
        longest = {f"{number:0>64}": "x" * 512 for number in range(16)}
        taken = await rig.http.post(path, json=body | {"metadata": longest})
        assert taken.status_code == 200


# -- names -------------------------------------------------------------------------------------


def tenants_in(exposed: str) -> set[str]:
    return {
        sample.labels["tenant"]
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
        if "tenant" in sample.labels
    }


async def test_a_client_key_reads_no_name_of_another_key(serve: Serve) -> None:
    async with serve(admin_api_key_file=None) as rig:
        for key in (ANN, BOB):
            await send(rig, key, "/generate", **SHORT)
            await send(rig, key, "/open_session", session_id="mine", streaming=True)
            await send(rig, key, "/generate", session_params={"id": "mine"}, **SHORT)
        routes = {path for path in get_routes(rig) if "expert" not in path}  # the oracle has none
        assert {"/metrics", "/get_server_info", "/v1/loads", "/memory/hello"} <= routes
        for key, own, other in (
            (ANN, "annika", "bertram"),
            (BOB, "bertram", "annika"),
            (SHARED, "", "annika"),
        ):
            for path in sorted(routes):
                if "{" in path or path == "/memory/events":
                    continue
                answer = await send(rig, key, path, "GET")
                assert other not in answer.text, path
            exposed = (await send(rig, key, "/metrics", "GET")).text
            assert tenants_in(exposed) == {own}
            tenants = (await send(rig, key, "/get_server_info", "GET")).json()["tenants"]
            assert set(tenants) == {own}
            assert (await send(rig, key, "/memory/events", "GET")).status_code == 401
            assert (await send(rig, key, "/memory/hello", "GET")).status_code == 401
            assert (await send(rig, key, "/memory/find", text="hi")).status_code == 401


def get_routes(rig: Rig) -> set[str]:
    app: Any = rig.app
    return {each.path for each in app.routes if "GET" in (getattr(each, "methods", None) or ())}


async def test_the_admins_key_reads_all_names(rig: Rig) -> None:
    for key in (ANN, BOB):
        await send(rig, key, "/generate", **SHORT)
    exposed = (await send(rig, ROOT, "/metrics", "GET")).text
    assert {"annika", "bertram"} <= tenants_in(exposed)
    tenants = (await send(rig, ROOT, "/get_server_info", "GET")).json()["tenants"]
    assert {"annika", "bertram"} <= set(tenants)


async def test_keys_that_read_at_the_same_time_each_read_their_own(rig: Rig) -> None:
    keys: dict[str, Any] = {ANN: {"annika"}, ROOT: {"annika", "bertram"}, BOB: {"bertram"}}
    for key in (ANN, BOB):
        await send(rig, key, "/generate", **SHORT)
    answers = await asyncio.gather(*(send(rig, key, "/metrics", "GET") for key in keys))
    for own, answer in zip(keys.values(), answers, strict=True):
        assert tenants_in(answer.text) & {"annika", "bertram"} == own


async def test_open_metrics_name_no_tenant_to_strangers(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    settings: dict[str, Any] = {"api_key": SHARED, "open_metrics": True}
    async with serving(model_folder, tokenizer, **settings) as rig:
        await send(rig, SHARED, "/generate", user="u", **SHORT)
        await send(rig, SHARED, "/generate", **SHORT)
        exposed = (await rig.http.get("/metrics")).text
        assert tenants_in(exposed) <= {""}
        assert "user u" in tenants_in((await send(rig, SHARED, "/metrics", "GET")).text)


# -- prefixes ----------------------------------------------------------------------------------


async def cached(rig: Rig, key: str, **fields: Any) -> int:
    answer = await send(rig, key, "/generate", **TURN | fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


async def test_isolated_tenants_share_no_prefixes_whatever_they_send(serve: Serve) -> None:
    async with serve(isolate_tenants=True) as rig:
        assert await cached(rig, ANN) == 0
        assert await cached(rig, ANN) == 36
        assert await cached(rig, BOB) == 0
        assert await cached(rig, SHARED) == 0
        assert await cached(rig, SHARED, user="ann") == 0
        assert await cached(rig, SHARED, cache_salt="annika:") == 0
        assert await cached(rig, ANN, cache_salt="red") == 0
        assert await cached(rig, ANN, cache_salt="red") == 36
        assert await cached(rig, BOB, cache_salt="red") == 0
        assert await cached(rig, BOB, extra_key="red") == 36
        assert await cached(rig, ROOT, cache_salt="red") == 0


async def test_without_isolation_keys_share_prefixes(rig: Rig) -> None:
    assert await cached(rig, ANN) == 0
    assert await cached(rig, BOB) == 36


@pytest.mark.parametrize("salt", [None, "red"])
async def test_sessions_are_in_their_tenants_namespace(serve: Serve, salt: str | None) -> None:
    async with serve(isolate_tenants=True) as rig:
        fields = {} if salt is None else {"cache_salt": salt}
        for key in (ANN, BOB):
            opened = await send(rig, key, "/open_session", session_id="s", streaming=True, **fields)
            assert opened.status_code == 200
            assert await cached(rig, key, session_params={"id": "s"}) == 0
            assert await cached(rig, key, input_ids=[7], session_params={"id": "s"}, **fields) > 36
            assert await cached(rig, key, **fields) == 36
        other = await send(
            rig, ANN, "/generate", **TURN, session_params={"id": "s"}, cache_salt="blue"
        )
        assert other.status_code == 400


async def test_a_key_is_known_by_its_name_when_it_changes(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("bertram b9\nannika a9\n")
    (tmp_path / "old").write_text("annika a1\nbertram b2\n")
    engine = oracle_engine(monkeypatch)
    for file, keys in (("old", ("a1", "b2")), ("keys", ("a9", "b9"))):
        settings: dict[str, Any] = {"api_key_file": str(tmp_path / file), "isolate_tenants": True}
        engine.stopped = False
        async with serving(model_folder, tokenizer, engine=engine, **settings) as rig:
            ann, bob = [await cached(rig, key) for key in keys]
            assert (ann, bob) == ((0, 0) if file == "old" else (36, 36))


def test_no_two_pairs_of_tenant_and_salt_have_one_namespace() -> None:
    """A client chooses its salt, and with a shared key its name."""
    names = ["a", "b", "a:b", "a%3Ab", "user a", "user a:b", "user%20a", ""]
    salts = ["", ":", "b", "b:", ":b", "a:b", "%3Ab", "a", "user a", "user%20a:"]
    found = set()
    for name in names:
        tenant = Tenant(name=name) if name else None
        owner = SessionOwner(Caller(name, is_admin=False), tenant, isolates=True)
        found |= {owner.namespace(salt) for salt in salts}
    assert len(found) == len(names) * len(salts)


def test_isolation_needs_names_that_no_edit_of_the_file_moves(
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text("annika a1\n# others\nb2\n")
    args = ServerArgs(api_key_file=str(tmp_path / "keys"), isolate_tenants=True)
    with pytest.raises(
        ValueError, match=r"--isolate-tenants needs a name for each key .*: key-3 has none"
    ):
        ApiKeys.from_args(args)
