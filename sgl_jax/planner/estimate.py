"""The estimate of one mesh: memory, two compiled steps, and the rates of the load."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

import jax

from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.layers.mesh_axes import DATA_AXIS
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.expert_placement import loads_for, unplaced_imbalance
from sgl_jax.models.placement import bytes_per_device
from sgl_jax.planner.arguments import PlanRequest
from sgl_jax.planner.engine_programs import EngineProgramsOnPaper, engine_programs
from sgl_jax.planner.kernel_time import DeviceBytes, StepWork
from sgl_jax.planner.load import Reach, requests_per_s
from sgl_jax.planner.memory import (
    MemoryPlan,
    in_gib,
    plan_memory,
    requests_with_heads,
    requests_without_sharing,
    requests_without_windows,
)
from sgl_jax.planner.prefix_loading import PrefixLoading, plan_loading
from sgl_jax.planner.program_cost import ProgramCost, program_cost
from sgl_jax.planner.quantized_products import expert_weight, quantized_products
from sgl_jax.planner.step_time import StepTime, estimate_step
from sgl_jax.planner.topology import topology_mesh


class DoesNotFitError(Exception):
    """The model, or one request of the load, does not fit; the message names the shortage."""


class StepDoesNotFitError(DoesNotFitError):
    """Weights and KV fit, but the compiler finds no room for a step in addition."""


@dataclass(frozen=True)
class StepEstimate:
    rows: int
    tokens: int
    cost: ProgramCost
    time: StepTime


class ExpertBalance(NamedTuple):
    """Maximum load of a device over the mean, averaged over layers, for experts in order and
    placed."""

    in_order: float
    placed: float


@dataclass(frozen=True)
class Estimate:
    request: PlanRequest
    memory: MemoryPlan
    decode: StepEstimate
    prefill: StepEstimate
    concurrency: int  # concurrent requests of the load on one rank
    requests_per_s: float  # over all ranks, at peak rates
    expected_requests_per_s: float  # the same at the rates that engines reach, see `load.py`
    # `memory.num_requests` if every layer kept every token; None if every layer does.
    requests_without_windows: int | None = None
    # `memory.num_requests` without shared caches; None if the model has none.
    requests_without_sharing: int | None = None
    # `memory.num_requests` if keys and values were cached instead of latents; None if they are.
    requests_with_heads: int | None = None
    balance: ExpertBalance | None = None  # None without a file of loads
    loading: PrefixLoading | None = None  # None without --enable-hierarchical-cache

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest request that fits on a rank by itself."""
        args, config = self.request.args, self.request.config
        limit = args.context_length or config.max_position_embeddings
        return min(limit, self.memory.kv_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        return self.requests_per_s * self.request.workload.output_len

    @property
    def expected_output_tokens_per_s(self) -> float:
        return self.expected_requests_per_s * self.request.workload.output_len

    @property
    def output_tokens_per_s_per_chip(self) -> float:
        devices_per_chip = self.request.topology.chip.devices_per_chip
        return self.output_tokens_per_s / (self.request.args.num_devices / devices_per_chip)


def compiled_cost(engine: EngineProgramsOnPaper, bucket: Bucket) -> ProgramCost:
    """Compile a step. Raises StepDoesNotFitError if the compiler finds no room for it."""
    try:
        return program_cost(engine.programs.compile_step(bucket))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).splitlines()[0]
        raise StepDoesNotFitError(
            f"the compiler of the chip refuses the step: {first_line}"
        ) from error


