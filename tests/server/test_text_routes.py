"""Text to tokens and back: one text, several, conversations."""

from typing import Any

import pytest

from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi there"}]


@pytest.mark.parametrize("text", ["hello", "grüß dich", "", "long " * 1000])
async def test_a_text_comes_back_from_its_tokens(rig: Rig, text: str) -> None:
    told = (await rig.http.post("/tokenize", json={"prompt": text})).json()
    assert told["tokens"] == rig.front.tokenizer.encode(text)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 1024)
    back = (await rig.http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back == {"text": text, "prompt": text}
    assert rig.engine.seen == []


async def test_several_texts_are_answered_in_order(rig: Rig) -> None:
    texts = ["a", "bcd"]
    body = {"prompt": texts, "return_token_strs": True}
    told = (await rig.http.post("/tokenize", json=body)).json()
    assert told["count"] == [len(ids) for ids in told["tokens"]]
    assert ["".join(strings) for strings in told["token_strs"]] == texts
    back = (await rig.http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back["text"] == texts
    assert (await rig.http.post("/tokenize", json={"prompt": []})).json()["tokens"] == []


async def test_a_conversation_has_the_tokens_that_its_request_would_have(rig: Rig) -> None:
    told = (await rig.http.post("/tokenize", json={"messages": HI})).json()
    await rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1})
    (request,) = rig.engine.seen
    assert told["tokens"] == request.input_ids
    begun = [*HI, {"role": "assistant", "content": "hello"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    text = rig.front.tokenizer.decode(
        (await rig.http.post("/tokenize", json=body)).json()["tokens"]
    )
    assert text.endswith("hello")


async def test_special_tokens_can_be_kept(rig: Rig) -> None:
    special = min(rig.front.tokenizer.special_ids)
    ids = [special, *rig.front.tokenizer.encode("a")]
    assert (await rig.http.post("/detokenize", json={"tokens": ids})).json()["text"] == "a"
    kept = await rig.http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False})
    assert kept.json()["text"] == rig.front.tokenizer.decode(ids, skip_special_tokens=False) != "a"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "text"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_read_is_named(
    rig: Rig, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param)


async def test_the_tokenizer_tells_of_itself(rig: Rig) -> None:
    told = (await rig.http.get("/tokenizer_info")).json()
    assert told["chat_template"]
    assert told["eos_token_id"] == rig.front.tokenizer.eos_token_id
    assert told["vocab_size"] == rig.front.tokenizer.vocab_size
