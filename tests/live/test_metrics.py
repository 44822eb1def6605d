"""The metrics of a real server move by exactly the amount that a scripted load makes."""

import random
import time
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.live.live_server import LiveServer

PROMPT_LEN, OUTPUT_LEN, NUM_REQUESTS = 100, 7, 5
SAMPLING = {"temperature": 0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True}
_WAIT_S = 20.0


def scraped(url: str) -> dict[str, float]:
    """The value of each metric, summed over its labels, but for states and buckets."""
    values: dict[str, float] = {}
    text = httpx.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" in sample.labels or "state" in sample.labels:
                continue
            labels = [sample.labels[key] for key in ("mode", "when") if key in sample.labels]
            name = "/".join([sample.name.removeprefix("sglang:"), *labels])
            values[name] = values.get(name, 0.0) + sample.value
    return values


def gained(url: str, before: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """The differences of the wanted metrics since `before`, once they are as wanted, or at last."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        now = scraped(url)
        found = {name: now[name] - before[name] for name in wanted}
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_counters_and_histograms_count_what_was_sent(demo_server: LiveServer) -> None:
    url = demo_server.url
    page_size = demo_server.get("/get_server_info")["page_size"]
    numbers = random.Random(5)
    prompts = [[numbers.randrange(10, 300) for _ in range(PROMPT_LEN)] for _ in range(NUM_REQUESTS)]
    cached = (PROMPT_LEN - 1) // page_size * page_size
    before = scraped(url)
    for prompt in [*prompts, prompts[0]]:  # the last one finds its prefix
        body = {"input_ids": prompt, "sampling_params": SAMPLING}
        httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status()
    count = NUM_REQUESTS + 1
    wanted = {
        "num_requests_total": count,
        "prompt_tokens_total": count * PROMPT_LEN,
        "cached_tokens_total": cached,
        "generation_tokens_total": count * OUTPUT_LEN,
        "realtime_tokens_total/prefill_compute": count * PROMPT_LEN - cached,
        "realtime_tokens_total/prefill_cache": cached,
        "realtime_tokens_total/decode": count * OUTPUT_LEN,
        "e2e_request_latency_seconds_count": count,
        "time_to_first_token_seconds_count": count,
        "queue_time_seconds_count": count,
        "inter_token_latency_seconds_count": count * (OUTPUT_LEN - 1),
        "num_aborted_requests_total": 0,
        "num_retracted_requests_total": 0,
        "compilations_total/after_ready": 0,
    }
    assert gained(url, before, wanted) == wanted
    after = scraped(url)
    spent = {
        name: after[f"{name}_seconds_sum"] - before[f"{name}_seconds_sum"]
        for name in (
            "queue_time",
            "time_to_first_token",
            "inter_token_latency",
            "e2e_request_latency",
        )
    }
    assert 0 < spent["queue_time"] < spent["time_to_first_token"] < spent["e2e_request_latency"]
    whole = spent["time_to_first_token"] + spent["inter_token_latency"]
    assert abs(whole - spent["e2e_request_latency"]) < 1e-3 * count


def test_gauges_follow_a_running_request_and_an_abort(demo_server: LiveServer) -> None:
    url = demo_server.url
    demo_server.until_at_rest()
    before = scraped(url)
    assert before["num_running_reqs"] == before["num_queue_reqs"] == 0
    most = demo_server.get("/get_model_info")["max_request_tokens"] - 40
    sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
    body = {"input_ids": [7] * 40, "sampling_params": sampling, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines()  # the stream ends with it
        next(lines)
        running = scraped(url)
        assert running["num_running_reqs"] == 1
        assert running["kv_used_tokens"] >= 40
        assert 0 < running["token_usage"] < 1
    wanted = {"num_aborted_requests_total": 1, "num_running_reqs": 0, "kv_used_tokens": 0}
    assert gained(url, before, wanted) == wanted


def test_an_open_session_is_counted_until_it_is_closed(demo_server: LiveServer) -> None:
    url = demo_server.url
    before = scraped(url)
    session = {"session_id": "counted", "streaming": True}
    httpx.post(f"{url}/open_session", json=session, timeout=60).raise_for_status()
    body = {
        "input_ids": [9] * 50,
        "sampling_params": SAMPLING,
        "session_params": {"id": "counted"},
    }
    httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status()
    held = scraped(url)
    assert held["num_streaming_sessions"] - before["num_streaming_sessions"] == 1
    assert held["streaming_session_held_tokens"] - before["streaming_session_held_tokens"] >= 50
    httpx.post(f"{url}/close_session", json={"session_id": "counted"}, timeout=60)
    wanted = {"num_streaming_sessions": 0, "streaming_session_held_tokens": 0}
    assert gained(url, before, wanted) == wanted
