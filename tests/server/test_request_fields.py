"""Every field that OpenAI's and SGLang's clients know is taken; what is not there is refused."""

import typing
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from scripts import make_request_fields
from sgl_jax.core.messages import FrontMessage, GenerateRequest
from sgl_jax.core.sampling_params import choice_seed
from sgl_jax.server.apis.completions import CompletionRequest
from sgl_jax.server.apis.native import GenerateBody, NativeSampling
from sgl_jax.server.chat_request import ChatRequest
from sgl_jax.server.strict_model import StrictModel
from tests.server import known_fields
from tests.server.conftest import Rig

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi there"}]
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": HI}, known_fields.CHAT),
    "/v1/completions": ({"prompt": "hello"}, known_fields.COMPLETION),
    "/generate": ({"text": "hello"}, known_fields.GENERATE),
}


def sent(rig: Rig) -> list[GenerateRequest]:
    return [message for message in rig.engine.seen if isinstance(message, GenerateRequest)]


@pytest.mark.parametrize("path", ROUTES)
async def test_all_fields_at_harmless_values_change_nothing(rig: Rig, path: str) -> None:
    prompt, fields = ROUTES[path]
    answer = await rig.http.post(path, json={**prompt, **fields})
    assert answer.status_code == 200, answer.text
    (request,) = sent(rig)
    assert (request.namespace, request.dp_rank, request.sampling.stop_token_ids) == ("", 0, ())
    assert request.sampling.seed == (5 if path == "/generate" else 1)


@pytest.mark.parametrize("path", ROUTES)
async def test_each_field_alone_is_taken(rig: Rig, path: str) -> None:
    prompt, fields = ROUTES[path]
    refused = {}
    for name, value in fields.items():
        answer = await rig.http.post(path, json={**prompt, name: value, **_one_token(path, name)})
        if answer.status_code != 200:
            refused[name] = answer.text
    assert refused == {}


def _one_token(path: str, name: str) -> dict[str, Any]:
    if path == "/generate":
        return {} if name == "sampling_params" else {"sampling_params": {"max_new_tokens": 1}}
    return {} if name in ("max_tokens", "max_completion_tokens") else {"max_tokens": 1}


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_not_there_is_refused_by_name(rig: Rig, path: str) -> None:
    prompt, _ = ROUTES[path]
    for name, value in known_fields.REFUSED[path].items():
        answer = await rig.http.post(path, json={**prompt, name: value})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert error["param"] == name
        assert name in error["message"]
    assert [m for m in rig.engine.seen if not _has_grammar(m)] == []


def _has_grammar(message: FrontMessage) -> bool:
    """Only the engine can refuse a grammar."""
    return isinstance(message, GenerateRequest) and message.sampling.grammar is not None


def _named(*models: type[StrictModel]) -> set[str]:
    return {name for model in models for name in (*model.model_fields, *model.unserved)}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openais_own_types_is_known(body: type[StrictModel], params: type) -> None:
    documented = set(typing.get_type_hints(params))
    assert len(documented) > 10
    assert documented - _named(body) == set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_answer_has_the_name_of_the_request(rig: Rig, path: str) -> None:
    prompt, _ = ROUTES[path]
    for rid in ("mine", ["mine"]):
        answer = await rig.http.post(path, json={**prompt, "rid": rid, "max_tokens": 1})
        assert answer.json()["id"] == "mine"
    streamed = await rig.http.post(path, json={**prompt, "rid": "mine", "stream": True})
    assert '"id":"mine"' in streamed.text
    unnamed = await rig.http.post(path, json={**prompt, "max_tokens": 1})
    assert unnamed.json()["id"].startswith(("chatcmpl-", "cmpl-"))


