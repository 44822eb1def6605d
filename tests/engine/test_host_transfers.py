"""An engine's transfers: what the executor has measured, and how long requests wait for a store."""

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_jax.engine.host_transfers import HostTransfers
from tests.scheduler.driver import generate
from tests.scheduler.test_host_memory import PROMPT, driver_with_prefix


@pytest.mark.parametrize(("fetch_rate", "cached"), [(0.0, 40), (1e3, 0), (1e6, 40)])
def test_measured_rates_decide_about_the_first_fetch(fetch_rate: float, cached: int) -> None:
    driver = driver_with_prefix(fetch_policy="sooner")
    executor: Any = SimpleNamespace(prefill_rate=1e4, fetch_rate=fetch_rate)
    HostTransfers(driver.scheduler, executor, None)
    driver.submit(generate("second", [*PROMPT, 1], 1))
    driver.run()
    assert driver.cached["second"] == cached
