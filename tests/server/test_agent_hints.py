"""What requests tell of their conversation's next one, and messages of the cache."""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from sgl_jax.core.messages import GenerateRequest, Reuse
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.server.oracle_engine import oracle_engine
from tests.server.test_messages import DECLARED, asking

pytestmark = pytest.mark.anyio
HINTED = {"expected_tool_duration_ms": 1500, "workflow_id": "w", "reuse_hint": "keep"}


async def request_with(
    rig: Rig, headers: dict[str, str] | None = None, **body: Any
) -> GenerateRequest:
    rig.engine.seen.clear()
    answer = await rig.http.post("/v1/messages", json=asking("Sunny.", **body), headers=headers)
    assert answer.status_code == 200, answer.text
    (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
    return request


async def reuse_in(rig: Rig, headers: dict[str, str] | None = None, **body: Any) -> Reuse:
    return (await request_with(rig, headers, **body)).reuse


async def test_agents_are_known_by_their_headers_and_expected_pauses(tools_rig: Rig) -> None:
    assert await reuse_in(tools_rig) == Reuse()
    session = {"X-Claude-Code-Session-Id": "s"}
    main = await reuse_in(tools_rig, session)
    sub_agent = await reuse_in(tools_rig, {**session, "x-claude-code-agent-id": "a"})
    assert main.agent.endswith(":s")
    assert sub_agent.agent.endswith(":a")
    assert (await reuse_in(tools_rig, agent_hints={"agent_id": "a"})).agent == sub_agent.agent
    assert (await reuse_in(tools_rig, session, user="u")).agent not in {main.agent, ""}
    mine = await reuse_in(tools_rig, {"thread-id": "t:s"}, user="u")
    theirs = await reuse_in(tools_rig, {"thread-id": "s"}, user="u:t")
    assert mine.agent != theirs.agent
    long = await reuse_in(tools_rig, {"thread-id": "x" * 5000})
    assert len(long.agent) < 400
    assert (await reuse_in(tools_rig, agent_hints=HINTED)).pause_s == 1.5
    most = await reuse_in(tools_rig, agent_hints={"expected_tool_duration_ms": 1e300})
    assert most.pause_s == 86_400.0


async def test_calls_are_known_by_their_tokens_if_tools_are_offered(tools_rig: Rig) -> None:
    tokenizer = tools_rig.front.tokenizer
    ids = (await reuse_in(tools_rig, tools=DECLARED)).call_token_ids
    assert {tokenizer.decode([each], skip_special_tokens=False) for each in ids} <= {
        "<tool_call>",
        "</tool_call>",
    }


def mark(ttl: str | None = None) -> dict[str, str]:
    return {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": mark(ttl)}


def actions(*kinds: str, **payload: Any) -> dict[str, Any]:
    sent = [{"action_type": kind, "action_id": "1", "payload": payload} for kind in kinds]
    return {"protocol_version": 1, "message_id": "m", "actions": sent}


FUNCTION = {"type": "function", "name": "f", "parameters": {}}
NAMESPACE = {"type": "namespace", "name": "n"}
CALL = [
    {"role": "user", "content": "Hi."},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
]
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
# Marks as clients of OpenAI's APIs send them for models of several providers.
MARKED_BODIES = [
    ("chat/completions", {"messages": [{"role": "user", "content": [marked("Hi.", "1h")]}]}),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "Hi."} | {"cache_control": mark("1h")}]},
    ),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": [marked("Hi.")]}],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {}},
                    "cache_control": mark("1h"),
                }
            ],
        },
    ),
    ("responses", {"input": [{"role": "user", "content": [marked("Hi.", "1h")]}]}),
    ("responses", {"input": [*CALL, OUTPUT | {"cache_control": mark("1h")}]}),
    ("responses", {"input": [*CALL, OUTPUT | {"output": [marked("4", "1h")]}]}),
    ("responses", {"input": "Hi.", "tools": [FUNCTION | {"cache_control": mark("1h")}]}),
    (
        "responses",
        {
            "input": "Hi.",
            "tools": [NAMESPACE | {"tools": [FUNCTION | {"cache_control": mark("1h")}]}],
        },
    ),
]


