"""Requests and operator's calls, whose answers must not depend on the number of hosts."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 180.0
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}


def run_workload(url: str, other_weights: Path, *, has_text: bool, has_experts: bool) -> Any:
    """All answers, and the figures that must be equal; `other_weights` are of the same model."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:

        def post(path: str, **body: Any) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            return answer.json()

        answers: dict[str, Any] = {"plain": _generated(post), "session": _session(post)}
        if has_text:
            answers["grammar"] = _structured(post)
        if has_experts:
            answers["experts"] = _experts(post)
        answers["paused"] = _paused(post)
        broken = client.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
        assert broken.status_code == 400, broken.text
        answers["kept"] = _generated(post)
        post("/update_weights_from_disk", model_path=str(other_weights))
        answers["updated"] = _generated(post)
        info = _at_rest(client)
    answers["retracts"] = info["counters"]["requests_retracted"] > 0
    for rank in info["ranks"]:
        assert rank["leased_pages"] == 0, rank
        assert rank["free_rows"] == rank["total_rows"], rank
    return answers


def _generated(post: Any) -> Any:
    """Six requests at once: tokens, and log-probabilities of outputs and prompts."""
    prompts = [[3 + (7 * i + k) % 50 for i in range(14 + k)] for k in range(6)]
    results = post(
        "/generate",
        input_ids=prompts,
        sampling_params=[GREEDY] * 4 + [SEEDED] * 2,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    return [
        {
            "tokens": result["output_ids"],
            "output": [value[0] for value in result["meta_info"]["output_token_logprobs"]],
            "prompt": [value[0] for value in result["meta_info"]["input_token_logprobs"]],
        }
        for result in results
    ]


def _session(post: Any) -> Any:
    """Three turns of a session that keeps its memory."""
    session = post("/open_session", capacity_of_str_len=100, streaming=True)
    turns = []
    for turn in range(3):
        result = post(
            "/generate",
            input_ids=[5 + turn, 9, 11 + turn],
            sampling_params={**GREEDY, "max_new_tokens": 6},
            session_params={"id": session},
        )
        turns.append(result["output_ids"])
    post("/close_session", session_id=session)
    return turns


def _structured(post: Any) -> Any:
    sampling = [
        {"temperature": 0, "regex": "(red|green|blue)!{2}", "max_new_tokens": 20},
        {**SEEDED, "ebnf": 'root ::= "a" | "b" root'},
        GREEDY,
    ]
    results = post(
        "/generate", text=["Name a colour.", "3, 2, 1", "Hello"], sampling_params=sampling
    )
    return [result["output_ids"] for result in results]


def _experts(post: Any) -> Any:
    post("/start_expert_distribution_record")
    post("/generate", input_ids=[3, 4, 5, 6], sampling_params=GREEDY)
    post("/stop_expert_distribution_record")
    return post("/dump_expert_distribution_record")


def _paused(post: Any) -> Any:
    """A request that waits while generation is paused."""
    post("/pause_generation", mode="in_place")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, "/generate", input_ids=[8, 9, 10], sampling_params=GREEDY)
        time.sleep(0.3)
        assert not waiting.done()
        post("/continue_generation")
        return waiting.result()["output_ids"]


def _at_rest(client: httpx.Client) -> Any:
    """The server's info once nothing runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        info = client.get("/get_server_info").json()
        if not any(rank["num_running"] or rank["num_waiting"] for rank in info["ranks"]):
            return info
        time.sleep(0.1)
    raise AssertionError(info["ranks"])
