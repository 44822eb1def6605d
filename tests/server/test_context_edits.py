"""`context_management` of Anthropic's Messages API: old results and thinking are cleared."""

from typing import Any

import pytest

from sgl_jax.server.apis.context_edits import ClearThinking
from sgl_jax.server.apis.messages import MessagesBody
from tests.server.conftest import Rig, prompt_of
from tests.server.test_agent_bodies import body_of, events_in
from tests.server.test_messages import ROUTE, answer_to

pytestmark = pytest.mark.anyio

CLEARED = "[Old tool result cleared]"
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def turn(number: int) -> list[dict[str, Any]]:
    """A question, a call with thinking, its result with a text beside it, and an answer."""
    use = {"type": "tool_use", "id": f"id{number}", "name": f"f{number}", "input": {"city": "Rome"}}
    result = {
        "type": "tool_result",
        "tool_use_id": f"id{number}",
        "content": f"result {number} " * 5,
    }
    note = {"type": "text", "text": "A note."}
    return [
        {"role": "user", "content": f"question {number}"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": f"plan {number}", "signature": ""}, use],
        },
        {"role": "user", "content": [result, note]},
        {"role": "system", "content": "hint"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": f"check {number}", "signature": ""},
                {"type": "text", "text": f"answer {number}"},
            ],
        },
    ]


def conversation(num_turns: int, **edits: Any) -> dict[str, Any]:
    messages = [each for number in range(num_turns) for each in turn(number)]
    return {
        "model": "default",
        "max_tokens": 5,
        "system": "Sunny.",
        "messages": [*messages, {"role": "user", "content": "last"}],
        "context_management": edits,
    }


async def test_keep_all_and_no_edits_change_nothing(tools_rig: Rig) -> None:
    body = conversation(3)
    del body["context_management"]
    told = await answer_to(tools_rig, body)
    assert "context_management" not in told
    plain = prompt_of(tools_rig)
    keeps: list[Any] = [[], None, [{"type": THINKING, "keep": "all"}]]
    for edits in [*keeps, [{"type": THINKING, "keep": {"type": "all"}}], [{"type": TOOL_USES}]]:
        tools_rig.engine.seen.clear()
        told = await answer_to(tools_rig, conversation(3, edits=edits))
        assert told["context_management"] == {"applied_edits": []}
        assert prompt_of(tools_rig) == plain


async def test_old_results_are_cleared_if_the_prompt_is_long(tools_rig: Rig) -> None:
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "input_tokens", "value": 50},
        "keep": {"type": "tool_uses", "value": 1},
        "exclude_tools": ["f1"],
        "clear_tool_inputs": ["f2"],
    }
    told = await answer_to(tools_rig, conversation(4, edits=[edit]))
    (applied,) = told["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == (TOOL_USES, 2)
    assert applied["cleared_input_tokens"] > 0
    prompt = prompt_of(tools_rig)
    assert prompt.count(CLEARED) == 2
    assert [f"result {number}" in prompt for number in range(4)] == [False, True, False, True]
    assert [f"f{number}(Rome)" in prompt for number in range(4)] == [True, True, False, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"trigger": {"type": "input_tokens", "value": 990}},
        {"trigger": {"type": "tool_uses", "value": 4}},
        {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 4}},
        {
            "trigger": {"type": "tool_uses", "value": 1},
            "clear_at_least": {"type": "input_tokens", "value": 900},
        },
    ],
    ids=["tokens", "uses", "all kept", "too few"],
)
async def test_results_stay_below_the_limits_of_the_edit(tools_rig: Rig, fields: Any) -> None:
    told = await answer_to(tools_rig, conversation(4, edits=[{"type": TOOL_USES, **fields}]))
    assert told["context_management"]["applied_edits"] == []
    assert CLEARED not in prompt_of(tools_rig)


@pytest.mark.parametrize("num_kept", [None, 1, 2, 9])
async def test_thinking_of_old_turns_is_cleared(tools_rig: Rig, num_kept: int | None) -> None:
    edit: dict[str, Any] = {"type": THINKING}
    if num_kept:
        edit["keep"] = {"type": "thinking_turns", "value": num_kept}
    told = await answer_to(tools_rig, conversation(3, edits=[edit]))
    num_cleared = max(3 - (num_kept or 1), 0)
    applied = told["context_management"]["applied_edits"]
    assert [each["cleared_thinking_turns"] for each in applied] == [num_cleared] * bool(num_cleared)
    # The template of these tests leaves all thinking out.
    chat = MessagesBody.model_validate(conversation(3)).chat()
    messages, _ = ClearThinking.model_validate(edit).edit(chat.messages)
    thoughts = [each.reasoning_content for each in messages if each.role == "assistant"]
    kept = [f"{word} {number}" for number in range(num_cleared, 3) for word in ("plan", "check")]
    assert thoughts == [None] * (2 * num_cleared) + kept


async def test_both_edits_apply_in_a_stream_and_come_at_its_end(tools_rig: Rig) -> None:
    edits = [
        {"type": THINKING},
        {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}},
    ]
    answer = await tools_rig.http.post(ROUTE, json=conversation(4, edits=edits) | {"stream": True})
    events = events_in(answer.text)
    assert "context_management" not in events[0]["message"]
    (ending,) = (event for event in events if event["type"] == "message_delta")
    assert [each["type"] for each in ending["context_management"]["applied_edits"]] == [
        THINKING,
        TOOL_USES,
    ]


async def test_a_prompt_is_cleared_that_would_be_too_long(tools_rig: Rig) -> None:
    edit = {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}}
    body = conversation(4, edits=[edit])
    body["messages"][2]["content"][0]["content"] = "x" * 2000
    told = await answer_to(tools_rig, body)
    assert told["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
    del body["context_management"]
    assert (await tools_rig.http.post(ROUTE, json=body)).status_code == 400


async def test_tokens_are_counted_after_the_edits(tools_rig: Rig) -> None:
    body = conversation(4)
    for name in ("context_management", "max_tokens"):
        del body[name]
    plain = (await tools_rig.http.post(f"{ROUTE}/count_tokens", json=body)).json()
    edit = {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}}
    body["context_management"] = {"edits": [edit]}
    counted = (await tools_rig.http.post(f"{ROUTE}/count_tokens", json=body)).json()
    assert counted["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    assert counted["input_tokens"] < plain["input_tokens"]


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "compact_20260112"},
        {"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}},
        {"type": THINKING, "counts": "x"},
        {"type": TOOL_USES, "keep": {"type": "input_tokens", "value": 3}},
    ],
)
async def test_other_edits_are_refused(tools_rig: Rig, edit: Any) -> None:
    answer = await tools_rig.http.post(ROUTE, json=conversation(1, edits=[edit]))
    assert answer.status_code == 400
    assert "context_management.edits[0]" in answer.json()["error"]["message"]


async def test_claude_code_sends_an_edit_that_clears_nothing(tools_rig: Rig) -> None:
    body = body_of("claude_code-first") | {"stream": False, "tools": []}
    told = await answer_to(tools_rig, body | {"max_tokens": 5})
    assert told["context_management"] == {"applied_edits": []}
