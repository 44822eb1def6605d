"""A plan as text for people and as JSON for programs."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import Any

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag
from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS
from sgl_jax.planner.advice import advise
from sgl_jax.planner.arguments import SERVER_SETTINGS, PlanRequest
from sgl_jax.planner.estimate import Estimate, StepEstimate
from sgl_jax.planner.kernel_time import CHOSEN_CYCLES, GATHER_SHARE, MATRIX_SHARE, VECTOR_RATE
from sgl_jax.planner.load import Reach
from sgl_jax.planner.memory import MemoryPlan, in_gib
from sgl_jax.planner.prefix_loading import PrefixLoading
from sgl_jax.planner.program_cost import Collective
from sgl_jax.planner.topology import ICI_HOP_S

_REACH = Reach()
ASSUMPTIONS = (
    "compiled by the TPU's own compiler, run on none: sizes are its own, times are estimates",
    "a step = max(compiler's cycles / clock, weights / HBM bandwidth) + quantized products + "
    "heads + attention + recurrences + experts + their lines + exposed collectives",
    "a kernel = the longest of its bytes / HBM bandwidth, its products / "
    f"({MATRIX_SHARE:.0%} of the matrix units' rate), and its scores, converted weights and "
    f"elements of recurrent chunks / {VECTOR_RATE} a cycle; a latent that an indexer chose takes "
    f"{CHOSEN_CYCLES} cycles",
    "lines = products that move tokens to their experts and back, or beyond "
    f"{UNDIVIDED_TOKENS} tokens their bytes / ({GATHER_SHARE:.0%} of HBM bandwidth)",
    f"collectives run as rings at the links' full rate with {ICI_HOP_S * 1e6:g} us a hop, "
    "those of SparseCores as well; exposed = a transfer less the program's cycles, without "
    "kernels, between its start and its end in the compiler's schedule",
    "requests are greedy, report no log-probabilities, share no prefix, and are all alike; "
    "experts are equally likely",
    f"expected = {_REACH.program:.0%} of the compiler's and kernels' rates, "
    f"{_REACH.attention:.0%} of HBM bandwidth in attention, {_REACH.host_s * 1e3:g} ms more in "
    "each step, and decode rows in every step with a chunk: fitted to published figures of other "
    "engines",
    "otherwise steps never wait for the host; a prefix is loaded at the full rate of its links, "
    "from a store through host memory, while no other is loaded, and is computed in chunks of "
    "similar prompts",
)

_ALWAYS_SHOWN = ("model_path", "dp_size", "tp_size")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerArgs)}


def as_text(plan: Estimate) -> str:
    args, memory, topology = plan.request.args, plan.memory, plan.request.topology
    workload, costs = plan.request.workload, (plan.decode.cost, plan.prefill.cost)
    lines = [
        f"{args.model_path} on {topology.name} ({'x'.join(map(str, topology.grid))} chips, "
        f"{topology.num_devices} devices, {topology.chip.device_kind}): "
        f"dp {args.dp_size} x tp {args.tp_size}{_experts(args)}",
        *balance_lines(plan),
        "",
        f"Memory of each device, of {in_gib(memory.usable_hbm_bytes)} that programs may use",
        f"  weights              {in_gib(memory.weight_bytes):>10}",
        f"  KV pages             {in_gib(memory.kv_bytes):>10}  {_pages(memory)} pages of "
        f"{memory.page_size} tokens: {memory.kv_tokens:,} tokens a rank",
        *_state_lines(memory),
        f"  tables               {in_gib(memory.table_bytes):>10}",
        f"  temporaries          {in_gib(max(cost.temp_bytes for cost in costs)):>10}"
        "  of the larger of these steps",
        f"  in use at most       {in_gib(max(cost.resident_bytes for cost in costs)):>10}",
        f"  longest context      {plan.max_context:,} tokens",
        f"  at once, a rank      {plan.concurrency:,} requests of {workload.input_len:,} in, "
        f"{workload.output_len:,} out",
        *_shorter_lines(plan),
        *_loading_lines(plan),
        "",
        *_step_lines("Decode step", plan.decode),
        "",
        *_step_lines("Prefill chunk", plan.prefill),
        "",
        f"Load of {workload.input_len:,} tokens in, {workload.output_len:,} out: "
        f"{plan.output_tokens_per_s:,.0f} output tokens/s, "
        f"{plan.output_tokens_per_s_per_chip:,.0f} a chip, {plan.requests_per_s:.2f} requests/s",
        f"  expected {plan.expected_output_tokens_per_s:,.0f} output tokens/s, "
        f"{plan.expected_requests_per_s:.2f} requests/s: mixed steps, at the rates of published "
        "figures",
        "",
        f"Serve with: {serve_command(plan.request)}",
        "",
        "Advice",
        *[f"  - {line}" for line in advise(plan) or ["nothing stands out"]],
        "",
        "Assumptions",
        *[f"  - {line}" for line in ASSUMPTIONS],
    ]
    return "\n".join(lines)


def as_dict(plan: Estimate) -> dict[str, Any]:
    """Return the plan as values for JSON; times in seconds, sizes in bytes."""
    args, topology = plan.request.args, plan.request.topology
    return {
        "model": args.model_path,
        "topology": topology.name,
        "dp_size": args.dp_size,
        "tp_size": args.tp_size,
        "ep_size": args.ep_size,
        "expert_balance": plan.balance and plan.balance._asdict(),
        "num_chips": topology.num_chips,
        "workload": dataclasses.asdict(plan.request.workload),
        "memory": {**dataclasses.asdict(plan.memory), "num_pages": plan.memory.num_pages},
        "decode": _step_dict(plan.decode),
        "prefill": _step_dict(plan.prefill),
        "concurrency": plan.concurrency,
        "requests_without_windows": plan.requests_without_windows,
        "requests_without_sharing": plan.requests_without_sharing,
        "requests_with_heads": plan.requests_with_heads,
        "prefix_loading": plan.loading and _loading_dict(plan.loading),
        "max_context": plan.max_context,
        "requests_per_s": plan.requests_per_s,
        "expected_requests_per_s": plan.expected_requests_per_s,
        "expected_output_tokens_per_s": plan.expected_output_tokens_per_s,
        "output_tokens_per_s": plan.output_tokens_per_s,
        "output_tokens_per_s_per_chip": plan.output_tokens_per_s_per_chip,
        "serve_command": serve_command(plan.request),
        "advice": advise(plan),
        "assumptions": list(ASSUMPTIONS),
    }


def serve_command(request: PlanRequest) -> str:
    """Return the command line that starts the planned engine."""
    args = request.args
    words = ["sgl-jax", "serve"]
    changed = [name for name in SERVER_SETTINGS if getattr(args, name) != _DEFAULTS[name]]
    for name in dict.fromkeys((*_ALWAYS_SHOWN, *changed)):
        value = getattr(args, name)
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


def _step_dict(step: StepEstimate) -> dict[str, Any]:
    cost = step.cost._asdict() | {"resident_bytes": step.cost.resident_bytes}
    cost["collectives"] = [collective._asdict() for collective in step.cost.collectives]
    return {
        "rows": step.rows,
        "tokens": step.tokens,
        "time": dataclasses.asdict(step.time),
        "program": cost,
    }


def _experts(args: ServerArgs) -> str:
    copies = f", {args.ep_num_redundant_experts} copies" if args.ep_num_redundant_experts else ""
    return "" if args.ep_size == 1 else f", whole experts over {args.ep_size} devices{copies}"


def balance_lines(plan: Estimate) -> list[str]:
    """Return the recorded loads of devices, if there is a file of loads."""
    if plan.balance is None:
        return []
    before, after = plan.balance
    return [
        f"by {plan.request.args.init_expert_location} the device whose experts are chosen most has "
        f"{after:.2f} times the mean load, {before:.2f} times with experts in order"
    ]


def _shorter_lines(plan: Estimate) -> list[str]:
    """Return the requests gained by windows, shared caches or latents; empty without any."""
    held, lines = plan.memory.num_requests, []
    for full, change in (
        (plan.requests_without_windows, "every layer kept every token"),
        (plan.requests_without_sharing, "every layer had its own cache"),
        (plan.requests_with_heads, "each head's key and value were kept"),
    ):
        if full is not None:
            ratio = f", {held / full:.2f} times as many" if full else ""
            lines.append(f"  in memory, a rank    {held:,} of these; if {change} {full:,}{ratio}")
    return lines


def _loading_dict(loading: PrefixLoading) -> dict[str, Any]:
    return loading._asdict() | {"times": [each._asdict() for each in loading.times]}


def _loading_lines(plan: Estimate) -> list[str]:
    """Return the room for prefixes in host memory, and load times; empty without a host cache."""
    loading, memory = plan.loading, plan.memory
    if loading is None:
        return []
    lines = [
        "",
        f"Prefixes in the memory of each host: {in_gib(memory.host_bytes)} of "
        f"{in_gib(plan.request.topology.host_memory_bytes)}, {memory.host_tokens:,} tokens a rank "
        f"beside {memory.kv_tokens:,}",
    ]
    for each in loading.times:
        store = "" if each.store_s is None else f"from a store {_ms(each.store_s)}, "
        lines.append(
            f"  {each.tokens:,} tokens: from the host {_ms(each.host_s)}, {store}"
            f"computed {_ms(each.compute_s)}"
        )
    longest = loading.times[-1].tokens
    names = ["the host"] if loading.times[-1].store_s is None else ["the host", "a store"]
    for name, first in zip(names, (loading.host_from, loading.store_from), strict=False):
        found = f"from {first:,} tokens on" if first else f"for none of up to {longest:,} tokens"
        lines.append(f"  loading from {name} is sooner than computing {found}")
    return lines


def _step_lines(title: str, step: StepEstimate) -> list[str]:
    time = step.time
    heads = f"heads {_ms(time.heads_s)}, " if time.heads_s else ""
    experts = ""
    quantized = f"quantized products {_ms(time.quantized_s)}, " if time.quantized_s else ""
    if time.experts_s:
        experts = f"experts {_ms(time.experts_s)}, their lines {_ms(time.lines_s)}, "
    states = f"recurrences {_ms(time.recurrences_s)}, " if time.recurrences_s else ""
    return [
        f"{title} of {step.tokens:,} tokens: {_ms(time.total_s)}, bound by {time.bound}",
        f"  program {_ms(time.program_s)} (weights alone {_ms(time.weights_s)}), {quantized}{heads}"
        f"attention {_ms(time.attention_s)}, {states}{experts}"
        f"collectives {_ms(time.collectives_s)}, exposed {_ms(time.exposed_s)}",
        *[f"  {_collective(collective)}" for collective in _alike(step.cost.collectives)],
    ]


def _alike(collectives: Iterable[Collective]) -> list[Collective]:
    times: Counter[Collective] = Counter()
    for one in collectives:
        times[one._replace(times=0, beside_cycles=0)] += one.times
    return [one._replace(times=count) for one, count in times.items()]


def _collective(collective: Collective) -> str:
    where = "in the layers" if collective.in_loop else "outside the layers"
    total = collective.times * collective.num_bytes / 2**20
    return (
        f"{collective.times:4d} {collective.kind} of {collective.shape} over "
        f"{collective.group_size} devices {where}, {total:,.1f} MiB in all"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _state_lines(memory: MemoryPlan) -> list[str]:
    if not memory.state_bytes:
        return []
    states = f"{memory.num_requests:,} requests, {memory.pool_pages[-1]:,} snapshots"
    return [f"  states               {in_gib(memory.state_bytes):>10}  {states}"]


def _pages(memory: MemoryPlan) -> str:
    pools = memory.pool_pages[:-1] if memory.state_bytes else memory.pool_pages
    return " and ".join(f"{num:,}" for num in pools)
