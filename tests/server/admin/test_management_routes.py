"""Health, facts, metrics, keys, limits, and the shape of every refusal."""

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.core.calls import Call
from sgl_jax.core.engine_messages import (
    EngineMessage,
    FinishReason,
    Heartbeat,
    OutputBatch,
    RequestOutput,
    WeightsChanged,
)
from sgl_jax.core.messages import GenerateRequest, PauseGeneration
from sgl_jax.core.profile_messages import StartProfile
from sgl_jax.core.progress import PhaseReport
from sgl_jax.core.weight_messages import UpdateWeightsFromDisk, UpdateWeightsFromTensor
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.server import engine_calls, health_probe
from sgl_jax.server.admin import management
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import MAX_RUNNING, ScriptedEngine
from tests.server.conftest import MAX_QUEUED, Rig, serving
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio


async def test_it_is_healthy_and_generates(rig: Rig) -> None:
    assert (await rig.http.get("/health")).status_code == 200
    assert rig.engine.seen == []
    assert (await rig.http.get("/health_generate")).status_code == 200
    assert len(rig.engine.seen) == 1


class BusyEngine(ScriptedEngine):
    """Requests of one token wait for ever, as behind a long queue."""

    def admit(self, request: GenerateRequest) -> EngineMessage | None:
        return None if request.sampling.max_new_tokens == 1 else super().admit(request)


async def test_a_busy_engine_is_healthy_while_it_generates_for_others(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "_HEALTH_TIMEOUT_S", 1.0)
    engine = BusyEngine(step_s=0.01, tokenizer_folder=str(model_folder))
    async with serving(model_folder, tokenizer, engine=engine) as rig:
        assert (await rig.http.get("/health_generate")).status_code == 503
        body = {"text": "a", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        generating = asyncio.create_task(rig.http.post("/generate", json=body))
        await meanwhile_until(lambda: rig.engine.running, "the request runs")
        for _ in range(2):
            assert (await rig.http.get("/health_generate")).status_code == 200
        assert not generating.done()
        await generating
        probes = [m for m in engine.seen if isinstance(m, GenerateRequest) and m.is_probe]
        assert len(probes) == 1  # of the first, which is in flight yet


async def test_an_engine_that_generates_gets_no_request_of_a_probe(rig: Rig) -> None:
    rig.engine.step_s = 0.01
    body = {"text": "a", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    generating = asyncio.create_task(rig.http.post("/generate", json=body))
    await meanwhile_until(lambda: rig.engine.running, "the request runs")
    assert (await rig.http.get("/health_generate")).status_code == 200
    assert not generating.done()
    await generating
    assert not [m for m in rig.engine.seen if isinstance(m, GenerateRequest) and m.is_probe]


async def test_an_engine_that_gives_others_no_token_is_probed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_probe, "_OTHERS_TIME_S", 0.2)
    monkeypatch.setattr(type(rig.front), "num_open", 3)
    assert (await rig.http.get("/health_generate")).status_code == 200
    assert len([m for m in rig.engine.seen if isinstance(m, GenerateRequest)]) == 1


async def test_a_full_queue_does_not_refuse_the_probe(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.front.pending, "_max_queued", -MAX_RUNNING)
    refused = await rig.http.post("/generate", json={"text": "a"})
    assert refused.status_code in (400, 503)
    assert (await rig.http.get("/health_generate")).status_code == 200


async def test_an_engine_that_stands_still_is_no_longer_healthy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "_HEALTH_TIMEOUT_S", 0.3)
    rig.engine.stand_still()
    answer = await rig.http.get("/health_generate")
    assert answer.status_code == 503
    assert "no token within 0.3 s" in answer.json()["error"]["message"]
    rig.engine.go_on()
    assert (await rig.http.get("/health_generate")).status_code == 200


async def test_probes_at_the_same_time_share_one_request(rig: Rig) -> None:
    began_at = time.monotonic()
    answers = await asyncio.gather(*(rig.http.get("/health_generate") for _ in range(16)))
    assert {answer.status_code for answer in answers} == {200}
    assert len([m for m in rig.engine.seen if isinstance(m, GenerateRequest)]) == 1
    # The last of 16 waits 16 times 20 ms before it looks for a token.
    assert time.monotonic() - began_at >= 0.3


