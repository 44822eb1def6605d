"""The vision tower of a published model, by the TPU's compiler."""

import math

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.planner.arguments import PlanRequest, Workload, read_served_config
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh

MODEL = "qwen3-vl-8b"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed"),
]


@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_the_tower_fits_the_memory_set_aside_and_changes_its_table_in_place(
    num_tokens: int,
) -> None:
    args = ServerArgs(
        model_path=MODEL,
        page_size=128,
        max_running_requests=64,
        chunked_prefill_size=2048,
        context_length=8192,
        enable_multimodal=True,
    )
    topology = Topology.parse("v6e-1")
    config = read_served_config(args)
    request = PlanRequest(args, config, topology, Workload(1024, 1024))
    pool_pages = tuple(num + 1 for num in plan_memory(request).pool_pages)
    engine = engine_programs(args, config, topology_mesh(topology, 1, 1), pool_pages)
    images = engine.config.images
    assert images is not None
    assert images.most_tokens == 4096
    memory = engine.programs.lower_encode(num_tokens).compile().memory_analysis()
    assert memory is not None
    table = math.prod(engine.state.images.vectors.shape) * images.dtype.itemsize
    assert memory.alias_size_in_bytes >= table
    assert memory.temp_size_in_bytes <= images.device_bytes - table
