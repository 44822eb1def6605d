"""Log-probabilities name each token by its own bytes, which joined are the text."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.support.tokenizers import byte_level, save, sentencepiece_like

pytestmark = pytest.mark.anyio
MAKERS = {"pieces": sentencepiece_like, "bytes": byte_level}
TEXT = "that is the true é and 東 😀 at the end"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(make(), tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(params=[*MAKERS])
async def rig(request: pytest.FixtureRequest, folders: dict[str, Path]) -> AsyncIterator[Rig]:
    folder = folders[request.param]
    async with serving(folder, Tokenizer.load(str(folder))) as rig:
        yield rig


async def choice(rig: Rig, route: str, **body: Any) -> dict[str, Any]:
    answer = await rig.http.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


async def test_the_bytes_of_chat_tokens_are_the_text(rig: Rig) -> None:
    messages = [{"role": "user", "content": TEXT}]
    made = await choice(rig, "chat/completions", messages=messages, logprobs=True, top_logprobs=5)
    special = [rig.front.tokenizer.token_bytes(i) for i in rig.front.tokenizer.special_ids]
    entries = [bytes(entry["bytes"]) for entry in made["logprobs"]["content"]]
    shown = b"".join(entry for entry in entries if entry not in special)
    assert shown.decode() == made["message"]["content"]
    assert TEXT in made["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 5 for entry in made["logprobs"]["content"])


@pytest.mark.parametrize("echo", [True, False])
async def test_offsets_of_completion_tokens_are_places_in_the_text(rig: Rig, *, echo: bool) -> None:
    size = len(rig.front.tokenizer.encode(TEXT))
    made = await choice(rig, "completions", prompt=TEXT, logprobs=5, max_tokens=2 * size, echo=echo)
    text, logprobs = made["text"], made["logprobs"]
    assert text.startswith(TEXT if echo else TEXT[:1] if text[0] != " " else f" {TEXT}")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        is_first = offset == 0 and echo
        wanted = token.lstrip() if is_first else token
        assert token.startswith("bytes:") or text[offset:].startswith(wanted)
    assert logprobs["text_offset"][-1] >= len(text) - 1
    tops = [top for top in logprobs["top_logprobs"] if top is not None]
    assert {len(top) for top in tops} == {5}  # though many byte tokens print alike
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top is None or token in top


async def test_tokens_with_one_text_keep_both_entries(folders: dict[str, Path]) -> None:
    folder = folders["pieces"]
    tokenizer = Tokenizer.load(str(folder))
    letter = tokenizer.encode("za")[-1]
    twin = tokenizer.encode("é")[-1] - 0xA9 + ord("a")  # <0x61>
    assert tokenizer.token_bytes(letter) == tokenizer.token_bytes(twin) == b"a"
    async with serving(folder, tokenizer) as rig:
        ranked = TokenLogprobs(twin, -2.0, [letter, twin], [-1.0, -2.0])
        rig.engine.logprobs = lambda request, token: ranked
        made = await choice(rig, "completions", prompt=[twin], logprobs=2, max_tokens=1)
    assert made["logprobs"]["tokens"] == ["a"]
    assert made["logprobs"]["top_logprobs"] == [{f"token_id:{letter}": -1.0, "a": -2.0}]
