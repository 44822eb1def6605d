"""How many pages a rank gets, and what is said when there is no room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor import pool_size
from sgl_jax.executor.pool_size import KVPools, choose_pool_pages
from sgl_jax.mem_cache.device_pool import KVPoolLayout

GIB = 1 << 30
LAYOUT = KVPoolLayout(
    num_layers=4, num_kv_heads=2, page_size=16, head_dim=128, dtype=jnp.dtype("float32")
)  # 131,072 bytes a page


def num_pages(args, mesh, rows=4, pages_per_row=8, workspace_bytes=0, unloaded_bytes=0):
    """Of the one pool of a model whose layers attend to every token."""
    pools = KVPools((LAYOUT,), num_tables=(1,), resting_pages=(0,), step_pages=(0,), num_rows=rows)
    (pages,) = choose_pool_pages(args, pools, mesh, pages_per_row, workspace_bytes, unloaded_bytes)
    return pages


# Of a model with a third of its layers attending to every token, the others to a window.
WIDE = LAYOUT._replace(num_layers=2)
WINDOWED = KVPools((WIDE, LAYOUT), (1, 1), resting_pages=(0, 8), step_pages=(0, 8), num_rows=4)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices("cpu")[:2]).reshape(2, 1), ("data", "tensor"))


@pytest.fixture
def available(monkeypatch):
    def set_bytes(num_bytes):
        monkeypatch.setattr(pool_size, "_available_host_bytes", lambda: num_bytes)

    return set_bytes


def test_the_argument_decides_and_the_null_page_comes_on_top(mesh):
    args = ServerArgs(max_total_tokens=1000)
    assert num_pages(args, mesh) == 62 + 1


def test_on_a_cpu_no_more_than_all_rows_at_their_longest_could_use(mesh, available):
    available(100 * GIB)
    assert num_pages(ServerArgs(), mesh, 4, 8, 0) == 32 + 1


def test_on_a_cpu_a_gibibyte_is_enough_unless_one_request_needs_more(mesh, available):
    available(100 * GIB)
    assert num_pages(ServerArgs(), mesh, 100, 1000, 0) == 8192 + 1
    assert num_pages(ServerArgs(), mesh, 100, 10_000, 0) == 10_000 + 1


def test_on_a_cpu_all_ranks_together_take_a_quarter_of_what_is_available(mesh, available):
    available(GIB)
    assert num_pages(ServerArgs(), mesh, 100, 1000, 0) == 1024
    # Each of the two devices has a part of the weights.
    assert num_pages(ServerArgs(), mesh, 100, 1000, 0, GIB // 4) == 512


def test_on_an_accelerator_pages_get_what_weights_and_a_steps_logits_leave(mesh, monkeypatch):
    monkeypatch.setattr(pool_size, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(pool_size, "_free_device_bytes", lambda device, fraction: GIB)
    assert num_pages(ServerArgs(), mesh, 4, 8, 0) == 8192
    logits = 256 * 131_072
    assert num_pages(ServerArgs(), mesh, 4, 8, logits) == 8192 - 256
    unloaded = 512 * 131_072
    assert num_pages(ServerArgs(), mesh, 4, 8, logits, unloaded) == 8192 - 256 - 512


def test_no_room_for_a_page_is_an_error_that_says_what_to_change(mesh, available):
    available(131_072 * 4)
    with pytest.raises(RuntimeError, match=r"not one page of 16 tokens .* smaller model"):
        num_pages(ServerArgs(), mesh, 4, 8, 0)


def test_this_machines_memory_is_read_and_plausible():
    assert 1 << 24 < pool_size._available_host_bytes() < 1 << 50


class FakeDevice:
    platform = "tpu"

    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


class FakeMesh:
    def __init__(self, *stats):
        self.shape = {"data": 1, "tensor": 2}
        self.local_devices = [FakeDevice(s) for s in stats]
        self.devices = np.array(self.local_devices)


def test_on_an_accelerator_the_fullest_chip_decides_after_weights():
    free, fuller = ({"bytes_limit": 10 * GIB, "bytes_in_use": n * GIB} for n in (1, 4))
    args = ServerArgs(mem_fraction_static=0.9)
    pages = num_pages(args, FakeMesh(free, fuller), 4, 8, 0)
    assert pages == 5 * GIB // (131_072 // 2)


def test_a_device_that_does_not_tell_its_memory_needs_the_argument():
    with pytest.raises(RuntimeError, match="--max-total-tokens"):
        num_pages(ServerArgs(), FakeMesh(None), 4, 8, 0)


def test_windows_get_pages_for_all_rows_and_a_share_for_cached_ones():
    assert WINDOWED.pages(4000) == (4000, 4 * 8 + 8 + 2000)
    assert WINDOWED.rows_within(WINDOWED.pages(4000)) == 4
    for num_first in (0, 1, 7, 4000):
        num_bytes = WINDOWED.num_bytes(num_first)
        assert WINDOWED.num_that_fit(num_bytes) == num_first
        assert WINDOWED.num_that_fit(num_bytes - 1) == num_first - 1


def test_where_memory_is_short_windows_get_three_quarters_of_it_and_fewer_rows_run():
    assert WIDE.page_bytes * 2 == LAYOUT.page_bytes
    assert WINDOWED.pages(20) == (20, 30)
    assert WINDOWED.rows_within((20, 30)) == 2
    assert WINDOWED.pages(4) == (4, 16)  # those of one row
    assert WINDOWED.rows_within((4, 16)) == 1


def test_the_ratio_of_tokens_decides_instead(mesh):
    pools = WINDOWED._replace(window_tokens_ratio=0.2)
    assert pools.pages(400) == (400, 80)
    assert pools.rows_within((400, 80)) == 4
    args = ServerArgs(max_total_tokens=16 * 79, swa_full_tokens_ratio=0.2)
    with pytest.raises(ValueError, match=r"--swa-full-tokens-ratio 0.2 .* too few .* one request"):
        choose_pool_pages(args, pools, mesh, 1000, 0)


def test_two_groups_that_share_a_pool_have_the_memory_of_so_many_tokens(mesh):
    pools = KVPools((LAYOUT,), (2,), resting_pages=(0,), step_pages=(0,), num_rows=4)
    args = ServerArgs(max_total_tokens=1600)
    assert choose_pool_pages(args, pools, mesh, 100, 0) == (2 * 100 + 1,)


def test_all_pools_together_take_what_is_there(mesh, monkeypatch):
    monkeypatch.setattr(pool_size, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(pool_size, "_free_device_bytes", lambda device, fraction: GIB)
    pages = choose_pool_pages(ServerArgs(), WINDOWED, mesh, 1000, 0)
    assert pages[1] - 1 == 4 * 8 + 8 + (pages[0] - 1) // 2
    num_bytes = pages[0] * WIDE.page_bytes + pages[1] * LAYOUT.page_bytes
    assert GIB - 2 * (WIDE.page_bytes + LAYOUT.page_bytes) < num_bytes <= GIB
