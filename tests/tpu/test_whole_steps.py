"""Whole steps of published models, compiled for real slices: they fit, and copy no cache.

The steps are those the executor runs (`executor/programs.py`), with as many KV pages as the chip
has room for.
"""

import dataclasses
from collections import Counter

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.planner.arguments import PlanRequest, Workload, read_config
from sgl_jax.planner.engine_programs import bytes_per_device, engine_programs
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import Topology, has_tpu_compiler, topology_mesh

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler",
)

ROWS = 32  # of a rank
CHUNK = 512
# Shapes of steps: decode rows alone; decode rows and a prefill chunk.
STEPS = ("decode", "mixed")

# Model, slice, dp, tp.
LAYOUTS = (
    ("llama-3.1-8b", "v6e-1", 1, 1),
    ("llama-3.1-8b", "v5e-4", 1, 4),
    ("llama-3.1-8b", "v5e-4", 2, 2),
    ("qwen3-8b", "v6e-1", 1, 1),
    ("qwen3-8b", "v5e-4", 1, 4),
    ("qwen3-8b", "v5e-4", 2, 2),
    ("llama-3.3-70b", "v6e-8", 1, 8),
    ("qwen3-30b-a3b", "v6e-4", 1, 4),
    ("llama-3.1-8b", "tpu7x-2", 1, 1),
    ("llama-3.1-8b", "v5p-2", 1, 1),
    ("llama-3.3-70b", "tpu7x-8", 1, 8),
)
# One chip and eight, both shapes of step, and a mixture of experts, in few compilations; two ranks
# are compiled in `tests/plan`.
QUICK = {
    ("llama-3.1-8b", "v6e-1", "decode"),
    ("llama-3.3-70b", "v6e-8", "mixed"),
    ("qwen3-30b-a3b", "v6e-4", "decode"),
    ("llama-3.1-8b", "tpu7x-2", "decode"),
}


def _cases():
    for model, topology, dp, tp in LAYOUTS:
        for step in STEPS:
            marks = () if (model, topology, step) in QUICK else (pytest.mark.long,)
            name = f"{model}-{topology}-dp{dp}-tp{tp}-{step}"
            yield pytest.param(model, topology, dp, tp, step, id=name, marks=marks)


def _compile(model, topology_name, dp, tp, step, layers=None, **settings):
    """The engine on paper, what its step costs, and the bucket it was compiled for."""
    args = ServerArgs(
        model_path=model,
        dp_size=dp,
        tp_size=tp,
        page_size=128,
        max_running_requests=ROWS * dp,
        chunked_prefill_size=CHUNK,
        **settings,
    )
    topology = Topology.parse(topology_name)
    config = read_config(model)
    config = dataclasses.replace(config, layers=layers or config.layers)
    request = PlanRequest(args, config, topology, Workload(1024, 1024))
    mesh = topology_mesh(topology, dp, tp)
    engine = engine_programs(args, request.config, mesh, plan_memory(request).num_pages + 1)
    buckets = engine.config.buckets
    bucket = {
        "decode": buckets.smallest(ROWS),
        "mixed": buckets.all[-1],
    }[step]
    return engine, program_cost(engine.programs.compile_step(bucket)), bucket


@pytest.mark.parametrize(("model", "topology", "dp", "tp", "step"), list(_cases()))
def test_a_step_fits_its_chip_copies_no_cache_and_exchanges_no_more_than_it_must(
    model, topology, dp, tp, step
):
    engine, cost, bucket = _compile(model, topology, dp, tp, step)
    config = read_config(model)
    chip = Topology.parse(topology).chip
    pool_bytes = bytes_per_device(engine.state.kv_pool)

    assert cost.resident_bytes < chip.usable_hbm_bytes
    assert pool_bytes > chip.usable_hbm_bytes / 5  # a pool worth the name
    assert cost.alias_bytes >= pool_bytes
    assert cost.temp_bytes < pool_bytes / 100
    # What the engine sets aside for logits has room here for all else, too.
    assert cost.temp_bytes < engine.config.logit_bytes
    in_turn = engine.config.build_options.unrolled_layers  # of the loop; no layers are left over
    products = [name for name in cost.kernels if name == "grouped_matmul"]
    assert len(products) == (3 * in_turn if config.moe else 0)
    attention = Counter(name for name in cost.kernels if name.startswith("paged_"))
    assert attention == dict.fromkeys(("paged_write", "paged_decode", "paged_prefill"), in_turn)
    assert cost.estimated_cycles > 0

    exchanges: Counter[tuple[str, bool]] = Counter()
    for collective in cost.collectives:
        if collective.group_size > 1:
            exchanges[collective.kind, collective.in_loop] += collective.times
    if tp == 1:
        assert exchanges == {}
        return
    assert all(collective.group_size == tp for collective in cost.collectives)
    in_layers = [c for c in cost.collectives if c.kind == "all-reduce" and c.in_loop]
    # Attention's output and the feed-forward layer's, of all tokens, in bfloat16.
    activations = bucket.tokens * config.hidden_size * 2
    assert {c.num_bytes for c in in_layers} == {activations}
    expected = {
        ("all-reduce", True): 2 * config.num_layers,
        ("all-reduce", False): 1,  # the embedding
        ("all-gather", False): 1,  # each chip's best token of its slice of the vocabulary
    }
    assert exchanges == expected


@pytest.mark.long
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_a_cache_of_8_bits_is_neither_copied_nor_converted(step):
    engine, cost, _ = _compile("llama-3.1-8b", "v6e-1", 1, 1, step, kv_cache_dtype="fp8_e4m3")
    pool_bytes = bytes_per_device(engine.state.kv_pool)
    assert cost.alias_bytes >= pool_bytes
    assert cost.temp_bytes < pool_bytes / 100


@pytest.mark.long
def test_unlike_layers_are_compiled_once_for_a_turn_and_nothing_is_copied():
    sparse = read_config("qwen3-30b-a3b").layers[0]
    dense = dataclasses.replace(sparse, moe=None)
    layers = (dense, sparse) * 22 + (dense,) * 4
    engine, cost, _ = _compile("qwen3-30b-a3b", "v6e-4", 1, 4, "decode", layers)
    assert cost.alias_bytes >= bytes_per_device(engine.state.kv_pool)
    assert cost.temp_bytes < engine.config.logit_bytes
    in_turn = engine.config.build_options.unrolled_layers
    pairs = in_turn + 22 % in_turn  # turns of a loop over pairs, and those left over
    kernels = Counter(cost.kernels)
    assert kernels["paged_decode"] == 2 * pairs + in_turn
    assert kernels["grouped_matmul"] == 3 * pairs
    exchanges = sum(c.times for c in cost.collectives if c.kind == "all-reduce")
    assert exchanges == 2 * len(layers) + 1  # the embedding's, too
