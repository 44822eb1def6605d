"""How long one step may take, from what its compiled program says and what the chip can do.

A step is estimated as the longer of (the compiler's cycles of all but kernels and collectives) and
(the bytes of weights over the bandwidth), plus attention, plus experts, plus collectives. Attention
is the longer of its KV bytes over the bandwidth and the instructions of the kernels' schedules
(`attention`); experts likewise (`experts`).
Nothing of this was measured on a chip: it is what the step would take if nothing waited for
anything else.
"""

from dataclasses import dataclass

from sgl_jax.aot.chips import Chip
from sgl_jax.aot.program_cost import Collective, ProgramCost
from sgl_jax.models.config import ModelConfig
from sgl_jax.plan.attention import attention_time
from sgl_jax.plan.experts import experts_time
from sgl_jax.plan.step_work import DeviceBytes, StepWork

# From one chip to the next, for each step of an exchange (jax-ml.github.io/scaling-book).
ICI_HOP_S = 1e-6
# A ring through the slice uses two of a chip's links, one in each direction.
_RING_LINKS = 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device, and of its parts."""

    total_s: float
    program_s: float  # the compiler's estimate, without kernels and collectives
    weights_s: float  # reading weights, those of experts left out
    attention_s: float
    experts_s: float
    collectives_s: float
    bound: str  # "HBM", "MXU", "ICI" or "instructions"


def estimate_step(
    cost: ProgramCost, work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> StepTime:
    """Put one step's time together.

    Args:
        cost: of its compiled program.
        work: what it computes.
        config: of the model.
        memory: bytes of weights and KV on one device.
        chip: the device.
    """
    program = cost.estimated_cycles / chip.clock_hz
    weights = memory.layer_and_head_bytes / chip.hbm_bytes_per_s
    attention = attention_time(work, config, memory, chip)
    collectives = sum(collective_time(collective, chip) for collective in cost.collectives)
    flops = 2 * work.tokens * memory.layer_and_head_bytes / memory.weight_itemsize
    products = flops / chip.bf16_flops_per_s
    fused = max(program, weights)
    experts = experts_time(
        *(work.tokens, config, memory.expert_bytes, memory.weight_itemsize, memory.tp_size, chip)
    )
    parts = {"HBM": 0.0, "MXU": 0.0, "ICI": collectives, "instructions": 0.0}
    parts[_bound_of(fused, hbm=weights, mxu=products)] += fused
    parts[attention.bound] += attention.total_s
    parts["HBM" if experts.total_s == experts.hbm_s else "MXU"] += experts.total_s
    bound = max(parts, key=lambda name: parts[name])
    total = fused + attention.total_s + experts.total_s + collectives
    return StepTime(
        total_s=total,
        program_s=program,
        weights_s=weights,
        attention_s=attention.total_s,
        experts_s=experts.total_s,
        collectives_s=collectives,
        bound=bound,
    )


def _bound_of(seconds: float, hbm: float, mxu: float) -> str:
    """What most of a program's time would be needed for in any case, if anything."""
    if max(hbm, mxu) < seconds / 2:
        return "instructions"
    return "HBM" if hbm >= mxu else "MXU"


def collective_time(collective: Collective, chip: Chip) -> float:
    """Seconds a step spends in one kind of exchange, as rings over the chips that take part."""
    n = collective.group_size
    if n == 1:
        return 0.0
    rounds = 2 * (n - 1) if collective.kind == "all-reduce" else n - 1
    ring = _RING_LINKS * chip.ici_link_bytes_per_s
    # Each round passes one part on; the result of a reduce-scatter is a part.
    part = collective.num_bytes / (1 if collective.kind == "reduce-scatter" else n)
    # What a chip sends to each of the others alone goes a quarter of the way round on the average.
    hops = max(1.0, n / 4) if collective.kind == "all-to-all" else 1.0
    one = rounds * (hops * part / ring + ICI_HOP_S)
    return collective.times * one
