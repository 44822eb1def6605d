"""The host's memory of an executor: its rates are measured, and its blocks have one byte order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import PageTransfer
from sgl_jax.core.transfers import Transfers
from sgl_jax.executor.model_executor import ModelExecutor

HOST: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}


def test_both_rates_are_measured(make_executor: Callable[..., ModelExecutor]) -> None:
    executor = make_executor(**HOST)
    assert executor._host_store is not None
    executor._measure_rates(executor._host_store)
    assert 0.0 < executor.fetch_rate < 1e12
    assert 0.0 < executor.prefill_rate < 1e12
    assert executor.ended_transfers() == []


@pytest.mark.long
def test_the_warm_up_measures_and_leaves_nothing(make_args: Callable[..., ServerArgs]) -> None:
    executor = ModelExecutor(make_args(warmup="plain", **HOST))
    executor.warm_up()
    assert executor.fetch_rate > 0.0
    assert executor.prefill_rate > 0.0
    assert not any(np.asarray(pool).any() for pool in executor._state.kv_pools)
    # All that a fetch needs is compiled.
    pages = (np.array([1, 2], np.int32),)
    move = PageTransfer(0, 1, pages, pages)
    executor.transfer(Transfers(fetches=(move,)))
    executor.wait_for_transfers()
    (end,) = executor.ended_transfers()
    assert (end.number, end.succeeded) == (1, True)
    executor.transfer(Transfers(placed=(move,)))
    assert executor.compile_counts()["compiles_after_ready"] == 0
    executor.close()
