"""Every metric of an engine: its name, type and labels, and values computed from what was sent."""

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.metrics.request_metrics import RequestMetrics
from tests.scheduler.driver import Driver, generate, make_sizes

# As SGLang exports them, with the labels of its dashboards.
GAUGES = """
num_running_reqs num_queue_reqs num_used_tokens token_usage full_token_usage swa_token_usage
mamba_usage kv_available_tokens kv_evictable_tokens kv_used_tokens num_retracted_reqs
spec_accept_length spec_accept_rate new_token_ratio gen_throughput cache_hit_rate
num_streaming_sessions streaming_session_held_tokens max_total_num_tokens page_size num_pages
"""
COUNTERS = """
prompt_tokens generation_tokens num_requests cached_tokens num_aborted_requests
num_retracted_requests num_retracted_input_tokens num_retracted_output_tokens realtime_tokens
"""
HISTOGRAMS = """
time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
queue_time_seconds
"""
WORKER = {"engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
HYBRID = (*FULL_ATTENTION, CacheGroup(LAST_VALUE, 1, is_recurrent=True))
OF_A_RANK = {"num_running_reqs", "kv_used_tokens", "prompt_tokens", "cached_tokens", "kv_pages"}


class Scrapes:
    """The metrics of a scheduler on the fake executor."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.requests = RequestMetrics("model")
        self.engine = EngineMetrics(self.requests)

    def families(self) -> dict[str, Any]:
        scheduler = self.driver.scheduler
        self.engine.update(
            {
                "ranks": scheduler.rank_states(),
                "counters": scheduler.counters(),
                "waiting_for": scheduler.count_waiting(),
                "num_waiting_retracted": scheduler.num_waiting_retracted,
                "num_sessions": scheduler.num_sessions,
                "tenants": {name: each._asdict() for name, each in scheduler.tenants().items()},
            }
        )
        text = self.requests.exposition().decode()
        families = text_string_to_metric_families(text)
        return {family.name.removeprefix("sglang:"): family for family in families}

    def values(self, name: str, **labels: str) -> float:
        """The sum over the samples with these labels."""
        family = self.families()[name.removesuffix("_total")]
        return sum(
            sample.value
            for sample in family.samples
            if sample.name == f"sglang:{name}" and labels.items() <= sample.labels.items()
        )


def pressed() -> Scrapes:
    """Two ranks with too little memory for their requests."""
    args = SchedulerArgs(schedule_conservativeness=0.0)
    return Scrapes(Driver(make_sizes(dp_size=2, num_pages=13, num_rows=9), args))


@pytest.mark.parametrize(
    ("names", "kind"), [(GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")]
)
def test_every_metric_has_its_type_a_help_and_the_models_name(names: str, kind: str) -> None:
    families = pressed().families()
    for name in names.split():
        family = families[name]
        assert family.type == kind
        assert family.documentation
        assert family.samples
        for sample in family.samples:
            assert sample.labels["model_name"] == "model"


def test_labels_of_workers_are_there_and_the_rank_where_figures_differ() -> None:
    families = pressed().families()
    for name in [*GAUGES.split(), "prompt_tokens", "cached_tokens", "realtime_tokens", "kv_pages"]:
        assert families[name].samples[0].labels.keys() >= WORKER, name
    for name in OF_A_RANK:
        assert {sample.labels["dp_rank"] for sample in families[name].samples} == {"0", "1"}
    assert {s.labels["cache_source"] for s in families["cached_tokens"].samples} == {"device"}
    modes = {"prefill_compute", "prefill_cache", "decode"}
    assert {s.labels["mode"] for s in families["realtime_tokens"].samples} == modes


def test_no_gauge_has_a_counters_name() -> None:
    for family in pressed().families().values():
        assert family.type == "counter" or not family.name.endswith("_total")


def test_figures_of_a_load_are_those_of_what_was_sent() -> None:
    scrapes = Scrapes(Driver(make_sizes(num_pages=64)))
    driver = scrapes.driver
    driver.submit(generate("first", [1] * 20, 4))
    driver.run()
    driver.submit(generate("second", [1] * 20 + [2] * 5, 6))
    driver.submit(generate("third", [3] * 9, 2))
    driver.run()
    assert scrapes.values("prompt_tokens_total") == 20 + 25 + 9
    assert scrapes.values("cached_tokens_total") == 20
    assert scrapes.values("cache_hit_rate") == pytest.approx(20 / 54)
    assert scrapes.values("realtime_tokens_total", mode="prefill_cache") == 20
    assert scrapes.values("realtime_tokens_total", mode="decode") == 4 + 6 + 2
    assert scrapes.values("num_running_reqs") == scrapes.values("num_queue_reqs") == 0
    assert scrapes.values("num_used_tokens") == scrapes.values("token_usage") == 0
    assert scrapes.values("kv_available_tokens") + scrapes.values("kv_evictable_tokens") == 63 * 4
    assert scrapes.values("max_total_num_tokens") == 63 * 4
    assert scrapes.values("kv_evictable_tokens") >= 24


def test_running_requests_use_the_pages_that_they_hold() -> None:
    scrapes = Scrapes(Driver(make_sizes(num_pages=64)))
    scrapes.driver.submit(generate("one", [1] * 20, 30))
    while not scrapes.driver.tokens["one"]:
        scrapes.driver.step()
    held = scrapes.values("kv_used_tokens")
    assert held >= 20
    assert scrapes.values("token_usage") == held / (63 * 4)
    assert scrapes.values("full_token_usage") == held / (63 * 4)
    assert scrapes.values("swa_token_usage") == scrapes.values("mamba_usage") == 0
    assert 0 < scrapes.values("new_token_ratio") <= 1


def test_retracts_are_counted_with_their_tokens() -> None:
    scrapes = pressed()
    for number in range(8):
        scrapes.driver.submit(generate(str(number), [number] * 8, 16, dp_rank=0))
    seen_waiting = False
    while not scrapes.driver.scheduler.is_idle:
        scrapes.driver.step()
        seen_waiting |= scrapes.values("num_retracted_reqs") > 0
    assert seen_waiting
    count = scrapes.values("num_retracted_requests_total", dp_rank="0")
    assert count > 0
    assert scrapes.values("num_retracted_requests_total", dp_rank="1") == 0
    assert scrapes.values("num_retracted_input_tokens_total") == 8 * count
    assert 0 < scrapes.values("num_retracted_output_tokens_total") < 16 * count


@pytest.mark.parametrize("settings", [{}, {"groups": HYBRID, "states": (9, 1, 1)}])
def test_the_states_of_each_pools_pages_add_up_at_every_step(settings: Mapping[str, Any]) -> None:
    args = SchedulerArgs(schedule_conservativeness=0.0)
    scrapes = Scrapes(Driver(make_sizes(dp_size=2, num_pages=24, **settings), args))
    pools = set()
    for number in range(24):
        scrapes.driver.submit(generate(str(number), [number % 3] * (5 + number % 7), 12))
    while not scrapes.driver.scheduler.is_idle:
        scrapes.driver.step()
        sums: dict[tuple[str, str], float] = {}
        for sample in scrapes.families()["kv_pages"].samples:
            place = sample.labels["dp_rank"], sample.labels["pool"]
            pools.add(sample.labels["pool"])
            sign = -1 if sample.labels["state"] == "total" else 1
            sums[place] = sums.get(place, 0) + sign * sample.value
        assert len(sums) == 2 * (1 + bool(settings))
        assert set(sums.values()) == {0}
    assert pools == ({"full", "states"} if settings else {"full"})
