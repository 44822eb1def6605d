"""Loads of every rank, facts under both of their names, and routes of other kinds of models."""

from pathlib import Path

import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import DP_SIZE
from tests.server.conftest import Rig, serving

pytestmark = pytest.mark.anyio


async def test_loads_are_told_for_every_rank(rig: Rig) -> None:
    told = (await rig.http.get("/v1/loads")).json()
    assert [load["dp_rank"] for load in told["loads"]] == list(range(DP_SIZE))
    assert told["dp_rank_count"] == DP_SIZE
    for load in told["loads"]:
        assert load["num_used_tokens"] == 32
        assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] == 9 * 16
        assert load["token_usage"] == pytest.approx(2 / 9)
        assert load["memory"]["free_pages"] == 6
        assert {"speculative", "queues"} <= set(load)
    assert told["aggregate"]["total_reqs"] == 0
    assert told["aggregate"]["avg_token_usage"] == pytest.approx(2 / 9)
    (older, _) = (await rig.http.get("/get_load")).json()
    assert older == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 32}


async def test_loads_can_be_fewer(rig: Rig) -> None:
    told = (await rig.http.get("/v1/loads?include=core,spec&dp_rank=1")).json()
    (load,) = told["loads"]
    assert load["dp_rank"] == 1
    assert "speculative" in load
    assert not {"memory", "queues"} & set(load)
    others = (await rig.http.get("/v1/loads?include=lora,disagg,queues")).json()
    assert others["loads"][0]["num_running_reqs"] == 0
    for query, param in (("include=core,lora2", "include"), (f"dp_rank={DP_SIZE}", "dp_rank")):
        refused = await rig.http.get(f"/v1/loads?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await rig.http.get("/v1/loads?dp_rank=x")).status_code == 400


async def test_facts_are_the_same_under_both_names(rig: Rig) -> None:
    model = (await rig.http.get("/model_info")).json()
    assert model == (await rig.http.get("/get_model_info")).json()
    server = (await rig.http.get("/server_info")).json()
    assert server == (await rig.http.get("/get_server_info")).json()
    assert (server["dp_size"], server["served_model_name"]) == (DP_SIZE, "scripted")
    assert [state["dp_rank"] for state in server["internal_states"]] == list(range(DP_SIZE))
    assert server["internal_states"][0]["memory_usage"]["token_capacity"] == 9 * 16
    version = (await rig.http.get("/version")).json()["version"]
    assert version == server["version"]
    assert (await rig.http.get("/ping")).status_code == 200


async def test_both_names_of_the_servers_facts_need_the_admins_key(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, api_key="a", admin_api_key="b") as rig:
        for path in ("/server_info", "/get_server_info"):
            for key, status in (("a", 401), ("b", 200)):
                headers = {"authorization": f"Bearer {key}"}
                assert (await rig.http.get(path, headers=headers)).status_code == status


@pytest.mark.parametrize(
    "path", ["/encode", "/classify", "/v1/audio/transcriptions", "/v1/images/generations"]
)
async def test_what_other_models_do_is_refused_clearly(rig: Rig, path: str) -> None:
    for body in ({"json": {"input": "hi"}}, {"files": {"file": b"sound"}}):
        answer = await rig.http.post(path, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_task")
        assert "'scripted' generates text" in error["message"]
