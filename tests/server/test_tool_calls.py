"""Tools and reasoning in chats, as OpenAI's client sees them.

The scripted engine answers with what the chat template writes first, up to the end of a message:
here the first message, so each conversation begins with what the model shall say.
"""

import itertools
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.formats.tool_formats import TOOL_FORMATS
from sgl_jax.text.reader import Arguments, CallBegun, Content, Event, Reasoning
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import ROOM, prompt_of, served, serving
from tests.server.server_process import SCRIPTED, running_server
from tests.text.recorded_answers import ANSWERS, PARIS, TOOLS

pytestmark = pytest.mark.anyio

DECLARED: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in TOOLS.items()
]
# Formats with and without special tokens, ids of their own, and reasoning.
FORMATS = ("hermes", "qwen3_coder", "mistral since 2025", "kimi_k2", "glm45", "gpt-oss", "pythonic")


def says(text: str) -> dict[str, Any]:
    """The body of a chat that is answered with `text`."""
    return {"model": "default", "messages": [{"role": "user", "content": text}]}


def told(events: list[Event]) -> dict[str, Any]:
    """What the message of these events has."""
    calls: list[dict[str, str]] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append({"name": event.name, "arguments": ""})
        elif isinstance(event, Arguments):
            calls[-1]["arguments"] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return {
        "content": None if calls and not content else content,
        "reasoning_content": reasoning or None,
        "calls": calls,
    }


