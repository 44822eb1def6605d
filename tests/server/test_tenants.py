"""Namespaces, priorities and tenants over HTTP: what reaches the engine from each route."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.core.messages import GenerateRequest, OpenSession
from sgl_jax.core.shares import Tenant
from sgl_jax.metrics.tenant_metrics import MAX_USERS
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import TENANT_FULL_SEED
from tests.server.conftest import Rig, serving
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    GENERATE: {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
}
RESPONSES, MESSAGES, SCORE = "/v1/responses", "/v1/messages", "/v1/score"
TENANT_BODIES: dict[str, dict[str, Any]] = BODIES | {
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    SCORE: {"query": "a", "items": ["b"], "label_token_ids": [5]},
}
KEYS = "ann a1 weight=2 max_queued=5 max_running=2\nbob b2\n"
ANN = Tenant(name="ann", weight=2.0, max_queued=5, max_running=2)
FIELD = {CHAT: "cache_salt", COMPLETIONS: "cache_salt", GENERATE: "extra_key"}


async def post(rig: Rig, path: str, **fields: Any) -> None:
    answer = await rig.http.post(path, json=BODIES.get(path, {}) | fields)
    assert answer.status_code == 200, answer.text


def sent(rig: Rig) -> list[tuple[str, int]]:
    """Namespace and priority of each request that the engine saw."""
    requests = [message for message in rig.engine.seen if isinstance(message, GenerateRequest)]
    return [(request.namespace, request.priority) for request in requests]


@pytest.mark.parametrize("path", list(BODIES))
async def test_either_name_is_the_same_namespace(rig: Rig, path: str) -> None:
    await post(rig, path, **{FIELD[path]: "tenant ä"})
    await post(rig, path, **{FIELD[path]: "s" * 256})
    assert sent(rig) == [("tenant ä", 0), ("s" * 256, 0)]


@pytest.mark.parametrize("path", list(BODIES))
async def test_an_empty_name_or_none_is_the_default_namespace(rig: Rig, path: str) -> None:
    await post(rig, path)
    await post(rig, path, **{FIELD[path]: ""})
    await post(rig, path, **{FIELD[path]: None}, priority=None)
    assert sent(rig) == [("", 0)] * 3


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("priority", [0, 7, 2**31 - 1, -(2**31)])
async def test_a_priority_is_carried_though_it_has_no_effect(
    rig: Rig, path: str, priority: int
) -> None:
    await post(rig, path, priority=priority)
    assert sent(rig) == [("", priority)]


async def test_all_choices_and_prompts_of_a_request_share_its_fields(rig: Rig) -> None:
    await post(rig, CHAT, n=2, cache_salt="a", priority=3)
    await post(rig, COMPLETIONS, prompt=["x", "y"], n=2, cache_salt="b", priority=4)
    await post(rig, GENERATE, text=["x", "y"], extra_key="c", priority=5)
    assert sent(rig) == [("a", 3)] * 2 + [("b", 4)] * 4 + [("c", 5)] * 2


async def test_a_list_has_one_for_each_prompt(rig: Rig) -> None:
    await post(rig, GENERATE, text=["x", "y", "z"], extra_key=["a", "", "b"], priority=[1, -2, 3])
    assert sent(rig) == [("a", 1), ("", -2), ("b", 3)]
    await post(rig, GENERATE, extra_key=["only"], priority=[9])
    assert sent(rig)[-1] == ("only", 9)


@pytest.mark.parametrize(
    "fields",
    [{"extra_key": "t"}, {"cache_salt": "t"}, {"extra_key": "t", "cache_salt": "t"}],
    ids=str,
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_session_is_opened_in_a_namespace(
    rig: Rig, fields: dict[str, str], streaming: bool
) -> None:
    await post(rig, "/open_session", session_id="s", streaming=streaming, **fields)
    (opened,) = [message for message in rig.engine.seen if isinstance(message, OpenSession)]
    assert opened.namespace == "t"


async def test_an_unnamed_session_is_of_the_default_namespace(rig: Rig) -> None:
    await post(rig, "/open_session", extra_key="", cache_salt=None)
    (opened,) = [message for message in rig.engine.seen if isinstance(message, OpenSession)]
    assert opened.namespace == ""


async def test_a_turn_carries_what_it_names_for_the_engine_to_compare(rig: Rig) -> None:
    await post(rig, "/open_session", session_id="s", streaming=True, cache_salt="t")
    await post(rig, CHAT, session_id="s", cache_salt="t")
    await post(rig, COMPLETIONS, session_params={"id": "s"})
    await post(rig, GENERATE, session_params={"id": "s"}, extra_key="other")
    assert [namespace for namespace, _ in sent(rig)] == ["t", "", "other"]


async def test_openais_own_client_sends_both(rig: Rig) -> None:
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="none",
        http_client=rig.http,  # type: ignore[arg-type]
        max_retries=0,
    )
    await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        extra_body={"cache_salt": "t", "priority": 2},
    )
    assert sent(rig) == [("t", 2)]


@pytest.fixture
async def keyed(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Rig]:
    """A server for the keys of ann and bob, one that all others have, and an admin's."""
    (tmp_path / "keys").write_text(KEYS)
    keys: dict[str, Any] = {
        "api_key_file": str(tmp_path / "keys"),
        "api_key": "shared",
        "admin_api_key": "r0",
    }
    async with serving(model_folder, tokenizer, **keys) as rig:
        yield rig