TRAJECTORY = {"trajectory_id": "t", "kv_hints": {"evict_trajectory": True}}
KEPT: list[tuple[float, dict[str, Any]]] = [
    (300.0, {"system": [marked("s"), marked("t")]}),
    (300.0, {"messages": [{"role": "user", "content": [marked("Hi.")]}]}),
    (3600.0, {"system": [marked("s", "1h")], "cache_control": mark("5m")}),
    (3600.0, {"tools": [{**DECLARED[0], "cache_control": mark("1h")}]}),
    (3600.0, {"cache_control": {**mark("1h"), "scope": "global"}}),
    (86_400.0, {"prompt_cache_retention": "24h"}),
    (0.0, {"prompt_cache_retention": "in_memory"}),
    (2.0, {"agent_hints": {"cache_ttl_ms": 2000}}),
    (300.0, {"agent_hints": {"reuse_hint": "keep"}}),
    (300.0, {"kv_hints": actions("retain")}),
    (9.0, {"kv_hints": actions("Retain", duration_ms=9000, start=0)}),
]
LAST: list[dict[str, Any]] = [
    {"agent_context": TRAJECTORY},
    {"kv_hints": actions("evict")},
    {"kv_hints": actions("retain", "evict"), "cache_control": mark("1h")},
    {"agent_hints": {"reuse_hint": "discard"}},
]
UNKNOWN: list[tuple[int, dict[str, Any]]] = [
    (1, {"prompt_cache_retention": "forever"}),
    (1, {"agent_hints": {"reuse_hint": "maybe"}}),
    (2, {"kv_hints": actions("share", "prefetch")}),
    (1, {"kv_hints": actions("retain", duration_ms=-1)}),
    (1, {"kv_hints": actions("retain", duration_ms="long")}),
    (1, {"kv_hints": actions("retain", duration_ms=True)}),
    (1, {"kv_hints": actions("retain", duration_ms=10**18)}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("cache_control.type", {"cache_control": {"type": "persistent"}}),
    ("cache_control.ttl", {"cache_control": {"type": "ephemeral", "ttl": "2h"}}),
    ("cache_control.ttl", {"system": [marked("s", "1d")]}),
    ("kv_hints.actions", {"kv_hints": actions(*["evict"] * 65)}),
    ("action_type", {"kv_hints": actions("x" * 65)}),
    ("kv_hints", {"kv_hints": "evict"}),
    ("prompt_cache_key", {"prompt_cache_key": "x" * 1025}),
    ("prompt_cache_retention", {"prompt_cache_retention": 24}),
    ("evict_trajectory", {"agent_context": {"kv_hints": {"evict_trajectory": "yes"}}}),
    ("cache_ttl_ms", {"agent_hints": {"cache_ttl_ms": -1}}),
    ("valid number", {"agent_hints": {"cache_ttl_ms": 10**400}}),
]


@pytest.mark.parametrize(("route", "body"), MARKED_BODIES)
async def test_marks_in_parts_are_hints_in_openais_apis_too(
    tools_rig: Rig, route: str, body: dict[str, Any]
) -> None:
    tools_rig.engine.seen.clear()
    answer = await tools_rig.http.post(f"/v1/{route}", json={"model": "model", **body})
    assert answer.status_code == 200, answer.text
    (request,) = (m for m in tools_rig.engine.seen if isinstance(m, GenerateRequest))
    assert request.reuse.keep_s == 3600.0
    plain = json.loads(json.dumps(body), object_hook=without_marks)
    tools_rig.engine.seen.clear()
    await tools_rig.http.post(f"/v1/{route}", json={"model": "model", **plain})
    (other,) = (m for m in tools_rig.engine.seen if isinstance(m, GenerateRequest))
    assert request.input_ids == other.input_ids
    assert not other.reuse.keep_s


def without_marks(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "cache_control"}


async def test_hints_say_how_long_a_prompt_is_kept_and_when_a_conversation_ends(
    tools_rig: Rig,
) -> None:
    for keep_s, body in KEPT:
        request = await request_with(tools_rig, **body)
        assert (request.reuse.keep_s, request.reuse.is_last) == (keep_s, False), body
        assert not request.num_unknown_hints, body
    for body in LAST:
        reuse = await reuse_in(tools_rig, **body)
        assert (reuse.keep_s, reuse.is_last) == (0.0, True), body
    for value, is_last in (("true", True), ("1", True), ("false", False)):
        reuse = await reuse_in(tools_rig, {"X-Dynamo-Session-Final": value})
        assert reuse == Reuse(is_last=is_last)
    assert (await reuse_in(tools_rig, kv_hints=actions("demote"))).pause_s == 86_400.0
    for num_unknown, body in UNKNOWN:
        request = await request_with(tools_rig, **body)
        assert (request.reuse, request.num_unknown_hints) == (Reuse(), num_unknown)
    for name, body in REFUSED:
        answer = await tools_rig.http.post("/v1/messages", json=asking("Sunny.", **body))
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"], answer.text


async def test_a_cache_key_names_a_family_if_no_header_names_the_agent(tools_rig: Rig) -> None:
    reuse = await reuse_in(tools_rig, prompt_cache_key="k")
    assert reuse.agent.endswith(":k")
    assert reuse.is_family
    named = await reuse_in(tools_rig, {"thread-id": "t"}, prompt_cache_key="k")
    assert (named.agent[-2:], named.is_family) == (":t", False)
    assert (await reuse_in(tools_rig, prompt_cache_key="k", user="u")).agent != reuse.agent


def drawn_hints(rng: Random) -> dict[str, Any]:
    """Hints of any kind and size, some of them not as they should be."""
    odd: list[Any] = [None, "", "x" * rng.choice([1, 64, 65, 2000]), -1, 1e308, [], {}, True, [{}]]
    listed = [body for _, body in (*KEPT, *UNKNOWN, *REFUSED)] + LAST
    fields = {name: value for body in rng.sample(listed, 3) for name, value in body.items()}
    for name in rng.sample([*fields, "kv_hints", "agent_context", "prompt_cache_key"], 1):
        value = fields.get(name)
        if isinstance(value, dict) and value and rng.random() < 0.5:
            fields[name] = value | {rng.choice(list(value)): rng.choice(odd)}
        else:
            fields[name] = rng.choice(odd)
    return {name: fields[name] for name in fields if name not in {"system", "messages", "tools"}}


async def test_any_hints_change_nothing_of_a_request_but_its_reuse(tools_rig: Rig) -> None:
    rng, statuses = Random(4), []
    assert await reuse_in(tools_rig) == Reuse()
    (same,) = (each for each in tools_rig.engine.seen if isinstance(each, GenerateRequest))
    for _ in range(150):
        body = asking("Sunny.", **drawn_hints(rng))
        headers = {rng.choice(["thread-id", "x-dynamo-session-final"]): rng.choice(["", "x", "1"])}
        tools_rig.engine.seen.clear()
        answer = await tools_rig.http.post("/v1/messages", json=body, headers=headers)
        sent = [each for each in tools_rig.engine.seen if isinstance(each, GenerateRequest)]
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert (answer.status_code, sent) == (400, []), body
            assert answer.json()["error"]["message"]
            continue
        none = {"rid": "", "reuse": Reuse(), "num_unknown_hints": 0}
        rest = (msgspec.structs.replace(each, **none) for each in (sent[0], same))
        assert len(set(map(msgspec.json.encode, rest))) == 1
    assert min(map(statuses.count, (200, 400))) > 20


@pytest.mark.parametrize(
    "hints", [{"expected_tool_duration_ms": -1}, {"expected_tool_duration_ms": "8"}, {"pin": 1}, 3]
)
async def test_other_hints_are_refused(tools_rig: Rig, hints: Any) -> None:
    body = asking("Sunny.", agent_hints=hints)
    answer = await tools_rig.http.post("/v1/messages", json=body)
    assert answer.status_code == 400


async def test_usage_has_the_tokens_that_the_tree_gained_and_served(
    tools_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = oracle_engine(monkeypatch)
    async with serving(tools_folder, Tokenizer.load(str(tools_folder)), engine=engine) as rig:
        cache = engine.core.scheduler.ranks[0].memory.cache
        page_size = cache.tree.page_size
        # None ends with a page: the last token, and so its page, is always computed.
        for text, is_new, ttl in (
            ("abc", True, None),
            ("abc", False, "1h"),
            ("abcdefg", True, "5m"),
            ("0123456", True, "1h"),
        ):
            before = cache.num_evictable[0] * page_size
            messages = [{"role": "user", "content": [marked(text, ttl)]}]
            body = asking("", messages=messages, max_tokens=0)
            answer = await rig.http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            await rig.until_idle()
            usage = answer.json()["usage"]
            num_prompt = sum(usage[name] for name in usage if name.endswith("input_tokens"))
            assert num_prompt % page_size
            created = usage["cache_creation_input_tokens"]
            assert created == cache.num_evictable[0] * page_size - before
            assert (created > 0) == is_new
            assert usage["cache_creation"] == {
                "ephemeral_5m_input_tokens": 0 if ttl == "1h" else created,
                "ephemeral_1h_input_tokens": created if ttl == "1h" else 0,
            }
            assert usage["cache_read_input_tokens"] == (0 if is_new else before)