async def test_names_and_namespaces_may_be_one_for_each_prompt(rig: Rig) -> None:
    body = {"prompt": ["a", "b"], "rid": ["x", "y"], "extra_key": ["k", "l"], "max_tokens": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    assert [(r.rid.split("#")[0], r.namespace) for r in sent(rig)] == [("x", "k"), ("y", "l")]


async def test_all_names_of_the_rank_are_one(rig: Rig) -> None:
    for name in ("dp_rank", "routed_dp_rank", "data_parallel_rank"):
        body = {"text": "hi", name: 1, "sampling_params": {"max_new_tokens": 1}}
        assert (await rig.http.post("/generate", json=body)).status_code == 200
    assert [request.dp_rank for request in sent(rig)] == [1, 1, 1]


async def test_log_probabilities_may_be_asked_for_by_prompt(rig: Rig) -> None:
    body = {
        "input_ids": [[70, 71], [72, 73]],
        "return_logprob": [True, False],
        "logprob_start_len": [0, 0],
        "top_logprobs_num": [2, 3],
        "token_ids_logprob": [[5, 6, 5], [7]],
        "sampling_params": {"max_new_tokens": 1},
    }
    first, second = (await rig.http.post("/generate", json=body)).json()
    assert len(first["meta_info"]["input_token_logprobs"]) == 2
    assert len(first["meta_info"]["output_top_logprobs"][0]) == 2
    assert [e[1] for e in first["meta_info"]["output_token_ids_logprobs"][0]] == [5, 6, 5]
    assert first["meta_info"]["input_token_ids_logprobs"][0] is None
    assert [e[0] for e in first["meta_info"]["input_token_ids_logprobs"][1]] == [-5.5, -6.5, -5.5]
    assert "output_token_logprobs" not in second["meta_info"]
    assert "output_token_ids_logprobs" not in second["meta_info"]
    asked = [(r.return_logprob, r.logprob_start_len, r.top_logprobs_num) for r in sent(rig)]
    assert asked == [(True, 0, 2), (False, -1, 0)]


@pytest.mark.parametrize(
    ("path", "usual"),
    [("/generate", "scaled"), ("/v1/completions", "raw"), ("/v1/chat/completions", "raw")],
)
async def test_log_probabilities_are_of_the_mode_asked_for_or_the_apis(
    rig: Rig, path: str, usual: str
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    if path != "/v1/chat/completions":
        body = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}[path]
    for mode in (None, "raw", "scaled", "processed"):
        answer = await rig.http.post(path, json=body | {"logprobs_mode": mode})
        assert answer.status_code == 200
    modes = [request.logprobs_mode for request in sent(rig)]
    assert modes == [usual, "raw", "scaled", "processed"]
    answer = await rig.http.post(path, json=body | {"logprobs_mode": "hot"})
    assert answer.status_code == 400
    assert "'raw', 'scaled' or 'processed'" in answer.json()["error"]["message"]


async def test_named_tokens_of_all_prompts_and_answers(rig: Rig) -> None:
    body = {"text": ["a", "bc"], "sampling_params": {"n": 2, "max_new_tokens": 3}}
    body |= {"return_logprob": True, "token_ids_logprob": [8, 1]}
    for answer in (await rig.http.post("/generate", json=body)).json():
        told = answer["meta_info"]["output_token_ids_logprobs"]
        assert told == [[[-8.5, 8, None], [-1.5, 1, None]]] * 3
        assert "input_token_ids_logprobs" not in answer["meta_info"]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5, 512], "must be in [0, 511], got 512"),
        ([-1], "greater than or equal to 0"),
        (list(range(65)), "at most 64"),
        ([[5], [6]], "2 entries for 1 prompts"),
        (5, "list"),
    ],
)
async def test_tokens_that_cannot_be_named(rig: Rig, ids: Any, reason: str) -> None:
    body = {"text": "a", "return_logprob": True, "token_ids_logprob": ids}
    answer = await rig.http.post("/generate", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert reason in error["message"]
    assert error["param"].startswith("token_ids_logprob")


async def test_several_answers_to_each_prompt_of_generate(rig: Rig) -> None:
    body = {"text": ["a", "bc"], "sampling_params": {"n": 2, "max_new_tokens": 1, "seed": 7}}
    answers = (await rig.http.post("/generate", json=body)).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    prompts = [rig.front.tokenizer.decode(request.input_ids) for request in sent(rig)]
    assert prompts == ["a", "a", "bc", "bc"]
    assert [request.sampling.seed for request in sent(rig)] == [7, choice_seed(7, 1)] * 2
    one = {"text": "a", "sampling_params": {"n": 3, "max_new_tokens": 1}}
    assert len((await rig.http.post("/generate", json=one)).json()) == 3


async def test_token_ids_and_meta_info_are_told_where_they_are_asked_for(rig: Rig) -> None:
    ids = rig.front.tokenizer.encode("hello")
    wanted = {"return_token_ids": True, "max_tokens": 2}
    answer = await rig.http.post("/v1/completions", json={"prompt": "hello", **wanted})
    (choice,) = answer.json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, (ids * 2)[:2])
    answer = await rig.http.post(
        "/v1/chat/completions", json={"messages": HI, "return_meta_info": True, **wanted}
    )
    (choice,) = answer.json()["choices"]
    (request,) = sent(rig)[1:]
    assert choice["prompt_token_ids"] == request.input_ids
    assert len(choice["response_token_ids"]) == choice["meta_info"]["completion_tokens"] == 2
    native = {"text": "hello", "return_prompt_token_ids": True}
    assert (await rig.http.post("/generate", json=native)).json()["prompt_token_ids"] == ids
    for name in ("return_token_ids", "return_meta_info", "return_prompt_token_ids"):
        body = {"messages": HI, "stream": True, name: True}
        refused = await rig.http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_native_sampling_knows_what_openais_bodies_know() -> None:
    assert set(known_fields.SAMPLING) - _named(NativeSampling) == set()
    assert set(known_fields.GENERATE) - _named(GenerateBody) == set()


def test_the_page_of_all_fields_is_up_to_date() -> None:
    assert make_request_fields.TARGET.read_text() == make_request_fields.render(), (
        "run python scripts/make_request_fields.py"
    )
