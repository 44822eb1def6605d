"""Shares of tenants: tokens that the cache has cost nothing."""

from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.tenants import Tenants
from tests.scheduler.driver import make_sizes


def test_cached_tokens_do_not_count_against_a_tenant() -> None:
    tenants = Tenants(make_sizes(), is_fair=True)
    cached, computed = (tenants.enter(Tenant(name=name)) for name in ("cached", "computed"))
    for number in (cached, computed):
        tenants.queue(number, 1)
    tenants.serve_prompt(cached, 200, 190)
    tenants.serve_prompt(computed, 50, 0)
    turns = tenants.turns()
    assert turns is not None
    assert turns.order[cached] < turns.order[computed]
    assert tenants.counts()["cached"][2:4] == (200, 190)