async def post_with(rig: Rig, key: str, path: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await rig.http.post(path, json=TENANT_BODIES.get(path, {}) | fields, headers=headers)


def tenants(rig: Rig) -> list[Tenant | None]:
    return [m.tenant for m in rig.engine.seen if isinstance(m, GenerateRequest)]


@pytest.mark.parametrize("path", list(TENANT_BODIES))
async def test_the_tenant_is_the_key_of_a_file_else_the_user(keyed: Rig, path: str) -> None:
    for key, fields in (
        ("a1", {}),
        ("a1", {"user": "bob"}),
        ("shared", {"user": "ann"}),
        ("shared", {"user": ""}),
        ("shared", {"user": None}),
        ("shared", {}),
    ):
        assert (await post_with(keyed, key, path, **fields)).status_code == 200
    assert tenants(keyed) == [
        ANN,
        ANN,
        Tenant(name="user ann", is_pooled=True),
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("path", list(TENANT_BODIES))
@pytest.mark.parametrize("user", [7, ["a"], {"a": 1}, "u" * 257], ids=str)
async def test_a_user_is_a_short_text(rig: Rig, path: str, user: Any) -> None:
    answer = await rig.http.post(path, json=TENANT_BODIES[path] | {"user": user})
    assert answer.status_code == 400
    assert "user" in answer.text
    assert tenants(rig) == []


async def test_anthropics_clients_name_it_in_metadata(rig: Rig) -> None:
    for metadata in ({"user_id": "u"}, {"user_id": None}, {}):
        await post(rig, MESSAGES, **TENANT_BODIES[MESSAGES], metadata=metadata)
    assert tenants(rig) == [Tenant(name="user u"), None, None]
    for wrong in ({"user_id": 1}, {"user_id": "u" * 257}, {"more": 1}, "u"):
        answer = await rig.http.post(MESSAGES, json=TENANT_BODIES[MESSAGES] | {"metadata": wrong})
        assert answer.status_code == 400


async def test_a_tenant_with_a_full_queue_comes_back_later(keyed: Rig) -> None:
    """Others are served meanwhile: the limits are its own."""
    keyed.engine.stand_still()
    waiting = [
        asyncio.create_task(post_with(keyed, "a1", COMPLETIONS, prompt=["hi"] * count))
        for count in (5, 2)
    ]
    await meanwhile_until(lambda: keyed.front.num_open == 7, "the requests are sent")
    for path, extra in ((CHAT, {}), (COMPLETIONS, {"stream": True}), (GENERATE, {}), (SCORE, {})):
        refused = await post_with(keyed, "a1", path, **extra)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "tenant_queue_full")
        assert error["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
    refused = await post_with(keyed, "a1", MESSAGES)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    other = asyncio.create_task(post_with(keyed, "b2", GENERATE))
    await meanwhile_until(lambda: keyed.front.num_open == 8, "the other's is sent")
    keyed.engine.go_on()
    assert {(await each).status_code for each in (*waiting, other)} == {200}
    assert (await post_with(keyed, "a1", GENERATE)).status_code == 200


@pytest.mark.parametrize("fields", [{"n": 6}, {"prompt": ["hi"] * 6}])
async def test_more_than_a_tenant_may_ever_have_is_a_400(keyed: Rig, fields: Any) -> None:
    refused = await post_with(keyed, "a1", COMPLETIONS, **fields)
    assert refused.status_code == 400
    assert "at most 5, got 6" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_says_when_to_come_back(keyed: Rig, stream: bool) -> None:
    answer = await post_with(
        keyed, "a1", GENERATE, stream=stream, sampling_params={"sampling_seed": TENANT_FULL_SEED}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_queue_full")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("key", ["shared", None])
async def test_a_session_is_its_users(keyed: Rig, rig: Rig, key: str | None) -> None:
    served = rig if key is None else keyed

    async def call(path: str, **fields: Any) -> httpx.Response:
        return await post_with(served, str(key), path, **fields)

    for user in ("u", "v", "w/ä: x" * 40):
        opened = await call("/open_session", session_id="s", streaming=True, user=user)
        assert opened.json() == "s"
    turn = {"session_params": {"id": "s"}}
    assert (await call(GENERATE, **turn, user="u")).status_code == 200
    assert (await call(CHAT, session_id="s", user="u")).status_code == 200
    missing = await call(GENERATE, **turn, user="nobody")
    for user in ("x", None):
        for answer in (
            await call(GENERATE, **turn, user=user),
            await call(COMPLETIONS, **turn, user=user),
        ):
            assert answer.status_code == 400
            assert answer.json() == missing.json()
        assert (await call(CHAT, session_id="s", user=user)).status_code == 400
        assert (await call("/close_session", session_id="s", user=user)).status_code == 400
    listed = (await call("/list_sessions", user="u")).json()["sessions"]
    assert [entry["session_id"] for entry in listed] == ["s"]
    assert len((await call("/list_sessions")).json()["sessions"]) == 3
    assert (await call("/close_session", session_id="s", user="u")).status_code == 200
    assert (await call(GENERATE, **turn, user="v")).status_code == 200


async def test_a_user_beside_a_key_of_a_file_changes_no_owner(keyed: Rig) -> None:
    await post_with(keyed, "a1", "/open_session", session_id="s", user="x")
    turn = await post_with(keyed, "a1", GENERATE, session_params={"id": "s"}, user="y")
    assert turn.status_code == 200


async def test_metrics_have_a_label_for_each_key_and_a_hundred_users(keyed: Rig) -> None:
    await post_with(keyed, "b2", COMPLETIONS, prompt=["abc", "abcd"])
    for i in range(2 * MAX_USERS):
        await post_with(keyed, "shared", COMPLETIONS, prompt="abc", user=f'{i}"\n')
    await post_with(keyed, "a1", COMPLETIONS, prompt="abc")
    for _ in range(2):
        exposed = (await keyed.http.get("/metrics", headers={"authorization": "Bearer r0"})).text
        samples = {
            (sample.name, sample.labels["tenant"]): sample.value
            for family in text_string_to_metric_families(exposed)
            for sample in family.samples
            if "tenant" in sample.labels
        }
        labels = {tenant for _, tenant in samples}
        assert {"ann", "bob", 'user 0"\n', "other users"} <= labels
        assert len(labels) == MAX_USERS + 3
        assert samples["sglang:tenant_num_queue_reqs", "bob"] == 1
        assert samples["sglang:tenant_num_running_reqs", "bob"] == 2
        assert samples["sglang:tenant_generation_tokens_total", "bob"] == 14
        assert samples["sglang:tenant_generation_tokens_total", "other users"] == 7 * MAX_USERS
        assert samples["sglang:tenant_cached_tokens_total", 'user 0"\n'] == 3
