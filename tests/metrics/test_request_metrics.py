"""Figures that dashboards rely on."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.metrics.request_metrics import RequestMetrics, TimeHistogram


def samples(metrics: RequestMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {s.name: s.value for family in families for s in family.samples if "le" not in s.labels}


def test_a_histogram_tells_what_the_librarys_tells() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds_s = (0.01, 0.5, 1, 20)
    histogram = TimeHistogram("a:time_seconds", "of a thing", bounds_s, {"model": "m"}, ours)
    labelled = Histogram(
        "a:time_seconds", "of a thing", ["model"], buckets=bounds_s, registry=theirs
    )
    expected = labelled.labels("m")
    for seconds, count in [(0.0, 1), (0.01, 3), (0.25, 2), (1.0, 1), (20.5, 4)]:
        histogram.observe(seconds, count)
        for _ in range(count):
            expected.observe(seconds)
    lines = generate_latest(theirs).decode().splitlines()
    kept = [line for line in lines if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == kept


def test_two_engines_in_one_process_do_not_meet() -> None:
    first, second = RequestMetrics("model"), RequestMetrics("model")
    EngineMetrics(first)
    EngineMetrics(second)
    first.generated_tokens.inc(5)
    assert samples(first)["sglang:generation_tokens_total"] == 5
    assert samples(second)["sglang:generation_tokens_total"] == 0
    assert "sglang:gen_throughput" in samples(second)
