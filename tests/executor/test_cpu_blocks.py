"""Host memory of an executor: its rates are measured, and its blocks have one byte order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import PageTransfer
from sgl_jax.core.transfers import Transfers
from sgl_jax.executor.block_pool import BlockPool
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.mem_cache.device_pool import ChipView

HOST: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}


def test_both_rates_are_measured(make_executor: Callable[..., ModelExecutor]) -> None:
    executor = make_executor(**HOST)
    assert executor.cpu_blocks is not None
    executor._measure_rates(executor.cpu_blocks)
    assert 0.0 < executor.fetch_rate < 1e12
    assert 0.0 < executor.prefill_rate < 1e12
    assert executor.ended_transfers() == []


def test_the_rate_of_the_store_is_measured(
    make_executor: Callable[..., ModelExecutor], tmp_path: Path
) -> None:
    store = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    for page_size in (4, 8):  # neither engine reads the other's values
        executor = make_executor(**HOST, **store, page_size=page_size)
        assert executor.cpu_blocks is not None
        assert 0.0 < executor.cpu_blocks.measure_store() < 1e12
    assert executor.ended_transfers() == []
    behind = executor.cpu_blocks.store
    assert behind is not None
    behind._suspend("it hangs")
    assert executor.cpu_blocks.measure_store() == 0.0, "it is left alone"


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
    assert executor.cpu_blocks is not None
    executor.cpu_blocks.wait()
    (end,) = executor.ended_transfers()
    assert (end.number, end.succeeded) == (1, True)
    executor.transfer(Transfers(placed=(move,)))
    assert executor.compile_counts()["compiles_after_ready"] == 0
    executor.close()


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 2, 1, 0)])
def test_the_bytes_of_a_block_are_in_the_order_of_the_mesh(order: tuple[int, ...]) -> None:
    """So an engine finds blocks that another one with other ids of devices has stored."""
    contents = np.arange(2 * 8 * 4 * 6, dtype=np.float32).reshape(2, 8, 4, 1, 6)
    pages, blocks = np.array([3, 1], np.int32), np.array([1, 2], np.int32)
    values = []
    for devices in ((0, 1, 2, 3), order):
        mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(2, 2), ("data", "tensor"))
        sharding = NamedSharding(mesh, P(None, "data", "tensor"))
        shape = jax.ShapeDtypeStruct(contents.shape, np.float32, sharding=sharding)
        pool = BlockPool([shape], [ChipView(1, 1, 6)], 3, mesh)
        arrays = (jax.device_put(contents, sharding),)
        pool.write(1, blocks, pool.gather(arrays, 1, pages))
        values.append([pool.values(1, block) for block in (1, 2)])
    assert values[0] == values[1]
    assert values[0][0] == [contents[:, 4 + 3].tobytes()], "of rank 1"
    # The other mesh's blocks come back from the bytes.
    assert all(pool.set_values(1, block, values[0][block - 1]) for block in (1, 2))
    empty = (jax.device_put(np.zeros_like(contents), sharding),)
    (written,) = pool.scatter(empty, 1, pages, pool.read(1, blocks))
    expected = np.zeros_like(contents)
    expected[:, 4 + pages] = contents[:, 4 + pages]
    assert np.array_equal(written, expected)
