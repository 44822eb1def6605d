"""Prefixes in host memory: their room, and the time to load them beside computing them."""

import pytest

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.planner.advice import advise
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.prefix_loading import plan_loading, prefix_bytes
from sgl_jax.planner.topology import GIB, Topology, has_tpu_compiler
from tests.planner.test_advice import plan_of

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

LLAMA = ["--model-path", "llama-3.1-8b", "--topology", "v6e-1"]
TOKEN_BYTES = 32 * 8 * 2 * 128 * 2  # K and V of 8 heads in 32 layers
HOST = "--enable-hierarchical-cache"


def loading_of(*words, compute_s):
    request = parse_plan_request([HOST, *words])
    config = EngineConfig.resolve(request.args, request.config, "tpu")
    return plan_loading(request, config, 16_384 + 100, compute_s)


def bytes_of(model, *words):
    request = parse_plan_request(["--model-path", model, *words])
    config = EngineConfig.resolve(request.args, request.config, "tpu")
    return config, lambda tokens: prefix_bytes(config, tokens)


def test_the_host_holds_as_many_pages_as_the_ratio_or_the_size_gives():
    memory = plan_memory(parse_plan_request([*LLAMA, HOST, "--hicache-ratio", "3"]))
    pages = 3 * memory.num_pages
    assert memory.host_tokens == pages * 128
    assert memory.host_bytes == (pages + 1) * 128 * TOKEN_BYTES
    memory = plan_memory(parse_plan_request([*LLAMA, HOST, "--hicache-size", "40"]))
    assert 39.9e9 < memory.host_bytes < 40.1e9
    memory = plan_memory(parse_plan_request(LLAMA))
    assert (memory.host_bytes, memory.host_tokens) == (0, 0)


def test_each_host_of_a_slice_has_its_part_of_the_blocks():
    words = ["--model-path", "llama-3.1-8b", HOST, "--max-total-tokens", "65536"]
    one = plan_memory(parse_plan_request([*words, "--topology", "v6e-8", "--dp-size", "8"]))
    four = plan_memory(parse_plan_request([*words, "--topology", "v6e-16", "--dp-size", "16"]))
    assert one.host_bytes == 8 * (2 * 512 + 1) * 128 * TOKEN_BYTES
    assert four.host_bytes == one.host_bytes / 2  # four chips a host in place of eight


@pytest.mark.parametrize(
    ("name", "gib"),
    [("v5e-1", 48), ("v5e-4", 192), ("v5e-8", 384), ("v5p-8", 448), ("v6e-16", 704)],
)
def test_the_memory_of_a_host_is_its_machine_types(name, gib):
    assert Topology.parse(name).host_memory_bytes == gib * GIB


def test_more_than_the_host_has_is_the_first_advice():
    crowded = plan_of("--topology", "v6e-1", HOST, "--hicache-size", "300")
    assert advise(crowded)[0].startswith("prefixes take 279.4")
    assert "which is 176.00 GiB: the engine would not start" in advise(crowded)[0]
    assert not any("prefixes" in line for line in advise(plan_of("--topology", "v6e-1", HOST)))


def test_a_load_takes_the_bytes_over_the_links_and_the_store_comes_before():
    loading = loading_of(*LLAMA, compute_s=lambda tokens: tokens * 1e-5)
    assert [each.tokens for each in loading.times] == [1024, 8192, 16_384]
    for each in loading.times:
        assert each.host_s == pytest.approx(each.tokens * TOKEN_BYTES / 32e9)
        assert each.store_s == pytest.approx(each.host_s + each.tokens * TOKEN_BYTES / 3e9)
        assert each.compute_s == each.tokens * 1e-5
    assert (loading.host_from, loading.store_from) == (128, None)  # 4.1, 47.8 and 10 us a token
    rates = ["--host-link-gb-s", "131.072", "--store-gb-s", "13.1072"]
    loading = loading_of(*LLAMA, *rates, compute_s=lambda tokens: tokens**2 * 1e-8)
    # 1 and 11 us a token against one for a hundred tokens: from the next pages on.
    assert (loading.host_from, loading.store_from) == (128, 1152)


def test_each_chip_of_a_rank_has_a_link_and_a_store_serves_one_host():
    tp = ["--model-path", "llama-3.1-8b", "--topology", "v6e-8", "--tp-size", "8"]
    one = loading_of(*LLAMA, compute_s=lambda tokens: 1.0)
    eight = loading_of(*tp, compute_s=lambda tokens: 1.0)
    assert one.times[0].host_s == pytest.approx(8 * eight.times[0].host_s)
    hosts = ["--model-path", "llama-3.1-8b", "--topology", "v6e-16", "--dp-size", "16"]
    several = loading_of(*hosts, compute_s=lambda tokens: 1.0)
    assert (several.times[0].store_s, several.store_from) == (None, None)
    devices = ["--model-path", "llama-3.1-8b", "--topology", "tpu7x-2", "--dp-size", "2"]
    half = loading_of(*devices, compute_s=lambda tokens: 1.0)
    # A rank has half a chip, and the link of a whole one.
    assert half.times[0].host_s == pytest.approx(one.times[0].host_s * 32 / 46)


def test_a_window_loads_its_last_pages_and_a_recurrence_one_state():
    config, windows = bytes_of("gpt-oss-120b", "--topology", "v6e-8", "--tp-size", "8")
    (layer,) = {config.page_bytes[group.pool] / len(group.layers) for group in config.groups}
    # Half of the layers have a window of 128 tokens: the next token reads 127 before it.
    assert windows(128 * 9) - windows(128 * 8) == 18 * layer
    assert windows(128 * 9) == (18 * 9 + 18) * layer
    config, states = bytes_of("qwen3-next-80b-a3b", "--topology", "v6e-8", "--tp-size", "8")
    assert config.groups[-1].is_recurrent
    page, slot = config.page_bytes
    page_size = config.args.page_size
    assert states(page_size * 5) == 5 * page + slot
