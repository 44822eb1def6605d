"""Bodies that no client should send, with the answer each of them deserves.

Data only: run in-process by `test_malformed_bodies.py`, and against live servers elsewhere.
"""

import json
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
JSON = "application/json"

HI = [{"role": "user", "content": "hi"}]


class Malformed(NamedTuple):
    """One request, the status of its answer, and the field that the answer names."""

    name: str
    path: str
    body: bytes
    param: str | None
    status: int = 400
    content_type: str | None = JSON


def chat(name: str, param: str | None, status: int = 400, **fields: Any) -> Malformed:
    body = {"model": "default", "messages": HI} | fields
    return Malformed(f"chat: {name}", CHAT, json.dumps(body).encode(), param, status)


def complete(name: str, param: str | None, status: int = 400, **fields: Any) -> Malformed:
    body = {"model": "default", "prompt": "hi"} | fields
    return Malformed(f"completions: {name}", COMPLETIONS, json.dumps(body).encode(), param, status)


def generate(name: str, param: str | None, status: int = 400, **fields: Any) -> Malformed:
    return Malformed(f"generate: {name}", GENERATE, json.dumps(fields).encode(), param, status)


def sample(name: str, param: str, **sampling: Any) -> Malformed:
    return generate(name, f"sampling_params.{param}", text="hi", sampling_params=sampling)


def in_session(
    name: str, param: str, sampling: dict[str, Any] | None = None, **session: Any
) -> Malformed:
    return generate(
        f"session, {name}", param, text="hi", session_params=session, sampling_params=sampling
    )


def ask(path: str, name: str, param: str | None, **fields: Any) -> Malformed:
    return Malformed(f"{path}: {name}", f"/{path}", json.dumps(fields).encode(), param)


def raw(name: str, body: bytes, content_type: str | None = JSON) -> Malformed:
    return Malformed(f"raw: {name}", COMPLETIONS, body, None, 400, content_type)


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"} | fields]


