"""A model without a tokenizer is served by token ids; text is refused before it costs anything."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving, text_workers

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(tmp_path, Tokenizer.load(str(tmp_path))) as rig:
        yield rig
        assert text_workers(tmp_path).pid is None  # no worker was asked for


@pytest.mark.parametrize("num_chars", [5, 5_000, 100_000])
async def test_text_is_refused_and_ids_are_named(rig: Rig, num_chars: int) -> None:
    text = "a" * num_chars
    for path, body in (
        ("/generate", {"text": text}),
        ("/generate", {"text": ["a", text]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = await rig.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "this model has no tokenizer: send token ids" in answer.json()["error"]["message"]
    assert rig.engine.seen == []


async def test_ids_are_served(rig: Rig) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    answer = await rig.http.post("/generate", json=body)
    assert answer.json()["output_ids"] == [5, 6]