def make_estimate(
    request: PlanRequest,
    cost_of: Callable[[EngineProgramsOnPaper, Bucket], ProgramCost] = compiled_cost,
) -> Estimate:
    """Compile a decode step and a prefill chunk, and estimate their times.

    Args:
        request: what to plan.
        cost_of: returns the cost of a step; by default it compiles the step.

    Raises:
        DoesNotFitError: one request of the load does not fit.
        ValueError: the model cannot be split over the mesh.
    """
    memory, workload = plan_memory(request), request.workload
    if memory.num_pages < 1:
        need = memory.weight_bytes + memory.table_bytes
        raise DoesNotFitError(
            f"weights and tables take {in_gib(need)} of {in_gib(memory.usable_hbm_bytes)} on each "
            f"device, and --mem-fraction-static {request.args.mem_fraction_static} leaves no page"
        )
    if memory.kv_tokens < workload.tokens:
        raise DoesNotFitError(
            f"a rank holds {memory.kv_tokens:,} KV tokens, one request of the load needs "
            f"{workload.tokens:,}"
        )
    mesh = topology_mesh(request.topology, request.args.dp_size, request.args.tp_size)
    pool_pages = tuple(num + 1 for num in memory.pool_pages)
    engine = engine_programs(request.args, request.config, mesh, pool_pages)
    buckets = engine.config.buckets
    concurrency = min(buckets.rows, memory.num_requests)
    chunk = buckets.chunk_tokens
    decode_bucket = buckets.smallest(concurrency * (1 + buckets.draft_tokens), concurrency)
    prefill_bucket = buckets.smallest(chunk, 1)
    device = device_bytes(engine, request)

    def time_of(cost: ProgramCost, num_tokens: int, work: StepWork) -> StepTime:
        return estimate_step(cost, num_tokens, work, request.config, device, request.topology.chip)

    def plan_step(bucket: Bucket, work: StepWork) -> StepEstimate:
        cost = cost_of(engine, bucket)
        time = time_of(cost, bucket.tokens, work)
        return StepEstimate(bucket.rows, bucket.tokens, cost, time)

    def chunk_of(prompt_len: int) -> StepWork:
        seen = _visible(max(1, prompt_len // 2), request.config)
        rows = max(1, chunk // prompt_len)
        return StepWork(chunk, rows * seen.by_bytes, chunk * seen.by_products, rows)

    seen = _visible(workload.input_len + workload.output_len // 2, request.config)
    read, pairs = concurrency * seen.by_bytes, concurrency * seen.by_products
    decode = plan_step(
        decode_bucket, StepWork(concurrency, read, pairs, concurrency, is_prefill=False)
    )
    prefill = plan_step(prefill_bucket, chunk_of(workload.input_len))

    def compute_s(num_tokens: int) -> float:
        """Return the prompt's share of full chunks of equal prompts."""
        time = time_of(prefill.cost, prefill.tokens, chunk_of(num_tokens))
        return num_tokens / chunk * time.total_s

    # In a round, `concurrency` prompts are prefilled, then all decode to their end.
    chunks = concurrency * workload.input_len / chunk
    round_s = chunks * prefill.time.total_s + workload.output_len * decode.time.total_s
    expected = requests_per_s(
        *(concurrency, workload.input_len, workload.output_len, chunk),
        (decode.time, prefill.time),
        Reach(),
    )
    plan = Estimate(
        request,
        memory,
        decode,
        prefill,
        concurrency,
        requests_per_s=request.args.dp_size * concurrency / round_s,
        expected_requests_per_s=request.args.dp_size * expected,
        requests_without_windows=requests_without_windows(request, memory),
        requests_without_sharing=requests_without_sharing(request),
        requests_with_heads=requests_with_heads(request, memory),
        balance=expert_balance(engine.config),
    )
    if not request.args.enable_hierarchical_cache:
        return plan
    return replace(plan, loading=plan_loading(request, engine.config, plan.max_context, compute_s))


def expert_balance(config: EngineConfig) -> ExpertBalance | None:
    """Return the balance of experts; None without a file of loads."""
    loads = loads_for(config.args, config.model)
    if loads is None or config.placement is None:
        return None
    num_devices = config.args.ep_size
    placed = config.placement.imbalance(loads, num_devices)
    return ExpertBalance(unplaced_imbalance(loads, num_devices), placed)


def device_bytes(engine: EngineProgramsOnPaper, request: PlanRequest) -> DeviceBytes:
    """Return the weights that a device reads in a step, and their layout."""
    experts = layers_and_head = numbers = 0
    for path, own in engine.placed.declared.items():
        if path[0] == "tower":  # a step does not run the tower
            continue
        # Gathered from the other ranks, then read whole.
        gathered = request.args.dp_size if DATA_AXIS in own.spec else 1
        size = gathered * bytes_per_device(own.array)
        if own.read == "experts":
            experts += size
        elif own.read == "all":
            layers_and_head += size
            if own.initial in ("normal", "values"):
                numbers += gathered * math.prod(own.array.sharding.shard_shape(own.array.shape))
    layout = engine.config.state_layout
    return DeviceBytes(
        layer_and_head_bytes=layers_and_head,
        layer_and_head_numbers=numbers,
        expert_bytes=experts,
        itemsize=engine.config.dtype.itemsize,
        kv_token_bytes=_read_token_bytes(engine.config) // request.args.tp_size,
        state_bytes=layout.slot_bytes // request.args.tp_size if layout else 0,
        tp_size=request.args.tp_size,
        quantized=quantized_products(engine.placed, request.args.tp_size),
        expert_weight=expert_weight(engine.placed),
        expert_devices=request.args.ep_size,
        expert_copies=request.args.ep_num_redundant_experts,
        expert_ranks=request.args.dp_size if request.args.ep_size > request.args.tp_size else 1,
    )


def _read_token_bytes(config: EngineConfig) -> int:
    """Return the bytes of a token of KV that all layers of a rank read: those that read another
    layer's cache count, too."""
    total = 0
    model = config.model
    for spec, (group, _) in zip(model.all_layers, model.cache_places(), strict=True):
        if spec.has_attention:
            layout = config.pool_layouts[config.groups[group].pool]
            total += layout.page_bytes // layout.num_layers // layout.page_size
    return total


class _Visible(NamedTuple):
    """The context tokens that a query attends to, averaged over attention layers."""

    by_bytes: int  # weighted by their KV's bytes
    by_products: int  # weighted by their heads' sizes


def _visible(context: int, config: ModelConfig) -> _Visible:
    specs = [spec for spec in config.all_layers if spec.has_attention]
    sizes = [config.of_layer(spec) for spec in specs]

    def average(weights: list[int]) -> int:
        seen = (min(context, spec.sliding_window or context) for spec in specs)
        total: int = sum(map(mul, weights, seen))
        return total // sum(weights)

    by_bytes = average([own.num_kv_heads * own.head_dim for own in sizes])
    return _Visible(by_bytes, average([own.head_dim for own in sizes]))
