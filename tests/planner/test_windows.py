"""Models with windows on slices: what windows save, and weights that need no copies."""

import pytest

from sgl_jax.core.layer_configs import MXFP4_GROUP
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.placement import place_model
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.estimate import device_bytes
from sgl_jax.planner.memory import (
    plan_memory,
    requests_without_sharing,
    requests_without_windows,
)
from sgl_jax.planner.topology import has_tpu_compiler, topology_mesh

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

LOAD = ["--input-len", "31744", "--output-len", "1024"]  # 32,768 tokens
GEMMA = ["--model-path", "gemma-3-27b", "--topology", "v6e-8", "--tp-size", "8", *LOAD]


@pytest.mark.parametrize(
    ("topology", "tp_size"), [("v5e-32", 32), ("v6e-16", 16), ("v5p-16", 8), ("tpu7x-8", 8)]
)
def test_gpt_oss_120b_runs_far_more_long_requests_than_if_every_layer_kept_all(topology, tp_size):
    words = ["--model-path", "gpt-oss-120b", "--topology", topology, "--tp-size", str(tp_size)]
    request = parse_plan_request([*words, *LOAD])
    memory = plan_memory(request)
    full = requests_without_windows(request, memory)
    assert full > 0
    assert memory.num_requests >= 1.7 * full


def test_fewer_pages_for_cached_windows_leave_room_for_more_requests():
    default = parse_plan_request(GEMMA)
    small = parse_plan_request([*GEMMA, "--swa-full-tokens-ratio", "0.1"])
    plans = [plan_memory(request) for request in (default, small)]
    full = requests_without_windows(default, plans[0])
    assert requests_without_windows(small, plans[1]) == full  # no window, no pool for it
    assert full < plans[0].num_requests < plans[1].num_requests


def test_too_few_pages_for_one_window_are_refused():
    request = parse_plan_request([*GEMMA, "--swa-full-tokens-ratio", "0.001"])
    with pytest.raises(ValueError, match="too few pages for one request"):
        plan_memory(request)


def test_a_model_without_windows_is_compared_with_nothing():
    words = ["--model-path", "qwen3-8b", "--topology", "v6e-4", "--tp-size", "4"]
    request = parse_plan_request(words)
    plan = plan_memory(request)
    assert requests_without_windows(request, plan) is None
    assert requests_without_sharing(request) is None


def test_shared_caches_leave_room_for_twice_as_many_requests():
    words = ["--model-path", "gemma-4-e2b", "--topology", "v6e-1"]
    request = parse_plan_request([*words, "--input-len", "7168", "--output-len", "1024"])
    plan = plan_memory(request)
    assert plan.kv_token_bytes == 18432  # 15 of 35 layers
    assert plan.num_requests > 2 * requests_without_sharing(request) > 0
    mesh = topology_mesh(request.topology, 1, 1)
    engine = engine_programs(request.args, request.config, mesh, plan.pool_pages)
    assert device_bytes(engine, request).kv_token_bytes == 43008  # that all layers read


@pytest.mark.parametrize("tp_size", [8, 16, 32])
def test_a_chips_part_of_gpt_oss_experts_is_whole_registers(tp_size):
    """Else the compiler copies all of them into another layout in every step."""
    words = ["--model-path", "gpt-oss-120b", "--topology", "v6e-32", "--tp-size", str(tp_size)]
    request = parse_plan_request([*words, "--dp-size", str(32 // tp_size), *LOAD])
    mesh = topology_mesh(request.topology, request.args.dp_size, tp_size)
    options = EngineConfig.resolve(request.args, request.config, "tpu").build_options
    declared = place_model(request.config, mesh, options).declared.values()
    experts = [own for own in declared if own.read == "experts"]
    values = [own.array.shape for own in experts if own.initial == "values"]
    scales = [own.array for own in experts if own.initial == "scales"]
    assert len(values) == len(scales) == 6  # gate, up and down, of two kinds of layers
    for shape in values:
        assert shape[-2] % (MXFP4_GROUP * tp_size) == shape[-1] % 128 == 0, shape
        assert shape[-2] < 1.1 * 2880
    for own in scales:
        own.sharding.shard_shape(own.shape)  # raises if the chips cannot share it