async def whole(client: openai.AsyncOpenAI, **body: Any) -> tuple[dict[str, Any], str]:
    (choice,) = (await client.chat.completions.create(**body)).choices
    message = choice.message
    calls = [call.to_dict()["function"] for call in message.tool_calls or []]
    reasoning = (message.model_extra or {}).get("reasoning_content")
    found = {"content": message.content, "reasoning_content": reasoning, "calls": calls}
    return found, str(choice.finish_reason)


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> tuple[dict[str, Any], str]:
    """The message put together from a stream, whose chunks must have OpenAI's shapes."""
    chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, str]] = []
    for delta in deltas(chunks):
        for name in texts:
            texts[name] += getattr(delta, name, None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                assert call.type == "function"
                assert call.id
                assert call.function.arguments == ""
                calls.append({"name": call.function.name, "arguments": ""})
            else:
                assert call.index == len(calls) - 1
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[-1]["arguments"] += call.function.arguments
    assert [delta.role for delta in deltas(chunks)] == ["assistant"] + [None] * (len(chunks) - 1)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert set(reasons[:-1]) <= {None}
    found = {
        "content": texts["content"] or (None if calls else ""),
        "reasoning_content": texts["reasoning_content"] or None,
        "calls": calls,
    }
    return found, str(reasons[-1])


def deltas(chunks: list[ChatCompletionChunk]) -> list[Any]:
    return [chunk.choices[0].delta for chunk in chunks]


@pytest.mark.parametrize("name", FORMATS)
async def test_calls_are_told_whole_and_in_a_stream(tools_folder: Path, name: str) -> None:
    answer = ANSWERS[name]
    assert answer.tool is not None
    async with served(tools_folder, answer.tool, answer.reasoning or "none") as (_, client):
        body = says(answer.text) | {"tools": DECLARED}
        assert await whole(client, **body) == (told(answer.events), "tool_calls")
        assert await streamed(client, **body) == (told(answer.events), "tool_calls")


async def test_ids_are_such_as_the_models_template_takes(tools_folder: Path) -> None:
    for name, length in {"hermes": len("call_") + 24, "mistral": 9}.items():
        answer = ANSWERS[name]
        async with served(tools_folder, answer.tool or "") as (_, client):
            body = says(answer.text) | {"tools": DECLARED}
            message = (await client.chat.completions.create(**body)).choices[0].message
        ids = [call.id for call in message.tool_calls or []]
        assert len(set(ids)) == 2
        assert {len(each) for each in ids} == {length}
    kimi = ANSWERS["kimi_k2"]
    async with served(tools_folder, "kimi_k2", "kimi") as (_, client):
        body = says(kimi.text) | {"tools": DECLARED}
        message = (await client.chat.completions.create(**body)).choices[0].message
    ids = [call.id for call in message.tool_calls or []]
    assert ids == ["functions.get_weather:0", "functions.now:1"]


async def test_the_model_is_told_of_tools_calls_and_their_results(tools_folder: Path) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "index": 0,
        "function": {"name": "get_weather", "arguments": PARIS},
    }
    messages = [
        *says("ok")["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    async with served(tools_folder) as (rig, client):
        found, reason = await whole(client, model="default", messages=messages, tools=DECLARED)
        assert (found["content"], reason) == ("ok", "stop")
        assert prompt_of(rig) == (
            "get_weather: 2; now: 0; <|assistant|>get_weather(Paris)=c1</s>"
            "<|tool|>rainc1</s><|assistant|>"
        )


async def test_with_tool_choice_none_the_model_is_not_told(tools_folder: Path) -> None:
    text = ANSWERS["hermes"].text
    async with served(tools_folder) as (rig, client):
        found, reason = await whole(client, **says(text), tools=DECLARED, tool_choice="none")
        assert (found["content"], found["calls"], reason) == (text, [], "stop")
        assert prompt_of(rig) == "<|assistant|>"


async def test_without_parallel_calls_only_the_first_is_handed_out(tools_folder: Path) -> None:
    answer = ANSWERS["hermes"]
    async with served(tools_folder) as (_, client):
        body = says(answer.text) | {"tools": DECLARED, "parallel_tool_calls": False}
        first = told(answer.events)["calls"][:1]
        assert (await whole(client, **body))[0]["calls"] == first
        assert (await streamed(client, **body))[0]["calls"] == first


async def test_a_call_that_is_cut_off_ends_with_length(tools_folder: Path) -> None:
    async with served(tools_folder) as (_, client):
        body = says('<tool_call>{"name": "now", "arguments": {"a": 1}}') | {"tools": DECLARED}
        found, reason = await streamed(client, **body, max_tokens=45)
        assert reason == "length"
        assert '{"a": 1}'.startswith(found["calls"][0]["arguments"])


async def test_a_call_that_a_stop_string_cuts_off_ends_with_stop(tools_folder: Path) -> None:
    """`tool_calls` would say that the arguments are whole."""
    calls = [f'<tool_call>{{"name": "now", "arguments": {{"a": "{n}"}}}}</tool_call>' for n in "12"]
    body = says("".join(calls)) | {"tools": DECLARED}
    async with served(tools_folder) as (_, client):
        for say in (whole, streamed):
            for stop, num_calls in {"now": 0, "1": 1, "2": 2}.items():
                found, reason = await say(client, **body, stop=stop)
                assert (len(found["calls"]), reason) == (num_calls, "stop")
            assert (await say(client, **body, stop="</tool_call>"))[1] == "tool_calls"
            found, reason = await say(client, **body, stop="2", parallel_tool_calls=False)
            assert (len(found["calls"]), reason) == (1, "tool_calls")


async def test_no_event_of_a_stream_is_empty(tools_folder: Path) -> None:
    text = ANSWERS["hermes"].text
    async with served(tools_folder) as (_, client):
        body = says(text) | {"tools": DECLARED, "stream": True}
        chunks = [chunk async for chunk in await client.chat.completions.create(**body)]
        amid = [chunk.choices[0].delta for chunk in chunks[1:-1]]
        assert all(delta.content or delta.tool_calls for delta in amid)
        counts: Any = {"stream_options": {"continuous_usage_stats": True}}
        counted = [
            chunk async for chunk in await client.chat.completions.create(**body, extra_body=counts)
        ]
        assert len(counted) > len(chunks)
        assert all(chunk.usage for chunk in counted)


async def test_reasoning_may_begin_in_the_prompt_and_may_stay_in_content(
    tools_folder: Path,
) -> None:
    body = says("It rains.\n</think>\n\nTake a coat.")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    apart = {"content": "Take a coat.", "reasoning_content": "It rains.", "calls": []}
    async with served(tools_folder, "none", "qwen3") as (_, client):
        assert await whole(client, **body, extra_body=thinking) == (apart, "stop")
        assert await streamed(client, **body, extra_body=thinking) == (apart, "stop")
        found, _ = await whole(client, **body)
        assert found["content"] == "It rains.\n</think>\n\nTake a coat."
        together = {**thinking, "separate_reasoning": False}
        found, _ = await whole(client, **body, extra_body=together)
        assert found["reasoning_content"] is None
        assert found["content"] == "It rains.\n</think>\n\nTake a coat."


async def test_what_is_forced_comes_after_the_reasoning(tools_folder: Path) -> None:
    """By the prompt: closed, opened, or neither."""
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
    required = {"tools": DECLARED, "tool_choice": "required"}
    forced: tuple[dict[str, Any], ...] = (required, {"response_format": schema})
    tails = {None: ("<think>", "</think>"), True: ("", "</think>"), False: None}
    async with served(tools_folder, "hermes", "qwen3") as (rig, client):
        for body, (is_thinking, marks) in itertools.product(forced, tails.items()):
            template_args = {} if is_thinking is None else {"enable_thinking": is_thinking}
            extra: Any = {"extra_body": {"chat_template_kwargs": template_args}}
            await whole(client, **says("x"), **body, **extra)
            request = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)][-1]
            assert request.sampling.grammar is not None
            assert request.sampling.grammar.reasoning == marks
        await whole(client, **says("x"))
        request = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)][-1]
        assert request.sampling.reasoning is None


