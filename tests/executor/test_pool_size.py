"""How many pages a rank gets, and what is said when there is no room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor import pool_size
from sgl_jax.executor.pool_size import choose_num_pages
from sgl_jax.mem_cache.device_pool import KVPoolLayout

GIB = 1 << 30
LAYOUT = KVPoolLayout(
    num_layers=4, num_kv_heads=2, page_size=16, head_dim=128, dtype=jnp.dtype("float32")
)  # 131,072 bytes a page


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
    assert (
        choose_num_pages(args, LAYOUT, mesh, rows_per_rank=4, pages_per_row=8, workspace_bytes=0)
        == 62 + 1
    )


def test_on_a_cpu_no_more_than_all_rows_at_their_longest_could_use(mesh, available):
    available(100 * GIB)
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 4, 8, 0) == 32 + 1


def test_on_a_cpu_a_gibibyte_is_enough_unless_one_request_needs_more(mesh, available):
    available(100 * GIB)
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 100, 1000, 0) == 8192 + 1
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 100, 10_000, 0) == 10_000 + 1


def test_on_a_cpu_all_ranks_together_take_a_quarter_of_what_is_available(mesh, available):
    available(GIB)
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 100, 1000, 0) == 1024


def test_on_an_accelerator_pages_get_what_weights_and_a_steps_logits_leave(mesh, monkeypatch):
    monkeypatch.setattr(pool_size, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(pool_size, "_free_device_bytes", lambda device, fraction: GIB)
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 4, 8, 0) == 8192
    logits = 256 * 131_072
    assert choose_num_pages(ServerArgs(), LAYOUT, mesh, 4, 8, logits) == 8192 - 256


def test_no_room_for_a_page_is_an_error_that_says_what_to_change(mesh, available):
    available(131_072 * 4)
    with pytest.raises(RuntimeError, match=r"not one page of 16 tokens .* smaller model"):
        choose_num_pages(ServerArgs(), LAYOUT, mesh, 4, 8, 0)


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
    num_pages = choose_num_pages(args, LAYOUT, FakeMesh(free, fuller), 4, 8, 0)
    assert num_pages == 5 * GIB // (131_072 // 2)


def test_a_device_that_does_not_tell_its_memory_needs_the_argument():
    with pytest.raises(RuntimeError, match="--max-total-tokens"):
        choose_num_pages(ServerArgs(), LAYOUT, FakeMesh(None), 4, 8, 0)
