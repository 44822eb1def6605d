"""SGLang's own API."""

import asyncio
import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.engine_messages import FinishReason, OutputBatch, RequestOutput, WeightsChanged
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.server.apis import native
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import HIDDEN_SIZE, LOGPROB, NUM_LAYERS, TOP_K
from tests.server.conftest import Rig, serving
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio


async def generate(rig: Rig, **fields: Any) -> Any:
    answer = await rig.http.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.json()
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_text_is_continued(rig: Rig) -> None:
    answer = await generate(rig, text="hello", sampling_params={"max_new_tokens": 3}, rid="me")
    meta = answer["meta_info"]
    assert answer["text"] == rig.front.tokenizer.decode(answer["output_ids"])
    assert meta["id"] == "me"
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 3
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["e2e_latency"] > 0
    assert {"prompt_tokens", "cached_tokens", "dp_rank"} <= set(meta)


async def test_an_answer_says_which_weights_its_tokens_are_of(rig: Rig) -> None:
    rig.engine.step_s = 0.005
    asked = generate(rig, input_ids=[70], sampling_params={"max_new_tokens": 40}, stream=True)
    answering = asyncio.create_task(asked)
    streams = rig.front._streams
    await meanwhile_until(
        lambda: any(each.num_output_tokens >= 5 for each in streams.values()), "it has output"
    )
    rig.front.handle(WeightsChanged(version="2", kept_rids=[*streams, "gone"]))
    metas = [each["meta_info"] for each in await answering]
    assert (metas[0]["weight_version"], metas[-1]["weight_version"]) == ("default", "2")
    (first, last) = metas[-1]["weight_versions"]
    assert 5 <= first["end"] < 40
    assert first == {"version": "default", "start": 0, "end": first["end"]}
    assert last == {"version": "2", "start": first["end"], "end": 40}
    assert metas[-1]["has_old_kv"]
    assert "weight_versions" not in metas[0]
    (answer,) = await generate(rig, input_ids=[[70]], sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 1}]
    assert "has_old_kv" not in answer["meta_info"]


