"""The time of one step, from its compiled program and the rates of the chip.

A step takes the maximum of (the compiler's cycles, without kernels and collectives) and (the bytes
of weights over the bandwidth), plus the kernels (`kernel_time.py`), plus the exposed time of
collectives: a transfer minus the program's cycles between its start and its end. None of this was
measured on a chip: it is the time of a step in which nothing waits for anything else.
"""

from dataclasses import dataclass

from sgl_jax.kernels.qkv_heads import NORMALISED_NAME, PLAIN_NAME
from sgl_jax.models.config import ModelConfig
from sgl_jax.planner.kernel_time import (
    DeviceBytes,
    KernelTime,
    StepWork,
    attention_time,
    experts_time,
    heads_time,
    lines_time,
    quantized_time,
    recurrences_time,
)
from sgl_jax.planner.program_cost import Collective, ProgramCost
from sgl_jax.planner.topology import ICI_HOP_S, Chip

# A ring through the slice uses two links of a chip, one per direction.
_RING_LINKS = 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device, and of its parts."""

    total_s: float
    program_s: float  # the compiler's estimate, without kernels and collectives
    weights_s: float  # reading weights, without experts
    heads_s: float  # normalizing and rotating queries and keys, if a kernel does it
    attention_s: float
    recurrences_s: float
    experts_s: float
    lines_s: float  # dispatching tokens to experts and combining the results
    quantized_s: float  # products with quantized matrices computed by a kernel
    collectives_s: float  # transfers
    exposed_s: float  # part of the transfers without overlapping computation
    bound: str  # "HBM", "MXU", "ICI" or "instructions"


def estimate_step(
    cost: ProgramCost,
    num_tokens: int,
    work: StepWork,
    config: ModelConfig,
    memory: DeviceBytes,
    chip: Chip,
) -> StepTime:
    """Combine one step's times; `num_tokens` is the program's shape, including padding."""
    program = cost.estimated_cycles / chip.clock_hz
    products = quantized_time(memory.quantized, num_tokens, chip)
    weights = memory.layer_and_head_bytes / chip.hbm_bytes_per_s
    flops = 2 * work.tokens * memory.layer_and_head_numbers
    fused = max(program, weights - products.hbm_s)
    attention = attention_time(work, config, memory, chip)
    recurrences = recurrences_time(work, config, memory, chip)
    experts = experts_time(work.tokens, config, memory, chip)
    lines = lines_time(work.tokens, config, memory, chip)
    collectives = sum(collective_time(collective, chip) for collective in cost.collectives)
    exposed = sum(exposed_time(collective, chip) for collective in cost.collectives)
    heads = KernelTime(0.0)
    if {NORMALISED_NAME, PLAIN_NAME} & set(cost.kernels):
        heads = heads_time(num_tokens, config, memory.itemsize, memory.tp_size, chip)
    kernels = (attention, recurrences, experts, products, heads, lines)
    total = fused + sum(kernel.total_s for kernel in kernels)
    waits = {"HBM": 0.0, "MXU": 0.0, "ICI": exposed, "instructions": 0.0}
    waits[_bound_of(fused, hbm=weights, mxu=flops / chip.bf16_flops_per_s)] += fused
    for part in kernels:
        waits[part.bound] += part.total_s
    return StepTime(
        total_s=total + exposed,
        program_s=program,
        weights_s=weights,
        heads_s=heads.total_s,
        attention_s=attention.total_s,
        recurrences_s=recurrences.total_s,
        experts_s=experts.total_s,
        lines_s=lines.total_s,
        quantized_s=products.total_s,
        collectives_s=collectives,
        exposed_s=exposed,
        bound=max(waits, key=lambda name: waits[name]),
    )


def _bound_of(seconds: float, hbm: float, mxu: float) -> str:
    """Return the resource that bounds most of a program's time, else "instructions"."""
    if max(hbm, mxu) < seconds / 2:
        return "instructions"
    return "HBM" if hbm >= mxu else "MXU"


def exposed_time(collective: Collective, chip: Chip) -> float:
    """Return the part of `collective_time` that does not overlap computation."""
    beside = collective.times * collective.beside_cycles / chip.clock_hz
    return max(0.0, collective_time(collective, chip) - beside)


def collective_time(collective: Collective, chip: Chip) -> float:
    """Return a step's seconds for one kind of exchange, as rings over the participating chips."""
    n = collective.group_size
    if n == 1:
        return 0.0
    rounds = 2 * (n - 1) if collective.kind == "all-reduce" else n - 1
    ring = _RING_LINKS * chip.ici_link_bytes_per_s
    # Each round forwards one part; the result of a reduce-scatter is a part.
    part = collective.num_bytes / (1 if collective.kind == "reduce-scatter" else n)
    # Bytes for one other chip travel a quarter of the ring on average.
    hops = max(1.0, n / 4) if collective.kind == "all-to-all" else 1.0
    one = rounds * (hops * part / ring + ICI_HOP_S)
    return collective.times * one
