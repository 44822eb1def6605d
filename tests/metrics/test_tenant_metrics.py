"""Figures of tenants: few labels, and counters that never go back."""

from sgl_jax.metrics.tenant_metrics import MAX_USERS, OTHER_USERS, TenantMetrics

NAMES = ("num_queued", "num_running", "prompt_tokens", "cached_tokens", "generated_tokens")


def figures(*values: int) -> dict[str, int]:
    return dict(zip(NAMES, values, strict=True))


def samples(metrics: TenantMetrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("sglang:tenant_"), sample.labels["tenant"]): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_what_a_forgotten_tenant_had_stays_counted() -> None:
    metrics = TenantMetrics("model")
    users = {f"user {i}": figures(0, 1, 10, 5, 2) for i in range(MAX_USERS + 2)}
    metrics.update(users)
    last = users.popitem()[0]  # the engine forgets it, and has it anew after that
    metrics.update(users)
    assert samples(metrics)["generation_tokens_total", OTHER_USERS] == 4
    assert samples(metrics)["num_running_reqs", OTHER_USERS] == 1
    metrics.update({**users, last: figures(3, 0, 1, 1, 1)})
    assert samples(metrics)["generation_tokens_total", OTHER_USERS] == 5
    assert samples(metrics)["num_queue_reqs", OTHER_USERS] == 3
    metrics.update({"": figures(1, 0, 0, 0, 0), "user 0": figures(0, 0, 11, 5, 9)})
    assert samples(metrics)["prompt_tokens_total", "user 0"] == 11
    assert samples(metrics)["generation_tokens_total", OTHER_USERS] == 5
    assert samples(metrics)["num_queue_reqs", OTHER_USERS] == 0
    assert samples(metrics)["num_queue_reqs", ""] == 1