async def test_weights_without_a_token_are_not_named(rig: Rig) -> None:
    """An update retracts a request, which is then aborted."""
    body = {"input_ids": [70], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    rig.engine.step_s = 0.005
    answering = asyncio.create_task(generate(rig, **body))
    streams = rig.front._streams
    await meanwhile_until(
        lambda: any(each.num_output_tokens >= 5 for each in streams.values()), "it has output"
    )
    rig.front.handle(WeightsChanged(version="2", kept_rids=[]))
    (stream,) = streams.values()
    finish = FinishReason("abort", message="the weights were updated")
    rid = stream.request.rid
    end = RequestOutput(rid, token_ids=[], cached_tokens=0, dp_rank=0, finish=finish)
    rig.front.handle(OutputBatch(outputs=[end]))
    meta = (await answering)["meta_info"]
    span = {"version": "default", "start": 0, "end": meta["completion_tokens"]}
    assert (meta["weight_version"], meta["weight_versions"]) == ("default", [span])


async def test_a_stream_repeats_all_so_far(rig: Rig) -> None:
    rig.engine.step_s = 0.005
    answers = await generate(
        rig, input_ids=[70, 71, 72], sampling_params={"max_new_tokens": 20}, stream=True
    )
    assert len(answers) > 5
    for before, after in pairwise(answers):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    last = answers[-1]
    assert last["output_ids"] == ([70, 71, 72] * 7)[:20]
    assert last["text"] == rig.front.tokenizer.decode(last["output_ids"])
    assert last["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_list_gets_a_list(rig: Rig) -> None:
    answers = await generate(
        rig,
        text=["a", "b"],
        rid=["first", "second"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "sampling_seed": 9}],
    )
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [1, 2]
    assert [a["meta_info"]["id"] for a in answers] == ["first", "second"]
    assert [m.sampling.seed for m in rig.engine.seen if isinstance(m, GenerateRequest)] == [None, 9]
    only = await generate(rig, input_ids=[[70]], sampling_params={"max_new_tokens": 1})
    assert len(only) == 1


async def test_a_streamed_list_says_whose_event_it_is(rig: Rig) -> None:
    answers = await generate(
        rig, text=["a", "b"], sampling_params={"max_new_tokens": 4}, stream=True
    )
    assert {a["index"] for a in answers} == {0, 1}


async def test_logprobs_are_triples(rig: Rig) -> None:
    answer = await generate(
        rig,
        input_ids=[70, 71],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    text = rig.front.tokenizer.decode([70])
    assert meta["output_token_logprobs"][0] == [LOGPROB, 70, text]
    assert meta["output_top_logprobs"][0] == [[LOGPROB, 70, text]]
    assert meta["input_token_logprobs"][0] == [None, 70, text]
    assert meta["input_top_logprobs"][0] is None
    plain = await generate(rig, input_ids=[70], sampling_params={"max_new_tokens": 1})
    assert "output_token_logprobs" not in plain["meta_info"]
    short = await generate(
        rig, input_ids=[70], sampling_params={"max_new_tokens": 1}, return_logprob=True
    )
    assert short["meta_info"]["output_token_logprobs"] == [[LOGPROB, 70, None]]
    assert "input_token_logprobs" not in short["meta_info"]


async def test_experts_are_base64(model_folder: Path, tokenizer: Tokenizer) -> None:
    """From the start to the last token but one, also if a stop string cuts the output."""
    async with serving(model_folder, tokenizer, enable_return_routed_experts=True) as rig:
        text = rig.front.tokenizer.decode([72])
        asked = {"input_ids": [70, 71, 72], "return_routed_experts": True}
        sampling = {"max_new_tokens": 5}
        (whole, tail) = await generate(
            rig,
            input_ids=[[70, 71, 72]] * 2,
            sampling_params=sampling,
            return_routed_experts=True,
            routed_experts_start_len=[0, 2],
        )
        *first, last = await generate(rig, **asked, sampling_params=sampling, stream=True)
        cut = await generate(rig, **asked, sampling_params=sampling | {"stop": text})
        plain = await generate(rig, input_ids=[70], sampling_params=sampling)
        refused = {"input_ids": [70], "return_routed_experts": True, "routed_experts_start_len": 2}
        refusal = await rig.http.post("/generate", json=refused)
    assert experts_of(whole) == list(range(7))
    assert experts_of(tail) == list(range(2, 7))
    assert experts_of(last) == list(range(7))
    assert not any("routed_experts" in event["meta_info"] for event in [*first, plain])
    assert experts_of(cut) == list(range(3 + len(cut["output_ids"]) - 1))
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == "routed_experts_start_len"


def experts_of(answer: Any) -> list[int]:
    data = base64.b64decode(answer["meta_info"]["routed_experts"], validate=True)
    experts = np.frombuffer(data, "<i4").reshape(-1, NUM_LAYERS * TOP_K)
    assert (experts == experts[:, :1]).all()
    positions: list[int] = experts[:, 0].tolist()
    return positions


async def test_hidden_states_are_lists(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the prompt together, then that of each output token but the last."""
    sampling = {"max_new_tokens": 3}
    asked = {"return_hidden_states": True, "sampling_params": sampling}
    async with serving(model_folder, tokenizer, enable_return_hidden_states=True) as rig:
        whole, plain = await generate(
            rig,
            input_ids=[[70, 71, 72], [70]],
            sampling_params=sampling,
            return_hidden_states=[True, False],
        )
        *first, last = await generate(rig, input_ids=[70, 71, 72], stream=True, **asked)
        monkeypatch.setattr(native, "_MOST_HIDDEN_NUMBERS", 11 * HIDDEN_SIZE)
        fits = await generate(rig, input_ids=[[70, 71, 72], [70, 71]], **asked)
        both = {"input_ids": [[70, 71, 72], [70, 71, 73]], **asked}
        refusal = await rig.http.post("/generate", json=both)
        turn = {"input_ids": [70], "session_params": {"id": "s"}, **asked}
        of_turn = (await rig.http.post("/generate", json=turn)).json()["error"]
        most = rig.front.facts.max_request_tokens
    vectors = [[float(position)] * HIDDEN_SIZE for position in range(5)]
    for answer in (whole, last, fits[0]):
        assert answer["meta_info"]["hidden_states"] == [vectors[:3], *vectors[3:]]
    assert not any("hidden_states" in event["meta_info"] for event in [*first, plain])
    error = refusal.json()["error"]
    assert (refusal.status_code, error["param"]) == (400, "return_hidden_states")
    assert f"12 tokens of prompts and outputs may have {12 * HIDDEN_SIZE}" in error["message"]
    assert of_turn["param"] == "return_hidden_states"
    assert f"{most} tokens of prompts and outputs may" in of_turn["message"]  # with its history


async def test_servers_without_hidden_states_say_so(rig: Rig) -> None:
    refusal = await rig.http.post(
        "/generate", json={"input_ids": [70], "return_hidden_states": True}
    )
    assert refusal.status_code == 400
    assert "--enable-return-hidden-states" in refusal.json()["error"]["message"]


async def test_servers_without_experts_say_so(rig: Rig) -> None:
    body = {"input_ids": [70], "return_routed_experts": True}
    refusal = await rig.http.post("/generate", json=body)
    assert refusal.status_code == 400
    assert "--enable-return-routed-experts" in refusal.json()["error"]["message"]


async def test_an_abort_by_name_ends_the_request(rig: Rig) -> None:
    rig.engine.step_s = 0.01
    running = asyncio.create_task(
        rig.http.post("/generate", json={"text": "a", "rid": "me", "stream": True})
    )
    await meanwhile_until(lambda: rig.engine.running, "the request runs")
    await asyncio.sleep(0.1)
    aborted = await rig.http.post("/abort_request", json={"rid": "me"})
    assert aborted.json() == {"aborted": 1}
    answer = await running
    assert "aborted by the client" in answer.text
    await rig.until_idle()
    unknown = await rig.http.post("/abort_request", json={"rid": "missing"})
    assert unknown.json() == {"aborted": 0}
    assert (await rig.http.post("/abort_request", json={})).status_code == 400


async def test_nulls_count_as_not_given(rig: Rig) -> None:
    nulls = {"lora_path": None, "image_data": None, "input_ids": None, "rid": None}
    await generate(rig, text="a", sampling_params={"max_new_tokens": 1, "regex": None}, **nulls)
