"""The vision towers and the steps of published models with images, by the TPU's compiler."""

import math

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.placement import bytes_per_device
from sgl_jax.planner.arguments import PlanRequest, Workload, read_served_config
from sgl_jax.planner.engine_programs import EngineProgramsOnPaper, engine_programs
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import GIB, Topology, has_tpu_compiler, topology_mesh
from tests.tpu.copies import copies, pools_of, shapes_kept

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed"),
]


def _engine(model: str, topology_name: str, tp: int) -> EngineProgramsOnPaper:
    args = ServerArgs(
        model_path=model,
        tp_size=tp,
        page_size=128,
        max_running_requests=64,
        chunked_prefill_size=2048,
        context_length=8192,
        enable_multimodal=True,
    )
    topology = Topology.parse(topology_name)
    config = read_served_config(args)
    request = PlanRequest(args, config, topology, Workload(1024, 1024))
    pool_pages = tuple(num + 1 for num in plan_memory(request).pool_pages)
    return engine_programs(args, config, topology_mesh(topology, 1, tp), pool_pages)


@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_the_tower_fits_the_memory_set_aside_and_changes_its_table_in_place(
    num_tokens: int,
) -> None:
    engine = _engine("qwen3-vl-8b", "v6e-1", 1)
    images = engine.config.images
    assert images is not None
    assert images.most_tokens == 4096
    memory = engine.programs.lower_encode(num_tokens).compile().memory_analysis()
    assert memory is not None
    table = math.prod(engine.state.images.vectors.shape) * images.dtype.itemsize
    assert memory.alias_size_in_bytes >= table
    assert memory.temp_size_in_bytes <= images.device_bytes - table


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("model", "topology", "tp"),
    [
        ("qwen3-vl-8b", "v6e-1", 1),
        ("qwen3-vl-8b", "tpu7x-2", 1),
        ("qwen3-vl-30b-a3b", "v6e-4", 4),
        ("gemma-3-27b", "v6e-4", 4),
    ],
)
def test_a_step_with_images_copies_neither_weights_nor_cache_nor_vectors(
    model: str, topology: str, tp: int, step: str
) -> None:
    engine = _engine(model, topology, tp)
    buckets = engine.config.buckets
    decode = buckets.smallest(buckets.decode_tokens, 64)
    bucket = decode if step == "decode" else buckets.all[-1]
    program = engine.programs.compile_step(bucket)
    cost = program_cost(program)
    table = engine.state.images.vectors
    kept = shapes_kept(engine) | {table.sharding.shard_shape(table.shape)}
    print(
        f"{model} on {topology}, {step}: {cost.estimated_cycles} cycles, temporaries "
        f"{cost.temp_bytes / 2**20:.0f} MiB"
    )
    assert cost.resident_bytes < Topology.parse(topology).chip.usable_hbm_bytes
    kept_bytes = bytes_per_device(pools_of(engine)) + bytes_per_device((table,))
    assert cost.alias_bytes >= kept_bytes
    assert copies(program.as_text(), kept, bucket.tokens) == []
    assert cost.temp_bytes < GIB
