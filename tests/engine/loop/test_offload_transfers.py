"""An engine's transfers: what the executor has measured, and how long requests wait for a store."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.transfers import TransferEnd, Transfers
from sgl_jax.engine.loop.offload_transfers import OffloadTransfers
from sgl_jax.scheduler.scheduler import Scheduler
from tests.scheduler.driver import generate, make_sizes
from tests.scheduler.test_host_memory import PROMPT, driver_with_prefix


@pytest.mark.parametrize(("fetch_rate", "cached"), [(0.0, 40), (1e3, 0), (1e6, 40)])
def test_measured_rates_decide_about_the_first_fetch(fetch_rate: float, cached: int) -> None:
    driver = driver_with_prefix(fetch_policy="sooner")
    executor: Any = SimpleNamespace(prefill_rate=1e4, fetch_rate=fetch_rate, store_rate=0.0)
    OffloadTransfers(driver.scheduler, executor, None)
    driver.submit(generate("second", [*PROMPT, 1], 1))
    driver.run()
    assert driver.cached["second"] == cached


def test_a_request_waits_for_a_search_and_its_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SchedulerArgs(hicache_storage_backend="file")
    scheduler = Scheduler(make_sizes(host_ratio=4.0), args)
    ends: list[TransferEnd] = []
    begun: list[Transfers] = []
    executor: Any = SimpleNamespace(
        prefill_rate=0.0,
        fetch_rate=0.0,
        store_rate=0.0,
        ended_transfers=lambda: [ends.pop()] if ends else [],
        store=None,
        transfer=begun.append,
    )
    transfers = OffloadTransfers(scheduler, executor, 10.0)
    scheduler.handle(generate("first", PROMPT, 1))
    is_awaited = scheduler.ranks[0].host.store.pending

    def move(now_s: float) -> None:
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        transfers.move()

    move(100.0)
    (search,) = begun[-1].searches
    found = (np.ones(len(search.keys[0]), np.bool_),)
    ends.append(TransferEnd(0, search.number, True, 7.0, found))
    move(107.0)
    (load,) = begun[-1].loads
    assert load.end_s == 110.0
    move(110.4)
    assert is_awaited == {"first"}, "the load may be about to end"
    move(110.6)
    assert is_awaited == set()
