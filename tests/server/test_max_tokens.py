"""A limit of output tokens above the room in the context is lowered, or refused by a flag."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving

pytestmark = pytest.mark.anyio

HEADER = "x-max-tokens-clamped"
HI = [{"role": "user", "content": "hi"}]
# Route -> its body with a limit of so many tokens, and the name of the limit.
BODIES: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": (lambda most: {"messages": HI, "max_tokens": most}, "max_tokens"),
    "/v1/completions": (lambda most: {"prompt": "hi", "max_tokens": most}, "max_tokens"),
    "/v1/responses": (
        lambda most: {"input": "hi", "max_output_tokens": most, "model": "default"},
        "max_output_tokens",
    ),
    "/v1/messages": (
        lambda most: {"messages": HI, "max_tokens": most, "model": "default"},
        "max_tokens",
    ),
    "/generate": (
        lambda most: {"text": "hi", "sampling_params": {"max_new_tokens": most}},
        "sampling_params.max_new_tokens",
    ),
}


@pytest.fixture
async def strict(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer, strict_max_tokens=True) as rig:
        yield rig


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_the_limit_is_lowered_to_the_room_and_a_header_has_it(
    rig: Rig, path: str, streams: bool
) -> None:
    make, _ = BODIES[path]
    answer = await rig.http.post(path, json=make(32_000) | {"stream": streams})
    assert answer.status_code == 200, answer.text
    (request,) = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    room = rig.front.facts.max_request_tokens - len(request.input_ids)
    assert request.sampling.max_new_tokens == room
    assert answer.headers[HEADER] == str(room)


@pytest.mark.parametrize("path", BODIES)
async def test_a_limit_with_room_is_kept(rig: Rig, path: str) -> None:
    make, _ = BODIES[path]
    answer = await rig.http.post(path, json=make(20))
    assert answer.status_code == 200
    assert HEADER not in answer.headers
    (request,) = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
    assert request.sampling.max_new_tokens == 20


async def test_the_least_limit_of_several_prompts_is_told(rig: Rig) -> None:
    body = {"prompt": [[5] * 50, [5] * 90, [5] * 10], "max_tokens": 32_000}
    answer = await rig.http.post("/v1/completions", json=body)
    assert answer.headers[HEADER] == str(rig.front.facts.max_request_tokens - 90)


@pytest.mark.parametrize("path", BODIES)
async def test_a_flag_makes_it_an_error(strict: Rig, path: str) -> None:
    make, name = BODIES[path]
    answer = await strict.http.post(path, json=make(32_000))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name.rpartition(".")[2] in error["message"]
    if path != "/v1/messages":
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert strict.engine.seen == []
    assert (await strict.http.post(path, json=make(20))).status_code == 200
