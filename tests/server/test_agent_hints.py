"""What requests tell of their conversation's next one, and messages of the cache."""

from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest, Reuse
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.server.oracle_engine import oracle_engine
from tests.server.test_messages import DECLARED, asking

pytestmark = pytest.mark.anyio
HINTED = {"expected_tool_duration_ms": 1500, "workflow_id": "w", "reuse_hint": "keep"}


async def reuse_in(rig: Rig, headers: dict[str, str] | None = None, **body: Any) -> Reuse:
    rig.engine.seen.clear()
    answer = await rig.http.post("/v1/messages", json=asking("Sunny.", **body), headers=headers)
    assert answer.status_code == 200, answer.text
    (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
    return request.reuse


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
        for text, is_new in (("abc", True), ("abc", False), ("abcdefg", True)):
            before = cache.num_evictable[0] * page_size
            body = asking("", messages=[{"role": "user", "content": text}], max_tokens=0)
            answer = await rig.http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            await rig.until_idle()
            usage = answer.json()["usage"]
            num_prompt = sum(usage[name] for name in usage if name.endswith("input_tokens"))
            assert num_prompt % page_size
            created = usage["cache_creation_input_tokens"]
            assert created == cache.num_evictable[0] * page_size - before
            assert (created > 0) == is_new
            assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == created
            assert usage["cache_read_input_tokens"] == (0 if is_new else before)