@pytest.mark.parametrize("tool_format", [*TOOL_FORMATS, "gpt-oss"])
async def test_calls_can_be_forced_and_strict(tools_folder: Path, tool_format: str) -> None:
    strict: list[Any] = [
        {**tool, "function": {**tool["function"], "strict": True}} for tool in DECLARED
    ]
    async with served(tools_folder, tool_format) as (rig, client):
        await whole(client, **says("x"), tools=DECLARED, tool_choice="required")
        await whole(client, **says("x"), tools=strict)
        requests = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
        assert len(requests) == 2
        for request in requests:
            assert "get_weather" in (request.sampling.ebnf or "")


@pytest.mark.parametrize("open_json_objects", [False, True])
async def test_arguments_are_closed_unless_the_server_opens_them(
    tools_folder: Path, open_json_objects: bool
) -> None:
    async with served(tools_folder, open_json_objects=open_json_objects) as (rig, client):
        await whole(client, **says("x"), tools=DECLARED, tool_choice="required")
        (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
        weather = next(
            each for each in (request.sampling.ebnf or "").splitlines() if "city" in each
        )
        assert ("additionalProperties" in weather) is not open_json_objects


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_some_of_the_tools_can_be_allowed(tools_folder: Path, mode: str) -> None:
    def choice(*names: str) -> Any:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    async with served(tools_folder) as (rig, client):
        found, reason = await whole(client, **says("x"), tools=DECLARED, tool_choice=choice("now"))
        assert (found["content"], reason) == ("x", "stop")  # the scripted engine heeds no grammar
        assert prompt_of(rig) == "get_weather: 2; now: 0; <|assistant|>"
        (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
        grammar = request.sampling.ebnf or ""
        assert "now" in grammar
        assert "get_weather" not in grammar
        assert ("text" in grammar) == (mode == "auto")
        for names in ((), ("now", "then")):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await whole(client, **says("x"), tools=DECLARED, tool_choice=choice(*names))


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_tools_whose_calls_cannot_be_held_are_refused(
    tools_folder: Path, choice: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}
    function = {"name": "f", "parameters": schema, "strict": True}
    async with served(tools_folder, "glm45") as (_, client):
        with pytest.raises(openai.BadRequestError, match="each that is required"):
            await whole(
                client,
                **says("x"),
                tools=[{"type": "function", "function": function}],
                tool_choice=choice,
            )


async def test_special_tokens_that_no_format_reads_stay_out_of_the_text(
    tools_folder: Path,
) -> None:
    async with served(tools_folder) as (_, client):
        found, _ = await whole(client, **says("a<|end|>b[TOOL_CALLS]c"), tools=DECLARED)
        assert found["content"] == "abc"
    async with served(tools_folder, "mistral") as (_, client):
        body = says("a<|end|>b[TOOL_CALLS]c")
        found, _ = await whole(client, **body, tools=DECLARED)
        assert found["content"] == "ab[TOOL_CALLS]c"
        found, _ = await whole(client, **body)
        assert found["content"] == "abc"


async def test_log_probabilities_of_a_call_all_come(tools_folder: Path) -> None:
    async with served(tools_folder) as (_, client):
        body = says(ANSWERS["hermes"].text) | {"tools": DECLARED, "logprobs": True}
        answer = (await client.chat.completions.create(**body)).choices[0]
        assert answer.logprobs is not None
        assert answer.logprobs.content is not None
        chunks = [
            chunk async for chunk in await client.chat.completions.create(**body, stream=True)
        ]
        streamed_tokens = [
            entry.token
            for chunk in chunks
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content or []
        ]
        assert streamed_tokens == [entry.token for entry in answer.logprobs.content]


async def test_what_cannot_be_served_is_refused_by_name(tools_folder: Path) -> None:
    named = {"type": "function", "function": {"name": "unheard_of"}}
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}]
    good_call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": DECLARED, "tool_choice": named}),
        ("tools", {"tools": broken, "tool_choice": "required"}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": [good_call]}]}),
        ("messages[0].content", {"messages": [{"role": "assistant"}]}),
    ]
    async with served(tools_folder) as (rig, _):
        for param, body in refused:
            answer = await rig.http.post("/v1/chat/completions", json=says("x") | body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tools_need_a_parser_and_a_template(
    tools_folder: Path, model_folder: Path, tokenizer: Tokenizer
) -> None:
    body = says("x") | {"tools": DECLARED}
    async with served(tools_folder, "none") as (rig, _):
        answer = await rig.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "--tool-call-parser" in answer.json()["error"]["message"]
    async with serving(model_folder, tokenizer, tool_call_parser="hermes") as rig:
        answer = await rig.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]


