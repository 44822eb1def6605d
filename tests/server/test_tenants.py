"""Namespaces and priorities over HTTP: what reaches the engine from each route."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sgl_jax.core.messages import GenerateRequest, OpenSession
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    GENERATE: {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
}
FIELD = {CHAT: "cache_salt", COMPLETIONS: "cache_salt", GENERATE: "extra_key"}


@pytest.fixture
async def rig(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer) as rig:
        yield rig


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
        base_url="http://test/v1", api_key="none", http_client=rig.http, max_retries=0
    )
    await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        extra_body={"cache_salt": "t", "priority": 2},
    )
    assert sent(rig) == [("t", 2)]
