"""Embeddings over HTTP: what clients send, what reaches the engine, and what comes back."""

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import processors

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import scripted_hidden
from tests.models.golden_server import GOLDEN, TOLERANCE
from tests.server.conftest import Rig, served, serving, text_workers
from tests.server.oracle_engine import CoreEngine
from tests.support.embedding_models import save_base_model, write_modules
from tests.support.tokenizers import byte_level, save

pytestmark = pytest.mark.anyio
ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An embedding model whose tokenizer adds an end to each text, as Qwen3-Embedding's does."""
    rust = byte_level()
    end = "<s>"
    template = {"single": f"$A {end}", "special_tokens": [(end, rust.token_to_id(end))]}
    rust.post_processor = processors.TemplateProcessing(**template)
    folder = save(rust, tmp_path_factory.mktemp("embeddings") / "model")
    write_modules(folder)
    yield folder
    text_workers(folder).close()


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[tuple[Rig, openai.AsyncOpenAI]]:
    async with served(folder, tool="none") as rig_and_client:
        yield rig_and_client


@pytest.fixture
def embedder(client: tuple[Rig, openai.AsyncOpenAI]) -> Rig:
    return client[0]


def sent(rig: Rig) -> list[GenerateRequest]:
    return [message for message in rig.engine.seen if isinstance(message, GenerateRequest)]


def expected(request: GenerateRequest, dimensions: int | None = None) -> Any:
    hidden = np.frombuffer(scripted_hidden(request), "<f4")[:dimensions].astype(np.float64)
    return pytest.approx((hidden / np.linalg.norm(hidden)).tolist(), rel=1e-6)


@pytest.mark.parametrize(
    "given", ["a text", ["a", "few texts"], [70, 71, 72], [[70], [71, 72]]], ids=str
)
async def test_each_form_of_input_reaches_the_openai_client(
    client: tuple[Rig, openai.AsyncOpenAI], given: Any
) -> None:
    rig, openai_client = client
    answer = await openai_client.embeddings.create(model="default", input=given)
    requests = sent(rig)
    assert [each.index for each in answer.data] == list(range(len(requests)))
    for each, request in zip(answer.data, requests, strict=True):
        assert each.embedding == expected(request)
        assert request.is_prompt_only
        assert request.return_hidden
        assert request.sampling.max_new_tokens == 1
    num_tokens = sum(len(request.input_ids) for request in requests)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


async def test_the_tokenizers_end_is_the_pooled_token(embedder: Rig) -> None:
    tokenizer = embedder.front.tokenizer
    end = tokenizer.bos_token_id
    texts = ["short", "the " * 600]  # the second by a worker
    for text in texts:
        answer = await embedder.http.post(ROUTE, json={"input": text})
        assert answer.status_code == 200, answer.text
    ids = [request.input_ids for request in sent(embedder)]
    assert ids == [tokenizer.encode(text) for text in texts]
    assert [each[-1] for each in ids] == [end, end]


@pytest.mark.parametrize("route", [ROUTE, "/embeddings"])
async def test_floats_and_base64_are_the_same_numbers(embedder: Rig, route: str) -> None:
    body: dict[str, Any] = {"input": ["one", "two"], "dimensions": 2}
    floats = (await embedder.http.post(route, json=body)).json()
    encoded = (await embedder.http.post(route, json=body | {"encoding_format": "base64"})).json()
    assert floats["object"] == "list"
    assert floats["model"] == embedder.refs.model_name
    for number, text, request in zip(
        floats["data"], encoded["data"], sent(embedder)[:2], strict=True
    ):
        assert number["object"] == "embedding"
        assert number["embedding"] == expected(request, 2)
        decoded = np.frombuffer(base64.b64decode(text["embedding"]), "<f4")
        np.testing.assert_array_equal(decoded, np.float32(number["embedding"]))


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"input": []}, "input", "1 to 1024"),
        ({"input": ""}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a"] * 1025}, "input", "at most 1024 items"),
        ({"input": [[5]] * 1025}, "input", "at most 1024 items"),
        ({"input": [5] * 1000}, "input", "maximum context length is 1000"),
        ({"input": ["hi", [5]]}, "input[0]", ""),
        ({"input": [10**6]}, "input", "outside the vocabulary"),
        ({"dimensions": 5}, "dimensions", "[1, 4]"),
        ({"dimensions": 0}, "dimensions", ""),
        ({"encoding_format": "int8"}, "encoding_format", ""),
        ({"stream": True}, "stream", ""),
        ({"dp_rank": 99}, "dp_rank", ""),
        ({"truncate": True}, "truncate", ""),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_cannot_be_embedded_is_named(
    embedder: Rig, changes: dict[str, Any], param: str, words: str
) -> None:
    answer = await embedder.http.post(ROUTE, json={"input": "hi"} | changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert sent(embedder) == []


async def test_a_model_of_text_makes_no_embeddings_unless_told_to(
    rig: Rig, model_folder: Path, tokenizer: Tokenizer
) -> None:
    answer = await rig.http.post(ROUTE, json={"input": "hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_task")
    assert "generates text: its folder has no modules.json" in error["message"]
    async with serving(model_folder, tokenizer, is_embedding=True) as other:
        assert (await other.http.post(ROUTE, json={"input": "hi"})).status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_model_of_embeddings_generates_no_text(
    embedder: Rig, route: str, body: dict[str, Any]
) -> None:
    answer = await embedder.http.post(route, json=body)
    assert answer.status_code == 400
    assert "makes embeddings: it generates no text" in json.dumps(answer.json())
    assert sent(embedder) == []


async def test_keys_tenants_and_namespaces_are_those_of_other_routes(
    folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann a1\nbob b2\n")
    tokenizer = Tokenizer.load(str(folder))
    async with serving(folder, tokenizer, api_key_file=str(keys), isolate_tenants=True) as rig:
        assert (await rig.http.post(ROUTE, json={"input": "hi"})).status_code == 401
        for key in ("a1", "b2"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"input": "hi", "cache_salt": "mine"}
            answer = await rig.http.post(ROUTE, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        ann, bob = sent(rig)
        assert [request.tenant and request.tenant.name for request in (ann, bob)] == ["ann", "bob"]
        assert len({ann.namespace, bob.namespace, "mine", ""}) == 4


@pytest.mark.long
@pytest.mark.parametrize("warmup", ["none", "staged"])
async def test_a_real_models_embeddings_are_those_of_transformers(
    tmp_path: Path, warmup: str
) -> None:
    folder = save_base_model(tmp_path / "base", tie_word_embeddings=False)
    write_modules(folder)
    settings = {"page_size": 4, "max_total_tokens": 480, "chunked_prefill_size": 16}
    args = ServerArgs(model_path=str(folder), device="cpu", warmup=warmup, **settings)  # type: ignore[arg-type]
    stored = np.load(GOLDEN / "qwen3" / "embeddings.npz")
    prompts = np.split(stored["prompts"], np.cumsum(stored["lens"])[:-1])
    core = EngineCore(args)
    async with serving(folder, Tokenizer.load(str(folder)), engine=CoreEngine(core)) as rig:
        body = {"input": [prompt.tolist() for prompt in prompts]}
        for _ in range(2):
            answer = await rig.http.post(ROUTE, json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            found = np.array([each["embedding"] for each in answer.json()["data"]])
            np.testing.assert_allclose(found, stored["embeddings"], rtol=0, atol=TOLERANCE)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert core.info["hidden_size"] == 64
    text_workers(folder).close()
