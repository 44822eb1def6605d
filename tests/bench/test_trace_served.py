"""Recorded traffic through the scheduler, on a logical clock."""

import json
from typing import Any

import numpy as np
import pytest

from sgl_jax.bench.trace.host_link import HostLink
from sgl_jax.bench.trace.planned_time import PlannedStepTime, planned_step_time
from sgl_jax.bench.trace.reading import (
    BLOCK_TOKENS,
    VOCAB_SIZE,
    TracedRequest,
    read_trace,
)
from sgl_jax.bench.trace.report import served_text, served_values
from sgl_jax.bench.trace.served import serve_trace
from sgl_jax.bench.trace.step_time import LinearStepTime, rank_load
from sgl_jax.bench.trace.turns import turn_kinds
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import RankPlan
from sgl_jax.models.config import ModelConfig
from sgl_jax.planner.kernel_time import DeviceBytes
from sgl_jax.planner.topology import Topology, has_tpu_compiler
from tests.bench.traced import EXCERPT, request

MS = LinearStepTime(1.0, 0.0, 0.0, 0.0).seconds  # every step takes a millisecond


@pytest.fixture(scope="module")
def excerpt():
    return read_trace(EXCERPT)


def sizes_for(trace, *, num_tokens, page_size=64, dp_size=1, num_rows=33, chunk=2048):
    """An engine whose steps take `chunk` prompt tokens, decode tokens on top of them."""
    return EngineSizes(
        dp_size=dp_size,
        page_size=page_size,
        pool_pages=(1 + num_tokens // page_size,),
        num_rows=num_rows,
        max_context_len=max(r.input_len + r.output_len for r in trace),
        max_step_tokens=chunk + num_rows - 1,
        max_prompt_logprob_tokens=128,
        vocab_size=VOCAB_SIZE,
    )


def served(trace, step_time=MS, speedup=1.0, **sizes):
    engine = sizes_for(trace, **sizes)
    args = SchedulerArgs(max_queued_requests=len(trace), check_memory="busy")
    return serve_trace(trace, engine, args, step_time, speedup=speedup)


@pytest.fixture(scope="module")
def busy_run(excerpt):
    """Forty requests on two ranks, each with room for a few of them."""
    trace = excerpt[:40]
    return trace, served(trace, num_tokens=120_000, dp_size=2)


def test_every_request_gets_as_many_tokens_as_it_did(busy_run):
    trace, run = busy_run
    assert [log.output_len for log in run.requests] == [r.output_len for r in trace]
    assert run.counters["requests_finished"] == len(trace)
    assert run.counters["evicted_pages"] > 0


def test_the_same_run_twice_is_the_same(busy_run):
    trace, run = busy_run
    again = served(trace, num_tokens=120_000, dp_size=2)
    assert again.requests == run.requests
    assert again.samples == run.samples
    assert again.counters == run.counters


def test_a_request_starts_answers_and_ends_in_this_order(busy_run):
    for log in busy_run[1].requests:
        assert log.arrival_s <= log.start_s < log.first_token_s <= log.end_s


def test_the_hit_rate_reported_is_that_of_the_counters(busy_run):
    trace, run = busy_run
    values = served_values(run, {})
    assert values["prompt_tokens"] == sum(r.input_len for r in trace)
    assert values["hit_rate"] == run.counters["cached_tokens"] / values["prompt_tokens"] > 0
    assert values["output_tokens"] == sum(r.output_len for r in trace)
    assert values["ttft_s"]["max"] == max(log.first_token_s - log.arrival_s for log in run.requests)


def test_pages_are_all_accounted_for_in_every_sample(busy_run):
    for sample in busy_run[1].samples:
        # The null page of each rank is reserved.
        pages = sample.free_pages + sample.leased_pages + sample.cached_pages
        assert pages == 2 * (120_000 // 64)


def test_the_clock_adds_up_steps_that_overlap():
    # 1,000 tokens in chunks of 512 at 1 us each, then two more tokens, a millisecond each.
    step_time = LinearStepTime(1.0, 1.0, 0.0, 0.0).seconds
    trace = [request(1, 2, input_len=1000, output_len=3)]
    run = served(trace, step_time, num_tokens=4096, chunk=512)
    (log,) = run.requests
    assert log.start_s == 0
    assert log.first_token_s == pytest.approx(3.0e-3)
    assert log.end_s == pytest.approx(5.0e-3)
    assert run.busy_s == pytest.approx(run.duration_s)


def test_fetches_are_priced_beside_computations():
    """Two prompts take turns on a device with room for one; the link takes a millisecond a page."""
    trace = [request(1 + number % 2, 3, 4, 5, arrival_ms=100 * number) for number in range(4)]
    engine = sizes_for(trace, num_tokens=2112, chunk=512)._replace(host_blocks=(100,))
    link = HostLink((64_000,), 64e6, 1.0)
    step_time = LinearStepTime(1.0, 1.0, 0.0, 0.0).seconds
    run = serve_trace(trace, engine, SchedulerArgs(check_memory="busy"), step_time, link=link)
    # Unmeasured, the link counts as fast; after the first fetch, it counts as slow.
    # The first page of a prompt is on the device still.
    compute_s, fetch_s = 3 * 1.512e-3 + 1.448e-3, 30e-3 + 1.064e-3
    assert run.counters["host_fetched_tokens"] == 30 * 64
    assert run.fetch_choices == {
        "choices": 2,
        "loaded": 1,
        "chosen_s": pytest.approx(fetch_s + compute_s),
        "oracle_s": pytest.approx(2 * compute_s),
        "always_s": pytest.approx(2 * fetch_s),
        "never_s": pytest.approx(2 * compute_s),
    }
    assert run.load_choices["choices"] == 0
    assert "2 choices, 1 to fetch" in served_text(served_values(run, {}))


def test_loads_are_priced_beside_computations():
    """Three prompts take turns where neither device nor host has room for two; the store takes a
    millisecond a page."""
    trace = [request(1 + number % 3, 3, 4, 5, arrival_ms=100 * number) for number in range(6)]
    engine = sizes_for(trace, num_tokens=2112, chunk=512)._replace(host_blocks=(34,))
    link = HostLink((64_000,), 64e9, 64e6)
    step_time = LinearStepTime(1.0, 1.0, 0.0, 0.0).seconds
    args = SchedulerArgs(check_memory="busy", hicache_storage_backend="file")
    run = serve_trace(trace, engine, args, step_time, link=link)
    # Unmeasured, the store counts as fast; after the first load, none is worth a search.
    assert (run.load_choices["choices"], run.load_choices["loaded"]) == (1, 1)
    assert run.load_choices["chosen_s"] > 0.031 > run.load_choices["never_s"]
    assert run.counters["store_loaded_tokens"] == 31 * 64
    # The fetch behind the load takes no time of the clock but its own.
    assert run.requests[3].first_token_s == pytest.approx(0.3 + 0.031 + 31e-6 + 1.064e-3, abs=1e-6)
    assert "1 choices, 1 to load" in served_text(served_values(run, {}))


def test_a_request_that_comes_during_a_step_starts_with_the_step_after_the_next():
    trace = [request(1, output_len=50), request(2, arrival_ms=5, output_len=1)]
    run = served(trace, speedup=2.0, num_tokens=4096)
    # At 2.5 ms the step that ends at 4 ms was planned already.
    assert run.requests[1].arrival_s == pytest.approx(2.5e-3)
    assert run.requests[1].start_s == pytest.approx(4.0e-3)
    assert run.requests[1].first_token_s == pytest.approx(5.0e-3)


def test_an_idle_engine_waits_for_the_next_arrival():
    trace = [request(1), request(2, arrival_ms=60_000)]
    run = served(trace, num_tokens=4096)
    assert run.requests[1].end_s == pytest.approx(60.001)
    assert run.busy_s == pytest.approx(0.002)


def test_requests_retracted_for_want_of_memory_finish_all_the_same():
    trace = [request(i, output_len=600) for i in range(6)]
    run = served(trace, num_tokens=4096, num_rows=9)
    assert run.counters["requests_retracted"] > 0
    assert [log.output_len for log in run.requests] == [600] * 6


def test_a_request_too_long_for_the_memory_is_refused_and_counted():
    trace = [request(1), request(*range(10, 20)), request(2)]
    run = served(trace, num_tokens=4096)
    values = served_values(run, {})
    assert (values["finished"], values["refused"]) == (2, 1)
    assert "exceed the 4096 tokens that one request can hold" in values["refusals"][0]


def test_the_same_prompt_twice_is_served_from_the_cache_but_for_its_last_token():
    trace = [request(1, 2), request(1, 2, arrival_ms=1000)]
    run = served(trace, num_tokens=4096)
    assert run.counters["cached_tokens"] == 2 * BLOCK_TOKENS - 64


def rank_plan(num_decode, kv_starts, q_lens):
    n = len(kv_starts)
    return RankPlan(
        rows=np.arange(1, n + 1, dtype=np.int32),
        kv_starts=np.array(kv_starts, np.int32),
        q_lens=np.array(q_lens, np.int32),
        samples=np.ones(n, np.bool_),
        num_pages=4,
        num_decode=num_decode,
        relayed=np.zeros(n, np.bool_),
    )


def test_the_load_of_a_rank_counts_decode_and_prefill_apart():
    load = rank_load(rank_plan(2, [99, 199, 50], [1, 1, 10]))
    assert load.decode_rows == 2
    assert load.decode_kv_tokens == 300
    assert load.prefill_tokens == 10
    assert load.prefill_kv_tokens == 60
    assert load.prefill_pairs == sum(range(51, 61))


def test_a_step_takes_as_long_as_its_most_loaded_rank():
    light, heavy = rank_plan(1, [9], [1]), rank_plan(1, [99, 0], [1, 20])
    step_time = LinearStepTime(1.0, 10.0, 100.0, 1000.0)
    seconds = step_time.seconds([rank_load(light), rank_load(heavy)])
    assert seconds == pytest.approx(1e-3 + 20 * 10e-6 + 100e-6 + 120 * 1e-6)


def test_prompt_tokens_beside_the_rest_do_not_delay_it():
    loads = [rank_load(rank_plan(1, [99, 0], [1, 20]))]
    assert LinearStepTime(1.0, 40.0, 0.0, 0.0, True).seconds(loads) == pytest.approx(1e-3)
    assert LinearStepTime(1.0, 60.0, 0.0, 0.0, True).seconds(loads) == pytest.approx(1.2e-3)


# -- steps as long as the planner says ------------------------------------------------------------

SMALL_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_a_planned_step_is_padded_to_a_shape_and_waits_for_the_most_attention():
    step_time = PlannedStepTime(
        shapes=(8, 128),
        shape_seconds=(1e-3, 2e-3),
        config=ModelConfig.from_dict(SMALL_MODEL),
        memory=DeviceBytes(10**6, 500_000, 0, 2, kv_token_bytes=2048, tp_size=1),
        chip=Topology.parse("v6e-1").chip,
        page_bytes=(1,),
    )

    def seconds(*ranks):
        return step_time.seconds([rank_load(rank) for rank in ranks])

    decode, deep = rank_plan(1, [99], [1]), rank_plan(1, [3999], [1])
    assert seconds(decode) == pytest.approx(1e-3, rel=0.01)
    # The kernel's instructions or the bytes of KV, whichever takes longer, in proportion.
    assert seconds(deep) - 1e-3 == pytest.approx(40 * (seconds(decode) - 1e-3))
    assert seconds(deep, decode) == seconds(deep)
    chunk, late_chunk = rank_plan(0, [0], [9]), rank_plan(0, [3000], [9])
    assert 2e-3 < seconds(chunk) < seconds(late_chunk)
    both = rank_plan(1, [3999, 3000], [1, 9])
    assert seconds(both) == pytest.approx(seconds(deep) + seconds(late_chunk) - 1e-3)


@pytest.mark.long
@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed")
def test_a_trace_is_served_on_steps_compiled_for_a_chip(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL_MODEL))
    args = ServerArgs(
        model_path=str(config),
        page_size=128,
        max_total_tokens=65_536,
        max_running_requests=16,
        chunked_prefill_size=128,
    )
    sizes, step_time = planned_step_time(args, "v6e-1")
    assert sizes.pool_pages == (1 + 65_536 // 128,)
    assert step_time.shapes == sizes.step_token_shapes == (8, 16, 32, 64, 128, 144)
    assert 0 < step_time.shape_seconds[0] < step_time.shape_seconds[-1]
    trace = [request(1, 2, output_len=3), request(1, 2, 3, output_len=3)]
    run = serve_trace(trace, sizes, SchedulerArgs(), step_time.seconds)
    assert run.busy_s == pytest.approx(run.duration_s)


def test_planned_engines_have_quantized_weights(monkeypatch):
    class CompilingError(Exception):
        pass

    def compiling(args, config, *_):
        raise CompilingError(config.quantization)

    monkeypatch.setattr("sgl_jax.bench.trace.planned_time.engine_programs", compiling)
    settings: dict[str, Any] = {"model_path": "llama-3.3-70b", "tp_size": 8, "page_size": 128}
    with pytest.raises(ValueError, match="leaves no room for KV on v5e-8"):
        planned_step_time(ServerArgs(**settings), "v5e-8")
    # 70 of 126 GiB.
    with pytest.raises(CompilingError):
        planned_step_time(ServerArgs(**settings, quantization="int8"), "v5e-8")


def agent_requests():
    """Two agents: one calls a tool and then answers, the other has one turn, late."""
    turns = [("a", 0, "tool_use", 0.0), ("a", 100, "end_turn", 5.0), ("a", 200, "", 50.0)]
    requests = [
        TracedRequest(ms, 600 + 10 * i, 4, (1, 2 + i), agent=agent, stop=stop, think_s=think_s)
        for i, (agent, ms, stop, think_s) in enumerate(turns)
    ]
    return [*requests, TracedRequest(20_000, 600, 4, (9, 10), agent="b")]


def test_in_a_closed_loop_a_turn_comes_the_recorded_pause_after_the_answer():
    trace = agent_requests()
    run = serve_trace(trace, sizes_for(trace, num_tokens=8192), SchedulerArgs(), MS, closed_s=21.0)
    first, second, third, other = run.requests
    assert first.arrival_s == 0
    assert second.arrival_s == pytest.approx(first.end_s + 5)
    assert np.isnan(third.arrival_s)  # after the end of the loop
    assert other.arrival_s == 20
    assert second.cached_tokens == 512
    values = served_values(run, {}, trace)
    assert (values["requests"], values["finished"]) == (3, 3)
    assert {kind: each["completed"] for kind, each in values["turns"].items()} == {
        "first": 2,
        "after a tool call": 1,
        "all": 3,
    }
    assert values["turns"]["all"]["max_ttft_s"] == values["turns"]["first"]["max_ttft_s"]
    assert values["turns"]["after a tool call"]["hit_rate"] == pytest.approx(512 / 610)
    assert "after a tool call" in served_text(values)


def test_the_first_turn_of_an_agent_after_the_end_of_a_closed_loop_is_left_out():
    trace = agent_requests()
    sizes = sizes_for(trace, num_tokens=8192)
    run = serve_trace(trace, sizes, SchedulerArgs(), MS, closed_s=2.0)
    assert [not np.isnan(log.arrival_s) for log in run.requests] == [True, False, False, False]


def test_turns_are_told_apart_by_the_answer_before():
    assert turn_kinds(agent_requests()) == [
        "first",
        "after a tool call",
        "after a final answer",
        "first",
    ]
