"""A request whose results are not finite, as the clients of each API see it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import Running
from tests.server.conftest import Rig, serving

pytestmark = pytest.mark.anyio
NOT_FINITE = FinishReason(
    "abort", message="not finite (NaN)", status_code=500, code="internal_server_error"
)
CHAT = [{"role": "user", "content": "hello there"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello there"},
    "/v1/completions": {"prompt": "hello there"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hello there"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 20, "model": "scripted"},
}


@pytest.fixture
async def rig(model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with serving(model_folder, tokenizer) as rig:

        def finish(running: Running, token: int) -> FinishReason | None:
            return NOT_FINITE if running.num_output_tokens == 3 else None

        rig.engine.finish = finish
        yield rig


@pytest.mark.parametrize("path", REQUESTS)
async def test_it_is_answered_with_a_500(rig: Rig, path: str) -> None:
    answer = await rig.http.post(path, json=REQUESTS[path])
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert "not finite" in error["message"]
    if path != "/v1/messages":  # Anthropic's errors have no code
        assert (error["type"], error["code"]) == ("server_error", "internal_server_error")
    await rig.until_idle()


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_stream_ends_with_an_error_event(rig: Rig, path: str) -> None:
    rig.engine.step_s = 0.05  # so that the stream has begun when it ends
    answer = await rig.http.post(path, json=REQUESTS[path] | {"stream": True})
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert "not finite" in json.dumps(last)
    assert "[DONE]" not in answer.text
    await rig.until_idle()
