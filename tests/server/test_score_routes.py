"""How likely tokens are after several texts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"query": "Is it so? ", "items": ["yes", "no!"], "label_token_ids": [5, 9]}


async def test_each_item_is_joined_with_the_query(rig: Rig) -> None:
    encode = rig.front.tokenizer.encode
    told = (await rig.http.post("/v1/score", json=BODY)).json()
    assert told["object"] == "scoring"
    assert len(told["scores"]) == 2
    assert all(0 < score < 1 for scores in told["scores"] for score in scores)
    prompts = [request.input_ids for request in rig.engine.seen]
    assert prompts == [encode("Is it so? yes"), encode("Is it so? no!")]
    assert told["usage"]["prompt_tokens"] == sum(map(len, prompts))
    rig.engine.seen.clear()
    assert (await rig.http.post("/score", json=BODY | {"item_first": True})).status_code == 200
    assert rig.engine.seen[0].input_ids == encode("yesIs it so? ")


async def test_token_ids_are_joined_as_they_are(rig: Rig) -> None:
    body = BODY | {"query": [5, 6], "items": [[7], [8, 9]]}
    assert (await rig.http.post("/v1/score", json=body)).status_code == 200
    assert [request.input_ids for request in rig.engine.seen] == [[5, 6, 7], [5, 6, 8, 9]]


async def test_labels_can_share_the_probability_among_themselves(rig: Rig) -> None:
    alone = (await rig.http.post("/v1/score", json=BODY)).json()["scores"]
    shared = (await rig.http.post("/v1/score", json=BODY | {"apply_softmax": True})).json()
    for scores, shares in zip(alone, shared["scores"], strict=True):
        assert shares == pytest.approx([score / sum(scores) for score in scores])


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/score", BODY), ("/v1/embeddings", {"input": ["a", "b"]})]
)
async def test_an_abort_meanwhile_is_a_503(
    model_folder: Path, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    is_embedding = path == "/v1/embeddings"
    async with serving(model_folder, tokenizer, is_embedding=is_embedding) as rig:
        rig.engine.stand_still()
        asked = asyncio.create_task(rig.http.post(path, json=body))
        await meanwhile_until(lambda: rig.front.num_open == 2, "the requests are sent")
        await rig.http.post("/abort_request", json={"abort_all": True})
        rig.engine.go_on()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [5] * 65}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"stream": True}, "stream"),
        ({"dp_rank": 99}, "dp_rank"),
    ],
)
async def test_what_cannot_be_scored_is_named(
    rig: Rig, changes: dict[str, Any], param: str
) -> None:
    answer = await rig.http.post("/v1/score", json=BODY | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_output_is_scored_token_by_token(rig: Rig) -> None:
    body: dict[str, Any] = {"input_ids": [5, 6], "output_ids": [7, 8, 9], "temperature": 0.7}
    told = (await rig.http.post("/score_tokens", json=body)).json()
    assert len(told["logprobs"]) == 3
    assert told["weight_version"] == "default"
    (sent,) = rig.engine.seen
    assert (sent.input_ids, sent.token_ids_logprob, sent.logprob_start_len) == (
        [5, 6, 7, 8],
        [9],
        2,
    )
    assert (sent.scores_output, sent.logprobs_mode) == (True, "scaled")
    assert (sent.sampling.temperature, sent.sampling.max_new_tokens) == (0.7, 1)
    pairs = {"input_ids": [[5], [6, 7]], "output_ids": [[8], [9, 10]], "logprobs_mode": "raw"}
    told = (await rig.http.post("/score_tokens", json=pairs)).json()
    assert [len(scores) for scores in told["logprobs"]] == [1, 2]
    assert told["weight_version"] == ["default", "default"]
    assert {request.logprobs_mode for request in rig.engine.seen[1:]} == {"raw"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"output_ids": []}, "output_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], [6]]}, "output_ids"),
        ({"input_ids": [[5]], "output_ids": [[6], [7]]}, "output_ids"),
        ({"input_ids": [5], "output_ids": [[6], [7]]}, "output_ids"),
        ({"input_ids": [5], "output_ids": [[]]}, "output_ids"),
        ({"output_ids": [10**6]}, "output_ids"),
        ({"top_p": 0.0}, "top_p"),
        ({"stream": True}, "stream"),
    ],
)
async def test_an_output_that_cannot_be_scored_is_named(
    rig: Rig, changes: dict[str, Any], param: str
) -> None:
    body = {"input_ids": [5], "output_ids": [6]} | changes
    answer = await rig.http.post("/score_tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
