"""RL trainers that ask a server of SGLang: slime, miles, verl and AReaL.

They need CUDA, so their calls are listed here: routes, bodies, and what they read of the answers.
Weights come from folders, as all of them can send them; the ways that need a group of processes or
pickled tensors are refused with a reason.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live.live_server import LiveServer, live_server
from tests.soak.trainer import written_policies
from tests.support.long import long

FLAGS = ("--context-length", "512", "--max-running-requests", "8", "--check-memory", "busy")
GROUP_SIZE = 8
NUM_TOKENS = 80
PROMPT = [300 + i for i in range(40)]
_PATIENCE_S = 300.0  # programs are compiled meanwhile


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of different weights, the demonstration model's first."""
    return [path for path, _ in written_policies(tmp_path_factory.mktemp("policies"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    with live_server(folder, *FLAGS, is_quickly_compiled=True) as server:
        yield server
        server.assert_nothing_leaked()


class Calls:
    """HTTP calls to a server, which must succeed."""

    def __init__(self, server: LiveServer) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=_PATIENCE_S)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._http.get(path, headers=headers).raise_for_status()

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self._http.post(path, json=body).raise_for_status()

    def until_ok(self, path: str, **headers: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._http.get(path, headers=headers).status_code != 200:
            assert time.monotonic() < deadline, f"{path} fails"
            time.sleep(0.1)

    def refusal(self, path: str, body: Any) -> str:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        message: str = answer.json()["error"]["message"]
        return message

    def num_requests(self) -> int:
        """Return the number of requests in a server, as slime counts them."""
        loads = self.get("/v1/loads?include=core,disagg,queues").json()["loads"]
        return sum(
            load.get("num_reqs", load["num_running_reqs"] + load["num_waiting_reqs"])
            for load in loads
        )

    def abort_until_idle(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.post("/abort_request", {"abort_all": True})
            if self.num_requests() == 0:
                return
            assert time.monotonic() < deadline, "requests remain after their abort"
            time.sleep(0.1)


@pytest.fixture
def calls(server: LiveServer) -> Calls:
    return Calls(server)


def slime_sampling(num_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": num_tokens,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": seed,
        "ignore_eos": True,  # of this test: each sample has its length
    }


class Sample:
    """A sample that is sent again with its tokens until it is complete."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.num_sent = 0

    def generate(self, calls: Calls) -> None:
        """Ask for the rest, and keep what comes."""
        payload = {
            "sampling_params": slime_sampling(NUM_TOKENS - len(self.tokens), self.seed),
            "return_logprob": True,
            "input_ids": PROMPT + self.tokens,
            "return_routed_experts": False,
            "return_indexer_topk": False,
        }
        output = calls.post("/generate", payload).json()
        meta = output["meta_info"]
        self.num_sent += 1
        self.tokens += [item[1] for item in meta["output_token_logprobs"]]
        self.logprobs += [item[0] for item in meta["output_token_logprobs"]]
        self.versions.append(meta["weight_version"])
        assert isinstance(output["text"], str)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            assert isinstance(meta[name], int)
        is_whole = len(self.tokens) == NUM_TOKENS
        assert meta["finish_reason"]["type"] == ("length" if is_whole else "abort")


def rollout(calls: Calls, interrupt: Callable[[], None] | None = None) -> list[Sample]:
    """Generate a group; `interrupt` comes once all samples run, and ends them early."""
    samples = [Sample(seed) for seed in range(GROUP_SIZE)]
    with ThreadPoolExecutor(GROUP_SIZE) as pool:
        running = [pool.submit(sample.generate, calls) for sample in samples]
        if interrupt is not None:
            while calls.num_requests() < GROUP_SIZE:
                time.sleep(0.01)
            interrupt()
        for each in running:
            each.result(_PATIENCE_S)
        while unfinished := [each for each in samples if len(each.tokens) < NUM_TOKENS]:
            list(pool.map(lambda sample: sample.generate(calls), unfinished))
    return samples


def assert_equal(partial: list[Sample], whole: list[Sample]) -> None:
    for own, expected in zip(partial, whole, strict=True):
        assert own.tokens == expected.tokens
        assert own.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("num_rounds", [1, *long(3)])
def test_slime_shares_its_devices_and_resends_aborted_samples(
    calls: Calls, policies: list[str], num_rounds: int
) -> None:
    calls.until_ok("/health_generate", Authorization="Bearer None")
    calls.until_ok("/flush_cache", Authorization="Bearer None")
    for number in range(num_rounds):
        path, version = policies[number % len(policies)], f"slime {number}"
        calls.until_ok("/flush_cache")
        calls.post("/release_memory_occupation", {})
        for tag in ("cuda_graph", "weights"):
            calls.post("/resume_memory_occupation", {"tags": [tag]})
        calls.post("/pause_generation", {})
        calls.until_ok("/flush_cache")
        body = {"model_path": path, "weight_version": version}
        assert calls.post("/update_weights_from_disk", body).json()["success"]
        calls.post("/continue_generation", {})
        calls.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert calls.get("/get_weight_version").json()["weight_version"] == version
        whole = rollout(calls)
        assert {each.num_sent for each in whole} == {1}
        partial = rollout(calls, calls.abort_until_idle)
        assert max(each.num_sent for each in partial) > 1
        assert_equal(partial, whole)
        assert {each for sample in partial for each in sample.versions} == {version}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_miles_pauses_without_an_abort(calls: Calls, policies: list[str], mode: str) -> None:
    whole = rollout(calls)

    def update(path: str, version: str) -> None:
        calls.post("/pause_generation", {"mode": mode})
        calls.until_ok("/flush_cache")
        calls.post("/begin_weight_update", {"selector": "all"})
        calls.post("/update_weights_from_disk", {"model_path": path, "load_format": "auto"})
        assert calls.post("/end_weight_update", {}).json()["success"]
        label = {"new_version": version, "abort_all_requests": False}
        assert calls.post("/update_weight_version", label).json()["success"]
        calls.post("/continue_generation", {})
        assert calls.get("/model_info").json()["weight_version"] == version

    same = calls.get("/model_info").json()["model_path"]
    paused = rollout(calls, lambda: update(same, f"{mode} 1"))
    assert {each.num_sent for each in paused} == {1}
    assert_equal(paused, whole)
    changed = rollout(calls, lambda: update(policies[1], f"{mode} 2"))
    assert {each.versions[-1] for each in changed} == {f"{mode} 2"}
    assert all(own.tokens != was.tokens for own, was in zip(changed, whole, strict=True))
    calls.until_ok("/flush_cache")
    calls.post("/release_memory_occupation", {"tags": None})
    calls.post("/resume_memory_occupation", {"tags": None})
    update(same, f"{mode} 3")
    assert_equal(rollout(calls), whole)


@pytest.mark.long
def test_miles_scores_samples_as_prompts(calls: Calls) -> None:
    samples = rollout(calls)
    calls.post("/flush_cache", {})
    sampling = slime_sampling(0, seed=0) | {"temperature": 0}
    payload = {
        "input_ids": [PROMPT + own.tokens for own in samples],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": len(PROMPT) - 1,
    }
    for own, answer in zip(samples, calls.post("/generate", payload).json(), strict=True):
        scored = answer["meta_info"]["input_token_logprobs"][-NUM_TOKENS:]
        assert [item[1] for item in scored] == own.tokens
        assert [item[0] for item in scored] == pytest.approx(own.logprobs, abs=1e-4)


@pytest.mark.long
def test_verl_releases_and_resumes_by_tag(calls: Calls, policies: list[str]) -> None:
    calls.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    calls.post("/resume_memory_occupation", {"tags": ["weights"]})
    calls.post("/update_weights_from_disk", {"model_path": policies[2]})
    calls.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    calls.until_ok("/flush_cache")
    payload = {
        "sampling_params": {"n": 1, "max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9},
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 2,
    }
    output = calls.post("/generate", payload).json()
    assert len(output["output_ids"]) == len(output["meta_info"]["output_top_logprobs"])
    calls.post("/abort_request", {"rid": "", "abort_all": True})


@pytest.mark.long
def test_areal_pauses_updates_and_resends(calls: Calls, policies: list[str]) -> None:
    calls.get("/health")
    sampling = {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_new_tokens": NUM_TOKENS,
        "temperature": 1.0,
        "stop_token_ids": [],
        "frequency_penalty": 0.0,
    }
    payload: dict[str, Any] = {
        "input_ids": list(PROMPT),
        "image_data": [],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    tokens, reasons = list[int](), list[str]()
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(calls.post, "/generate", payload)
        while calls.num_requests() == 0:
            time.sleep(0.01)
        calls.post("/pause_generation")
        body = {"model_path": policies[1], "abort_all_requests": True}
        calls.post("/update_weights_from_disk", body)
        calls.post("/continue_generation")
        while not reasons or reasons[-1] not in ("stop", "length"):
            meta = answering.result(_PATIENCE_S).json()["meta_info"]
            reasons.append(meta["finish_reason"]["type"])
            new = [item[1] for item in meta["output_token_logprobs"]]
            tokens += new
            payload["input_ids"] += new
            sampling["max_new_tokens"] = NUM_TOKENS - len(tokens)
            answering = pool.submit(calls.post, "/generate", payload)
        answering.result(_PATIENCE_S)
    assert reasons[0] == "abort"


@pytest.mark.long
def test_other_ways_of_weights_are_refused_with_the_reason(calls: Calls) -> None:
    group = {"group_name": "slime", "backend": "nccl", "rank_offset": 1, "world_size": 2}
    address = {"master_address": "127.0.0.1", "master_port": "1"}
    names: dict[str, Any] = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}
    more = {"group_name": "slime", "flush_cache": False, "weight_version": "1"}
    tensors = {"serialized_named_tensors": ["gAR9"], "load_format": "flattened_bucket"}
    assert "in bodies" in calls.refusal("/init_weights_update_group", group | address)
    assert "in bodies" in calls.refusal("/update_weights_from_distributed", names | more)
    assert "safetensors" in calls.refusal("/update_weights_from_tensor", tensors | more)
    replay = {"input_ids": PROMPT, "return_routed_experts": True}
    assert "has no experts" in calls.refusal("/generate", replay)
