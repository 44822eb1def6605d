"""The table of limits is the one the server has, and each of them refuses."""

import asyncio
import dataclasses
import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.grammar import MAX_GRAMMAR_CHARS
from sgl_jax.core.request_limits import MAX_REQUESTS_PER_CALL
from sgl_jax.core.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROB_IDS
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.guards.limits import MAX_FIELDS, Limits
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import serving

TABLE = (Path(__file__).parents[2] / "docs" / "guide" / "limits.md").read_text()


def flag_of(limit: str) -> str | None:
    """The setting that a limit comes from; limits in seconds end in `_s`, settings do not."""
    flags = {field.name for field in dataclasses.fields(ServerArgs)}
    return limit.removesuffix("_s") if limit.removesuffix("_s") in flags else None


# Limits of no server in particular.
CONSTANTS = {
    "max_fields": (MAX_FIELDS, "fields of an object with fixed fields (400)"),
    "max_prompts": (MAX_REQUESTS_PER_CALL, "prompts, and choices of them, in a request (400)"),
    "max_token_ids_logprob": (
        MAX_LOGPROB_IDS,
        "ids of `token_ids_logprob`, for each prompt (400)",
    ),
    "max_grammar_chars": (
        MAX_GRAMMAR_CHARS,
        "characters of a schema, an expression or a grammar (400)",
    ),
    "max_logit_bias": (MAX_LOGIT_BIAS, "keys of `logit_bias` (400)"),
}


def test_the_table_lists_every_limit() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE)
    wanted = []
    for limit in dataclasses.fields(Limits):
        flag = flag_of(limit.name)
        shown = "-" if flag is None else f"`--{flag.replace('_', '-')}`"
        wanted.append((limit.name, f"{limit.default:,}", shown, limit.metadata["meaning"]))
    assert [row for row in rows if row[0] not in CONSTANTS] == wanted
    constants = {(name, f"{most:,}", "-", meaning) for name, (most, meaning) in CONSTANTS.items()}
    assert {row for row in rows if row[0] in CONSTANTS} == constants


def test_flags_have_the_defaults_of_the_limits() -> None:
    args = ServerArgs()
    for limit in dataclasses.fields(Limits):
        flag = flag_of(limit.name)
        if flag is not None:
            assert getattr(args, flag) == limit.default


def test_flags_set_them() -> None:
    args = ServerArgs(max_connections=7, max_body_bytes=5000, receive_timeout=3.0)
    limits = Limits.of(args, max_prompt_chars=10)
    assert (limits.max_connections, limits.receive_timeout_s) == (7, 3.0)
    for path in ("/generate", "/v1/chat/completions", "/open_session"):
        assert limits.body_bytes_of(path) == 5000


def test_a_chat_may_be_as_long_as_its_prompt() -> None:
    limits = Limits.of(ServerArgs(), max_prompt_chars=100_000)
    assert limits.body_bytes_of("/v1/chat/completions") == 2**20 + 600_000
    assert limits.body_bytes_of("/v1/completions") == 32 * 2**20
    assert limits.body_bytes_of("/close_session") == 65_536


async def refused(folder: Path, tokenizer: Tokenizer, body: Any, **limits: Any) -> tuple[int, str]:
    async with serving(folder, tokenizer, limits=limits) as rig:
        json_type = {"content-type": "application/json"}
        answer = await rig.http.post("/v1/completions", content=body, headers=json_type)
        assert rig.engine.seen == []
        assert (await rig.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        return answer.status_code, answer.json()["error"]["code"]


BODY = b'{"prompt": "' + b"x" * 200 + b'"}'


async def unannounced() -> AsyncIterator[bytes]:
    yield BODY[:150]
    yield BODY[150:]


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_beyond_its_route(
    announced: bool, model_folder: Path, tokenizer: Tokenizer
) -> None:
    body = BODY if announced else unannounced()
    answer = await refused(model_folder, tokenizer, body, max_body_bytes=100)
    assert answer == (413, "body_too_large")


@pytest.mark.anyio
async def test_bodies_beyond_what_is_held(model_folder: Path, tokenizer: Tokenizer) -> None:
    """One that is too long by itself is refused for good, one beside others for now."""
    answer = await refused(model_folder, tokenizer, BODY, max_held_body_bytes=100)
    assert answer == (413, "body_too_large")
    read, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield BODY[:150]
        read.set()
        await may_go_on.wait()
        yield BODY[150:]

    async with serving(model_folder, tokenizer, limits={"max_held_body_bytes": 300}) as rig:
        json_type = {"content-type": "application/json"}
        post = functools.partial(rig.http.post, "/v1/completions", headers=json_type)
        first = asyncio.create_task(post(content=slow()))
        await read.wait()
        second = await post(content=BODY)
        assert (second.status_code, second.json()["error"]["code"]) == (503, "too_many_bytes")
        may_go_on.set()
        assert (await first).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("limit", ["max_json_depth", "max_json_values", "max_json_keys"])
async def test_json_beyond_its_shape(limit: str, model_folder: Path, tokenizer: Tokenizer) -> None:
    body = b'{"prompt": "a", "metadata": {"a": [' + b"[[{}]]," * 50 + b"1]}}"
    answer = await refused(model_folder, tokenizer, body, **{limit: 4, "max_json_depth": 4})
    assert answer == (400, "too_complex")


@pytest.mark.anyio
async def test_many_fields_and_biases_are_refused_by_their_number(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        many = {f"field{number}": 1 for number in range(257)}
        answer = await rig.http.post("/v1/completions", json={"prompt": "a"} | many)
        assert answer.status_code == 400
        assert "at most 256 fields, got 258" in answer.json()["error"]["message"]
        for path, where in (("/v1/completions", "prompt"), ("/generate", "text")):
            bias = {"logit_bias": {str(number): "wrong" for number in range(65)}}
            nested = bias if where == "prompt" else {"sampling_params": bias}
            answer = await rig.http.post(path, json={where: "a"} | nested)
            assert answer.status_code == 400
            assert "at most 64 entries in logit_bias, got 65" in answer.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        *(("rid", "a"), ("extra_key", "a"), ("priority", 1), ("return_logprob", True)),
        *(("top_logprobs_num", 1), ("logprob_start_len", 0), ("sampling_params", {})),
        *(("image_data", ""), ("return_hidden_states", False)),
    ],
)
async def test_a_list_has_no_more_entries_than_there_may_be_prompts(
    name: str, entry: Any, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        answer = await rig.http.post("/generate", json={"text": "a", name: [entry] * 1025})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert "at most 1024" in error["message"]


@pytest.mark.anyio
async def test_stop_ids_are_few_and_a_message_lists_nothing(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        answer = await rig.http.post(
            "/v1/completions", json={"prompt": "a", "stop_token_ids": [1] * 257}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "stop_token_ids")
        assert "at most 256" in error["message"]
        message = {"role": "user", "content": "a", "tools": [{}]}
        answer = await rig.http.post("/v1/chat/completions", json={"messages": [message]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].tools"


@pytest.mark.anyio
async def test_a_prompt_beyond_its_characters(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(model_folder, tokenizer) as rig:
        text = "a" * (rig.front.checks.max_prompt_chars + 1)
        message = [{"role": "user", "content": text}]
        for path, body in (
            ("/generate", {"text": text}),
            ("/generate", {"text": ["a", text]}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"model": "default", "messages": message}),
        ):
            answer = await rig.http.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "characters" in error["message"]
            assert error["code"] == "context_length_exceeded"
        assert rig.engine.seen == []