class FailingEngine(ScriptedEngine):
    """Every request ends with an error, as on a device that fails every step."""

    is_failing = True

    def admit(self, request: GenerateRequest) -> EngineMessage | None:
        if not self.is_failing:
            return super().admit(request)
        finish = FinishReason("abort", message="the step failed", status_code=500)
        return OutputBatch(outputs=[RequestOutput(request.rid, [], 0, 0, finish)])


async def test_probes_of_a_failing_device_cost_it_one_step_in_seconds(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would bring it to the limit of failed steps at once."""
    monkeypatch.setattr(management, "_HEALTH_TIMEOUT_S", 0.5)
    engine = FailingEngine(tokenizer_folder=str(model_folder))
    async with serving(model_folder, tokenizer, engine=engine) as rig:
        for _ in range(3):
            assert (await rig.http.get("/health_generate")).status_code == 503
        assert len([m for m in engine.seen if isinstance(m, GenerateRequest)]) == 1
        engine.is_failing = False
        monkeypatch.setattr(health_probe, "_INTERVAL_AFTER_ERROR_S", 0.1)
        assert (await rig.http.get("/health_generate")).status_code == 200


async def test_a_draining_server_refuses_new_work(rig: Rig) -> None:
    rig.refs.draining = True
    for answer in (
        await rig.http.get("/health"),
        await rig.http.post("/v1/completions", json={"prompt": "hi"}),
        await rig.http.post("/generate", json={"text": "hi"}),
    ):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert answer.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("path", "body", "fate"),
    [
        ("/pause_generation", {"mode": "in_place"}, "undone if it had begun"),
        (
            "/pause_generation",
            {"mode": "retract"},
            "undone if it had begun, and the requests that it retracted are in the queue",
        ),
        (
            "/pause_generation",
            {},
            "undone if it had begun, but the requests that it aborted stay ended",
        ),
        ("/continue_generation", {}, "undone if it had begun"),
        (
            "/set_internal_state",
            {"server_args": {"request_timeout": 5.0}},
            "undone if it had begun",
        ),
        ("/flush_cache", {}, "made nevertheless if it had begun"),
        (
            "/update_weights_from_disk",
            {"model_path": "other"},
            "made nevertheless if it had begun",
        ),
    ],
)
async def test_a_call_answered_with_503_takes_no_effect_later(
    rig: Rig, path: str, body: dict[str, object], fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/continue_generation":
        await rig.http.post("/pause_generation", json={"mode": "in_place"})
    before = rig.engine.info
    # A row's own limit would take an hour here.
    monkeypatch.setattr(Call, "timeout_s", None)
    rig.refs.answer_timeout_s = 0.05
    rig.engine.stand_still()
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 503
    rig.engine.go_on()
    rig.refs.answer_timeout_s = 30.0
    await rig.http.get("/get_server_info")  # behind the call
    assert rig.engine.info == before
    error = answer.json()["error"]
    assert error["code"] == "call_cancelled"
    assert error["message"].endswith(f"; the call is cancelled, or {fate}")


@pytest.mark.parametrize(
    "heartbeat",
    [
        Heartbeat(turn_s=45.0),
        Heartbeat(
            turn_s=0.0,
            progress=PhaseReport(phase="loading", done=1, total=2, unit="bytes", since="now"),
        ),
    ],
    ids=["long turn", "loading"],
)
async def test_a_call_waits_while_the_engine_loads_or_compiles(
    rig: Rig, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_calls, "_LOOK_INTERVAL_S", 0.01)
    rig.refs.health = health = EngineHealth(20.0)
    health.note(heartbeat)
    rig.refs.answer_timeout_s = 0.05
    rig.engine.stand_still()
    pausing = asyncio.ensure_future(rig.http.post("/pause_generation", json={"mode": "in_place"}))
    done, _ = await asyncio.wait([pausing], timeout=0.5)
    assert not done
    rig.engine.go_on()
    assert (await pausing).status_code == 200
    assert rig.engine.is_paused
    rig.engine.stand_still()
    health.note(Heartbeat(turn_s=0.0))
    assert (await rig.http.post("/continue_generation")).status_code == 503
    rig.engine.go_on()
    assert rig.engine.is_paused


async def test_a_silent_engine_is_stuck_until_it_is_heard_again(rig: Rig) -> None:
    now_s = [0.0]
    rig.refs.health = health = EngineHealth(20.0, lambda: now_s[0])
    now_s[0] = 21.0
    answer = await rig.http.get("/health")
    told = answer.json()
    assert (answer.status_code, told["status"]) == (503, "stuck")
    silent_since = datetime.fromisoformat(told["since"])
    assert 20 < (datetime.now(UTC) - silent_since).total_seconds() < 23
    for refused in (
        await rig.http.post("/generate", json={"text": "hi"}),
        await rig.http.get("/get_server_info"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stuck")
        assert "retry-after" in refused.headers
    assert (await rig.http.get("/metrics")).status_code == 200
    health.note(Heartbeat(turn_s=7.0))
    assert (await rig.http.get("/health")).json() == {"status": "ready"}


async def test_each_prompt_of_a_list_counts_for_the_queue(rig: Rig) -> None:
    rig.engine.stand_still()
    waiting = asyncio.create_task(
        rig.http.post("/generate", json={"text": ["hi"] * (MAX_QUEUED + MAX_RUNNING - 1)})
    )
    num_sent = MAX_QUEUED + MAX_RUNNING - 1
    await meanwhile_until(lambda: rig.front.num_open == num_sent, "the requests are sent")
    both = await rig.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert (both.status_code, both.json()["error"]["code"]) == (503, "queue_full")
    assert "retry-after" in both.headers
    assert rig.front.num_open == MAX_QUEUED + MAX_RUNNING - 1  # none of the two was taken
    rig.engine.go_on()
    assert (await waiting).status_code == 200


async def test_what_a_full_queue_refuses_is_not_tokenised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine.stand_still()
    waiting = asyncio.create_task(
        rig.http.post("/generate", json={"text": ["hi"] * (MAX_QUEUED + MAX_RUNNING)})
    )
    num_sent = MAX_QUEUED + MAX_RUNNING
    await meanwhile_until(lambda: rig.front.num_open == num_sent, "the requests are sent")
    asked: list[str] = []
    monkeypatch.setattr(rig.refs.texts, "run", lambda *args: asked.append("text"))
    monkeypatch.setattr("sgl_jax.server.requests._SHORT_CHARS", -1)
    for path, body in (
        ("/generate", {"text": "hi"}),
        ("/v1/completions", {"prompt": ["hi"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        refused = await rig.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert asked == []
    rig.engine.go_on()
    assert (await waiting).status_code == 200


async def test_facts_are_told_but_not_the_key(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(model_folder, tokenizer, api_key="hush") as rig:
        rig.http.headers["authorization"] = "Bearer hush"
        info = (await rig.http.get("/get_server_info")).text
        assert '"free_pages"' in info
        assert "hush" not in info
        model = (await rig.http.get("/get_model_info")).json()
        assert model["is_generation"]
        assert model["max_request_tokens"] == 256


async def test_without_the_key_only_health_is_open(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, api_key="sésame") as rig:
        assert (await rig.http.get("/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}):
            answer = await rig.http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        key = {"authorization": b"Bearer " + "sésame".encode()}
        assert (await rig.http.get("/v1/models", headers=key)).status_code == 200  # type: ignore[arg-type]


async def test_unknown_routes_and_methods_answer_in_the_envelope(rig: Rig) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/generate", 405)):
        answer = await rig.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (await rig.http.get("/generate")).headers["allow"] == "POST"
    assert (await rig.http.put("/flush_cache")).headers["allow"] == "GET, POST"


async def test_metrics_show_requests_and_ranks(rig: Rig) -> None:
    await rig.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5})
    text = (await rig.http.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("dp_rank"), sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["sglang:generation_tokens_total", None, None] == 5
    assert samples["sglang:time_to_first_token_seconds_count", None, None] == 1
    assert samples["sglang:inter_token_latency_seconds_count", None, None] == 4
    assert samples["sglang:e2e_request_latency_seconds_count", None, None] == 1
    for rank in "01":
        assert samples["sglang:num_running_reqs", rank, None] == 0
        assert samples["sglang:num_queue_reqs", rank, None] == 0
        assert samples["sglang:token_usage", rank, None] == pytest.approx(2 / 9)
        assert samples["sglang:kv_pages", rank, "free"] == 6
        assert samples["sglang:rows", rank, "session"] == 1
    assert 'reason="pages",tp_rank="0"} 3.0' in text
    assert samples["sglang:num_streaming_sessions", None, None] == 0
    assert samples["sglang:steps_total", None, None] == 1
    assert {"sglang:gen_throughput", "sglang:cache_hit_rate"} <= {name for name, _, _ in samples}


async def test_metrics_outlive_the_engine(rig: Rig) -> None:
    rig.front.fail("gone")
    assert "sglang:num_requests_total" in (await rig.http.get("/metrics")).text


async def test_the_cache_is_flushed_only_when_idle(rig: Rig) -> None:
    assert (await rig.http.post("/flush_cache")).json() == {"flushed": True}
    rig.engine.step_s = 0.01
    running = asyncio.create_task(rig.http.post("/generate", json={"text": "a"}))
    await meanwhile_until(lambda: rig.engine.running, "the request runs")
    busy = await rig.http.get("/flush_cache")
    assert (busy.status_code, busy.json()["error"]["code"]) == (400, "busy")
    running.cancel()
    await rig.until_idle()


async def test_a_paused_server_is_healthy_and_takes_requests_that_wait(rig: Rig) -> None:
    paused = await rig.http.post("/pause_generation", json={"mode": "in_place"})
    assert paused.json() == {"is_paused": True, "num_running": 0, "num_waiting": 0}
    for path in ("/health", "/health_generate"):
        health = await rig.http.get(path)
        assert (health.status_code, health.json()) == (200, {"status": "paused"})
    waiting = asyncio.create_task(rig.http.post("/generate", json={"text": "a"}))
    await meanwhile_until(lambda: rig.engine.running, "the request is there")
    assert not waiting.done()
    assert not (await rig.http.post("/continue_generation")).json()["is_paused"]
    assert (await waiting).status_code == 200
    assert (await rig.http.get("/health")).json() == {"status": "ready"}


async def test_a_pause_aborts_unless_another_mode_is_asked_for(rig: Rig) -> None:
    for body in (None, {}, {"mode": "retract"}):
        assert (await rig.http.post("/pause_generation", json=body)).status_code == 200
    modes = [m.mode for m in rig.engine.seen if isinstance(m, PauseGeneration)]
    assert modes == ["abort", "abort", "retract"]
    bad = await rig.http.post("/pause_generation", json={"mode": "gently"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "mode")
    assert all(mode in bad.json()["error"]["message"] for mode in ("abort", "retract", "in_place"))


async def test_the_model_info_tells_which_weights_are_served(rig: Rig) -> None:
    body = {"model_path": "/models/next"}
    updated = await rig.http.post("/update_weights_from_disk", json=body)
    assert updated.json() == {"success": True, "message": "loaded", "num_paused_requests": 0}
    (sent,) = (m for m in rig.engine.seen if isinstance(m, UpdateWeightsFromDisk))
    assert (sent.flush_cache, sent.abort_all_requests) == (True, False)
    for path in ("/model_info", "/get_model_info", "/server_info"):
        assert (await rig.http.get(path)).json()["model_path"] == "/models/next"
    rig.front.handle(WeightsChanged(version="7", kept_rids=[]))
    for path in ("/model_info", "/get_weight_version"):
        assert (await rig.http.get(path)).json()["weight_version"] == "7"
    missing = await rig.http.post("/update_weights_from_disk", json={})
    assert missing.json()["error"]["param"] == "model_path"


async def test_tensors_come_in_a_body_and_their_settings_in_the_url(rig: Rig) -> None:
    path = "/update_weights_from_tensor"
    asked = {"weight_version": "7", "mode": "chunked", "keep_cache": "true", "is_last": "true"}
    taken = await rig.http.post(path, params=asked, content=b"tensors")
    assert taken.json()["success"]
    (sent,) = (m for m in rig.engine.seen if isinstance(m, UpdateWeightsFromTensor))
    assert (sent.tensors, sent.weight_version, sent.mode) == (b"tensors", "7", "chunked")
    assert (sent.keep_cache, sent.is_first, sent.is_last) == (True, False, True)
    refused = {
        "mode": await rig.http.post(path, params={"mode": "gently"}, content=b""),
        "is_final: this field is unknown": await rig.http.post(
            path, params={"is_final": "true"}, content=b""
        ),
        "pickled tensors": await rig.http.post(path, json={"serialized_named_tensors": ["x"]}),
        "in bodies": await rig.http.post("/init_weights_update_group", json={"world_size": 2}),
    }
    for why, answer in refused.items():
        assert answer.status_code == 400
        assert why in answer.text


async def test_an_update_ends_well_only_if_its_weights_are_served(rig: Rig) -> None:
    num_seen = len(rig.engine.seen)

    async def end() -> Any:
        return (await rig.http.post("/end_weight_update", json={})).json()

    assert "no update has begun" in (await end())["error"]["message"]
    assert (await rig.http.post("/begin_weight_update", json={})).json()["success"]
    assert "no tensors have arrived" in (await end())["error"]["message"]
    assert len(rig.engine.seen) == num_seen  # steps go on meanwhile
    rig.engine.num_missing = 0
    await rig.http.post("/update_weights_from_tensor", content=b"tensors")
    assert "all tensors have arrived" in (await end())["error"]["message"]
    rig.engine.refuses_weights = True
    await rig.http.post("/update_weights_from_tensor", content=b"tensors")
    assert "were refused" in (await end())["error"]["message"]
    rig.engine.num_missing, rig.engine.refuses_weights = 3, False
    await rig.http.post("/update_weights_from_tensor", content=b"tensors")
    assert "3 tensors are missing" in (await end())["error"]["message"]
    # From a folder.
    rig.front.handle(WeightsChanged(version="8", kept_rids=[]))
    assert (await end())["message"] == "serving the weights '8'"
    assert "no update has begun" in (await end())["error"]["message"]


async def test_settings_that_were_changed_are_told(rig: Rig) -> None:
    body = {"server_args": {"schedule_policy": "fcfs", "request_timeout": 5}}
    changed = await rig.http.post("/set_internal_state", json=body)
    assert changed.json() == {"updated": True, **body}
    info = (await rig.http.get("/server_info")).json()
    assert (info["schedule_policy"], info["request_timeout"]) == ("fcfs", 5)
    bad = await rig.http.post("/set_internal_state", json={"schedule_policy": "fcfs"})
    assert bad.status_code == 400


async def test_traces_go_where_the_operator_says(rig: Rig, tmp_path: Path) -> None:
    started = await rig.http.post("/start_profile", json={"output_dir": str(tmp_path)})
    assert started.json() == {"output_dir": str(tmp_path)}
    assert (await rig.http.post("/start_profile")).status_code == 200
    assert (await rig.http.post("/stop_profile")).json() == {"output_dir": "somewhere"}
    folders = [m.output_dir for m in rig.engine.seen if isinstance(m, StartProfile)]
    assert folders == [str(tmp_path), None]
    bad = await rig.http.post("/start_profile", json={"output_dir": "a" * 1025})
    assert bad.json()["error"]["param"] == "output_dir"


async def test_a_record_of_experts_is_a_file_of_their_loads(rig: Rig) -> None:
    for verb in ("start", "stop"):
        done = await rig.http.post(f"/{verb}_expert_distribution_record")
        assert (done.status_code, done.json()) == (200, {})
    dumped = await rig.http.post("/dump_expert_distribution_record")
    assert dumped.json() == {"logical_count": [[3, 1], [0, 4]]}


async def test_the_description_holds_every_body_answer_and_error(rig: Rig) -> None:
    described = (await rig.http.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "GenerateBody", "ErrorResponse"} <= set(schemas)
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert {"200", "400", "401", "404", "413", "500", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"], path
            assert "Allow" in operation["responses"]["405"]["headers"]
    assert set(described["paths"]["/flush_cache"]) == {"get", "post"}
    unserved = schemas["ChatRequest"]["properties"]["return_hidden_states"]
    assert unserved["description"].startswith("not served: ")


async def test_the_server_tells_under_which_name_it_serves_its_model(rig: Rig) -> None:
    assert rig.refs.args.served_model_name is None
    info = (await rig.http.get("/get_server_info")).json()
    assert info["served_model_name"] == "scripted"