MALFORMED = [
    # Not JSON, or not the JSON that was asked for
    raw("empty body", b""),
    raw("half an object", b'{"prompt": "hi"'),
    raw("trailing comma", b'{"prompt": "hi",}'),
    raw("two objects", b'{"prompt": "hi"}{"prompt": "hi"}'),
    raw("null", b"null"),
    raw("a number", b"17"),
    raw("a string", b'"hi"'),
    raw("a list", b'[{"prompt": "hi"}]'),
    raw("NaN", b'{"prompt": "hi", "temperature": NaN}'),
    raw("NaN in a field without effect", b'{"prompt": "hi", "metadata": {"a": NaN}}'),
    raw("Infinity", b'{"prompt": "hi", "temperature": Infinity}'),
    raw("minus Infinity", b'{"prompt": "hi", "logit_bias": {"1": -Infinity}}'),
    raw("a number beyond doubles", b'{"prompt": "hi", "temperature": 1e999}'),
    raw("an integer of 5,000 digits", b'{"prompt": "hi", "seed": ' + b"1" * 5000 + b"}"),
    raw("not UTF-8", b'{"prompt": "\xff\xfe"}'),
    raw("Latin-1", b'{"prompt": "caf\xe9"}'),
    raw("UTF-16", '{"prompt": "hi"}'.encode("utf-16")),
    raw("a raw null byte", b'{"prompt": "h\x00i"}'),
    raw("a raw newline in a string", b'{"prompt": "h\ni"}'),
    raw("half of a surrogate pair, and a raw null byte", b'{"prompt": "\\ud800 h\x00i"}'),
    raw("100,000 open brackets", b"[" * 100_000),
    raw("nested too deeply", b'{"prompt":' * 5000),
    raw("single quotes", b"{'prompt': 'hi'}"),
    raw("a comment", b'{"prompt": "hi"} // please'),
    raw("a form", b"prompt=hi", "application/x-www-form-urlencoded"),
    raw("JSON called text", b'{"prompt": "hi"}', "text/plain"),
    raw("JSON called nothing", b'{"prompt": "hi"}', None),
    # Chat
    chat("no messages", "messages", messages=None),
    chat("an empty list of messages", "messages", messages=[]),
    chat("messages as a string", "messages", messages="hi"),
    chat("a message as a string", "messages[0]", messages=["hi"]),
    chat("a message without a role", "messages[0].role", messages=[{"content": "hi"}]),
    chat("a message without content", "messages[0].content", messages=[{"role": "user"}]),
    chat("content null", "messages[0].content", messages=message(content=None)),
    chat("content a number", "messages[0].content", messages=message(content=3)),
    chat("an unknown role", "messages[0].role", messages=message(role="wizard")),
    chat("a role in the wrong case", "messages[0].role", messages=message(role="User")),
    chat("an unknown field in a message", "messages[0].mood", messages=message(mood="glad")),
    chat(
        "an image",
        "messages",
        messages=message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
    ),
    chat(
        "audio",
        "messages[0].content[1]",
        messages=message(content=[{"type": "text", "text": "hi"}, {"type": "input_audio"}]),
    ),
    chat(
        "a text part without text",
        "messages[0].content[0].text",
        messages=message(content=[{"type": "text"}]),
    ),
    chat("a tool of another type", "tools[0].type", tools=[{"type": "web_search"}]),
    chat("a forced tool", "tool_choice", tool_choice="required"),
    chat("functions", "functions", functions=[{"name": "f"}]),
    chat("an unknown format", "response_format.type", response_format={"type": "yaml"}),
    chat("a format without its schema", "response_format", response_format={"type": "json_schema"}),
    chat(
        "a schema that is none",
        "response_format",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "thing"}},
        },
    ),
    chat("two grammars", "ebnf", regex="a", ebnf="root ::= 'a'"),
    chat("audio output", "modalities", modalities=["audio"]),
    chat("max_tokens below 0", "max_tokens", max_tokens=-1),
    chat("max_tokens as a string", "max_tokens", max_tokens="5"),
    chat("max_tokens as a fraction", "max_tokens", max_tokens=1.5),
    chat("max_tokens true", "max_tokens", max_tokens=True),
    chat("max_completion_tokens 0", "max_completion_tokens", max_completion_tokens=0),
    chat("more tokens than fit", "max_tokens", max_tokens=2**40),
    chat(
        "more completion tokens than fit",
        "max_completion_tokens",
        max_completion_tokens=2**40,
    ),
    chat("n 0", "n", n=0),
    chat("n 1,000", "n", n=1000),
    chat("stream as a string", "stream", stream="true"),
    chat("stream_options as a list", "stream_options", stream_options=[]),
    chat("an unknown stream option", "stream_options.fast", stream_options={"fast": True}),
    chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=2),
    chat("a salt of 257 characters", "cache_salt", cache_salt="s" * 257),
    chat("a salt as a number", "cache_salt", cache_salt=5),
    chat("salts for two prompts", "cache_salt", cache_salt=["s", "t"]),
    chat("another salt under SGLang's name", "extra_key", extra_key="s", cache_salt="t"),
    chat("two ranks", "routed_dp_rank", dp_rank=0, routed_dp_rank=1),
    chat("a priority of 32 bits", "priority", priority=2**31),
    chat("a priority as a string", "priority", priority="1"),
    chat("a priority true", "priority", priority=True),
    complete("a salt of 257 characters", "cache_salt", cache_salt="s" * 257),
    complete("a priority below 32 bits", "priority", priority=-(2**31) - 1),
    complete("a priority as a fraction", "priority", priority=0.5),
    generate("a key of 257 characters", "extra_key", text="hi", extra_key="s" * 257),
    generate("a key too many", "extra_key", text=["hi", "ho"], extra_key=["a", "b", "c"]),
    generate("a list of keys, one a number", "extra_key[1]", text=["a", "b"], extra_key=["a", 5]),
    generate("a key too long in a list", "extra_key[0]", text=["a"], extra_key=["s" * 257]),
    generate(
        "another key under OpenAI's name", "extra_key", text="hi", extra_key="a", cache_salt="s"
    ),
    generate("a priority of 40 bits", "priority", text="hi", priority=2**40),
    generate("a priority too few", "priority", text=["hi", "ho"], priority=[1]),
    generate("a list of priorities, one a string", "priority[0]", text=["hi"], priority=["1"]),
    chat("21 top_logprobs", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("logprobs as a number", "logprobs", logprobs=3),
    chat("an unknown field", "temprature", temprature=0.5),
    chat("another model", "model", 404, model="gpt-17"),
    chat("model as a number", "model", model=4),
    # Sampling
    chat("temperature below 0", "temperature", temperature=-0.1),
    chat("temperature as a string", "temperature", temperature="hot"),
    chat("temperature as a list", "temperature", temperature=[1]),
    chat("top_p 0", "top_p", top_p=0),
    chat("top_p above 1", "top_p", top_p=1.1),
    chat("top_k -2", "top_k", top_k=-2),
    chat("top_k beyond 64 bits", "top_k", top_k=2**70),
    chat(
        "a template of the client's own",
        "messages",
        chat_template_kwargs={"chat_template": "{% for a in range(9) %}{{ a }}{% endfor %}"},
    ),
    chat("min_p above 1", "min_p", min_p=2),
    chat("frequency_penalty 3", "frequency_penalty", frequency_penalty=3),
    chat("presence_penalty -3", "presence_penalty", presence_penalty=-3),
    chat("repetition_penalty 0", "repetition_penalty", repetition_penalty=0),
    chat("a seed of 70 bits", "seed", seed=2**70),
    chat("an empty stop string in a list", "stop[0]", stop=[""]),
    chat("17 stop strings", "stop", stop=["x"] * 17),
    chat("stop as a number", "stop", stop=3),
    chat("logit_bias for a word", "logit_bias", logit_bias={"hello": 1}),
    chat("logit_bias beyond the vocabulary", "logit_bias", logit_bias={"999999999": 1}),
    chat("logit_bias of 101", "logit_bias.5", logit_bias={"5": 101}),
    chat("logit_bias as a list", "logit_bias", logit_bias=[1]),
    chat("min_tokens above max_tokens", "min_tokens", max_tokens=2, min_tokens=3),
    chat("dp_rank 9,999", "dp_rank", dp_rank=9999),
    # Completions
    complete("no prompt", "prompt", prompt=None),
    complete("an empty prompt", "prompt", prompt=""),
    complete("an empty list", "prompt", prompt=[]),
    complete("a list with an empty prompt", "prompt", prompt=["hi", ""]),
    complete("an empty list of ids in a list", "prompt", prompt=[[5], []]),
    complete("prompt as a number", "prompt", prompt=5),
    complete("prompt as an object", "prompt", prompt={"text": "hi"}),
    complete("a negative token id", "prompt[0]", prompt=[-1]),
    complete("a token id beyond the vocabulary", "prompt", prompt=[10**9]),
    complete("a token id of 100 digits", "prompt", prompt=[10**99]),
    complete("a prompt that is too long", "prompt", prompt=[5] * 300_000),
    complete("a text that is too long", "prompt", prompt="word " * 400_000),
    complete("best_of above n", "best_of", best_of=2),
    complete("a suffix", "suffix", suffix="end"),
    complete("logprobs true", "logprobs", logprobs=True),
    complete("21 logprobs", "logprobs", logprobs=21),
    complete("max_tokens 0 without echo", "max_tokens", max_tokens=0),
    complete("max_tokens below 0", "max_tokens", max_tokens=-1),
    complete("n times prompts beyond the limit", "prompt", prompt=["a"] * 100, n=100),
    # /generate
    generate("neither text nor ids", "text"),
    generate("both text and ids", "text", text="hi", input_ids=[5]),
    generate("an empty text", "text", text=""),
    generate("an empty list of texts", "text", text=[]),
    generate("empty ids", "input_ids", input_ids=[]),
    generate("text as a number", "text", text=5),
    in_session("no id", "session_params.id"),
    in_session("an empty id", "session_params.id", id=""),
    in_session("an id of 257 characters", "session_params.id", id="s" * 257),
    in_session("id as a number", "session_params.id", id=5),
    in_session("an empty rid", "session_params.rid", id="s", rid=""),
    in_session("a rid of 257 characters", "session_params.rid", id="s", rid="x" * 257),
    in_session("offset as a string", "session_params.offset", id="s", offset="5"),
    in_session("an offset of 40 bits", "session_params.offset", id="s", offset=2**40),
    in_session("an offset beyond the context", "session_params.offset", id="s", offset=10**9),
    in_session("replace as a number", "session_params.replace", id="s", replace=1),
    in_session("an unknown field", "session_params.branch", id="s", branch="x"),
    generate("session_params as a string", "session_params", text="hi", session_params="s"),
    generate("a list of session_params", "session_params", text="hi", session_params=[{"id": "s"}]),
    generate("several prompts for a session", "text", text=["a", "b"], session_params={"id": "s"}),
    generate("an empty rid", "rid", text="hi", rid=""),
    generate("a rid of 257 characters", "rid", text="hi", rid="x" * 257),
    generate("two names for one prompt", "rid", text="hi", rid=["a", "b"]),
    generate("an unknown field", "lora_path", text="hi", lora_path="x"),
    generate("images", "image_data", text="hi", image_data="x"),
    generate("21 top_logprobs", "top_logprobs_num", text="hi", top_logprobs_num=21),
    generate(
        "logprob_start_len beyond the prompt",
        "logprob_start_len",
        input_ids=[5],
        return_logprob=True,
        logprob_start_len=2,
    ),
    generate("sampling_params as a string", "sampling_params", text="hi", sampling_params="hot"),
    generate("two samplings for one prompt", "sampling_params", text="a", sampling_params=[{}, {}]),
    sample("an unknown sampling parameter", "temprature", temprature=1),
    sample("a schema that is none", "json_schema", json_schema="{"),
    sample("a regular expression that is none", "regex", regex="(a"),
    sample("a grammar with a minimum of tokens", "min_new_tokens", regex="a", min_new_tokens=2),
    sample("max_new_tokens below 0", "max_new_tokens", max_new_tokens=-1),
    sample("more tokens than fit", "min_new_tokens", max_new_tokens=10**6, min_new_tokens=10**6),
    sample("an integer of 80 bits", "max_new_tokens", max_new_tokens=2**80),
    sample("temperature below 0", "temperature", temperature=-1),
    sample("top_p as a string", "top_p", top_p="0.5"),
    sample("no answers", "n", n=0),
    sample("129 answers", "n", n=129),
    sample("65 biases", "logit_bias", logit_bias={str(i): 0 for i in range(65)}),
    generate(
        "prompts times n beyond the limit", "text", text=["a"] * 9, sampling_params={"n": 128}
    ),
    generate(
        "other numbers of answers",
        "sampling_params",
        text=["a", "b"],
        sampling_params=[{"n": 1}, {"n": 2}],
    ),
    generate("another model", "model", 404, text="hi", model="gpt-17"),
    in_session("two answers", "sampling_params.n", {"n": 2}, id="s"),
    # Sessions
    chat("two answers in a session", "n", session_id="s", n=2),
    chat("an empty session_id", "session_id", session_id=""),
    chat("session_id as a number", "session_id", session_id=7),
    chat("session_params in chat", "session_params", session_params={"id": "s"}),
    complete("two answers in a session", "n", session_params={"id": "s"}, n=2),
    complete("two prompts in a session", "prompt", session_params={"id": "s"}, prompt=["a", "b"]),
    complete("an echo in a session", "echo", session_params={"id": "s"}, echo=True),
    complete("a session without an id", "session_params.id", session_params={}),
    ask("open_session", "capacity below 0", "capacity_of_str_len", capacity_of_str_len=-1),
    ask("open_session", "capacity as a string", "capacity_of_str_len", capacity_of_str_len="9"),
    ask("open_session", "capacity of 40 bits", "capacity_of_str_len", capacity_of_str_len=2**40),
    ask("open_session", "an empty id", "session_id", session_id=""),
    ask("open_session", "an id of 257 characters", "session_id", session_id="s" * 257),
    ask("open_session", "streaming as a string", "streaming", streaming="yes"),
    ask("open_session", "timeout 0", "timeout", timeout=0),
    ask("open_session", "timeout below 0", "timeout", timeout=-1.5),
    ask("open_session", "timeout as a string", "timeout", timeout="5"),
    ask("open_session", "a timeout of 317 years", "timeout", timeout=1e10),
    ask("open_session", "an unknown field", "mode", mode="fast"),
    ask("open_session", "a key of 257 characters", "extra_key", extra_key="s" * 257),
    ask("open_session", "a salt as a list", "cache_salt", cache_salt=["s"]),
    ask("open_session", "two names", "extra_key", extra_key="a", cache_salt="b"),
    ask("close_session", "no id", "session_id"),
    ask("close_session", "id as a list", "session_id", session_id=["s"]),
    ask("rollback_session", "no number of turns", "num_turns", session_id="s"),
    ask("rollback_session", "turns below 0", "num_turns", session_id="s", num_turns=-1),
    ask("rollback_session", "turns as a fraction", "num_turns", session_id="s", num_turns=1.5),
    ask("rollback_session", "turns of 40 bits", "num_turns", session_id="s", num_turns=2**40),
    ask("fork_session", "no id", "session_id"),
    ask("fork_session", "an empty new id", "new_session_id", session_id="s", new_session_id=""),
]
