"""Step times estimated by the planner for a published model on a slice of TPUs.

No other module of `sgl_jax.bench.trace` imports jax. The TPU compiler, which needs no TPU, compiles
the smallest, a middle and the largest of the engine's padded shapes; the rest are interpolated.
Attention is estimated for each step from the KV tokens that its rows read.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from sgl_jax.bench.trace.step_time import RankLoad
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig
from sgl_jax.planner.arguments import PlanRequest, Workload, read_served_config
from sgl_jax.planner.engine_programs import engine_programs
from sgl_jax.planner.estimate import device_bytes
from sgl_jax.planner.kernel_time import DeviceBytes, StepWork, attention_time
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.step_time import estimate_step
from sgl_jax.planner.topology import Chip, Topology, topology_mesh


class PlannedStepTime(NamedTuple):
    """The planner's estimate of each step."""

    shapes: tuple[int, ...]  # tokens that steps are padded to, ascending
    shape_seconds: tuple[float, ...]  # step time of each shape, without attention
    config: ModelConfig
    memory: DeviceBytes
    chip: Chip
    page_bytes: tuple[int, ...]  # page size of each pool of a rank

    def seconds(self, loads: Sequence[RankLoad]) -> float:
        """Return a step's seconds: ranks share one padded shape and wait for the slowest one."""
        tokens = max(load.tokens for load in loads)
        index = int(np.searchsorted(self.shapes, tokens))
        return self.shape_seconds[index] + max(self._attention_seconds(load) for load in loads)

    def _attention_seconds(self, load: RankLoad) -> float:
        decode = StepWork(
            load.decode_rows, load.decode_kv_tokens, load.decode_kv_tokens, is_prefill=False
        )
        prefill = StepWork(load.prefill_tokens, load.prefill_kv_tokens, load.prefill_pairs)
        return sum(
            attention_time(work, self.config, self.memory, self.chip).total_s
            for work in (decode, prefill)
        )


def planned_step_time(args: ServerArgs, topology_name: str) -> tuple[EngineSizes, PlannedStepTime]:
    """Return sizes and step times of the engine of `args` on a slice such as `v6e-8`.

    Raises:
        RuntimeError: libtpu is not installed.
        ValueError: the model or slice is unknown, or the model cannot be split or does not fit.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and a local TPU may be busy
    topology = Topology.parse(topology_name)
    config = read_served_config(args)
    request = PlanRequest(args, config, topology, Workload(1, 1))
    memory = plan_memory(request)
    if memory.num_pages < 1:
        raise ValueError(f"{args.model_path} leaves no room for KV on {topology.name}")
    mesh = topology_mesh(topology, args.dp_size, args.tp_size)
    pool_pages = tuple(num + 1 for num in memory.pool_pages)
    engine = engine_programs(args, request.config, mesh, pool_pages)
    device = device_bytes(engine, request)
    buckets = engine.config.buckets.all
    compiled = {
        bucket.tokens: bucket for bucket in (buckets[0], buckets[len(buckets) // 2], buckets[-1])
    }
    seconds = []
    for tokens, bucket in compiled.items():
        print(f"compiling a step of {tokens} tokens ...", file=sys.stderr, flush=True)
        cost = program_cost(engine.programs.compile_step(bucket))
        work = StepWork(tokens, kv_tokens_read=0, query_key_pairs=0)
        step = estimate_step(cost, bucket.tokens, work, request.config, device, topology.chip)
        seconds.append(step.total_s)
    shapes = tuple(bucket.tokens for bucket in buckets)
    interpolated = tuple(np.interp(shapes, list(compiled), seconds).tolist())
    page_bytes = tuple(engine.config.page_bytes)
    planned = PlannedStepTime(
        shapes, interpolated, request.config, device, topology.chip, page_bytes
    )
    return engine.config.sizes(pool_pages), planned