@pytest.mark.long
def test_a_server_by_its_flags_serves_a_whole_exchange(tools_folder: Path) -> None:
    flags = ("--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi")
    with running_server(SCRIPTED, tools_folder, *flags, "--context-length", str(ROOM)) as server:
        server.wait_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        body = says(ANSWERS["kimi_k2"].text) | {"tools": DECLARED}
        first = client.chat.completions.create(**body)
        message = first.choices[0].message
        calls = message.tool_calls or []
        assert [call.id for call in calls] == ["functions.get_weather:0", "functions.now:1"]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        body["messages"] += [message, *results]
        again = client.chat.completions.create(**body)
        assert again.choices[0].finish_reason == "tool_calls"
        assert again.usage is not None
        assert first.usage is not None
        assert again.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("tool_format", [*TOOL_FORMATS, "gpt-oss"])
async def test_an_answer_held_to_a_schema_may_be_a_call(
    tools_folder: Path, tool_format: str, is_strict: bool
) -> None:
    """Agents with a type of result send both in each turn."""
    tools: list[Any] = [
        {**tool, "function": {**tool["function"], "strict": is_strict}} for tool in DECLARED
    ]
    schema = {"type": "object", "properties": {"coat": {"type": "boolean"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    seen = {}
    async with served(tools_folder, tool_format) as (rig, client):
        for choice in ("auto", "required", "none"):
            body = {"tools": tools, "tool_choice": choice, "response_format": wanted}
            await whole(client, **says("x"), **body)
            request = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)][-1]
            assert request.sampling.grammar is not None
            text = request.sampling.grammar.text
            seen[choice] = ("get_weather" in text, "coat" in text)
    assert seen == {"auto": (True, True), "required": (True, False), "none": (False, True)}


async def test_a_schema_holds_where_a_format_has_no_grammar_of_the_tools(
    tools_folder: Path,
) -> None:
    """Only strict tools are refused then."""
    wanted: Any = {"type": "json_object"}
    for strict in (False, True):
        function = {"name": "find it", "parameters": {"type": "object"}, "strict": strict}
        body: Any = {"tools": [{"type": "function", "function": function}]}
        async with served(tools_folder, "qwen3_coder") as (rig, client):
            asked = client.chat.completions.create(**says("x"), **body, response_format=wanted)
            if strict:
                with pytest.raises(openai.BadRequestError, match="find it"):
                    await asked
                continue
            await asked
            (request,) = (m for m in rig.engine.seen if isinstance(m, GenerateRequest))
            assert request.sampling.json_schema is not None
