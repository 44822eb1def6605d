"""The order of documents: their prompts, and the scores from the model's answer."""

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.server.apis.scores import RERANK_TEMPLATES
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import ScriptedEngine
from tests.server.conftest import Rig, serving, text_workers
from tests.support.tokenizers import byte_level, save

pytestmark = pytest.mark.anyio
ROUTE = "/v1/rerank"
DOCUMENTS = ["rain in May", "a long text about suns", "sun"]
BODY: dict[str, Any] = {"query": "What is {hot}?", "documents": DOCUMENTS}
# As on the page of Qwen3-Reranker.
PROMPT = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruct}
<Query>: What is {hot}?
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""


class JudgingEngine(ScriptedEngine):
    """It says yes to a prompt with a likelihood that falls with its length."""

    def logprobs(self, request: GenerateRequest, token: int) -> TokenLogprobs:
        length = len(request.input_ids)
        return TokenLogprobs(token, -0.5, [], [], [-length / 100, -1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    rust = byte_level()
    rust.add_tokens([AddedToken(text, normalized=False) for text in ("yes", "no")])
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = save(rust, tmp_path_factory.mktemp("reranker") / "model")
    yield folder
    text_workers(folder).close()


@pytest.fixture
async def ranker(folder: Path) -> AsyncIterator[Rig]:
    tokenizer, engine = Tokenizer.load(str(folder)), JudgingEngine(max_request_tokens=700)
    async with serving(folder, tokenizer, engine=engine, rerank_template="qwen3") as rig:
        yield rig


@pytest.mark.parametrize("route", [ROUTE, "/v2/rerank", "/rerank"])
async def test_documents_come_by_their_probability_of_yes(ranker: Rig, route: str) -> None:
    answer = await ranker.http.post(route, json=BODY)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    requests: list[GenerateRequest] = list(ranker.engine.seen)  # type: ignore[arg-type]
    tokenizer = ranker.front.tokenizer
    labels = [tokenizer.encode(text)[0] for text in ("yes", "no")]
    assert all(request.token_ids_logprob == labels for request in requests)
    instruct = RERANK_TEMPLATES["qwen3"].default_instruct
    assert [request.input_ids for request in requests] == [
        tokenizer.encode(
            PROMPT.replace("{instruct}", instruct).replace("{document}", document),
            add_special_tokens=False,
        )
        for document in DOCUMENTS
    ]
    results = told["results"]
    assert [result["index"] for result in results] == [2, 0, 1]
    assert [result["document"]["text"] for result in results] == ["sun", DOCUMENTS[0], DOCUMENTS[1]]
    for result in results:
        yes = math.exp(-len(requests[result["index"]].input_ids) / 100)
        assert result["relevance_score"] == pytest.approx(yes / (yes + math.exp(-1.0)))
    assert told["usage"]["prompt_tokens"] == sum(len(each.input_ids) for each in requests)


async def test_a_part_of_the_results_and_another_instruction(ranker: Rig) -> None:
    body = BODY | {"top_n": 1, "return_documents": False, "instruct": "Find {it}."}
    told = (await ranker.http.post(ROUTE, json=body)).json()
    (result,) = told["results"]
    assert result.keys() == {"index", "relevance_score"}
    (request, *_) = ranker.engine.seen
    assert isinstance(request, GenerateRequest)
    text = ranker.front.tokenizer.decode(request.input_ids, skip_special_tokens=False)
    assert "<Instruct>: Find {it}.\n" in text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["x"] * 1025}, "documents"),
        ({"documents": ["word " * 800]}, "documents"),
        ({"documents": "one"}, "documents"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_cannot_be_ranked_is_named(
    ranker: Rig, changes: dict[str, Any], param: str
) -> None:
    answer = await ranker.http.post(ROUTE, json=BODY | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert ranker.engine.seen == []


async def test_without_a_template_or_its_tokens_no_model_ranks(
    rig: Rig, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, rerank_template="qwen3") as other:
        for each, words in ((rig, "--rerank-template names"), (other, "'yes', an answer of")):
            answer = await each.http.post(ROUTE, json=BODY)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unsupported_task")
            assert words in error["message"]
            assert each.engine.seen == []
