"""How long one step may take, from what its compiled program says and what the chip can do.

A step is estimated as the longer of (the compiler's cycles of all but kernels and collectives) and
(the bytes of weights over the bandwidth), plus attention, plus experts, plus collectives. Attention
is the longer of its KV bytes over the bandwidth and, in prefill, the instructions that the kernel's
schedule has for its products; experts likewise (`experts`).
Nothing of this was measured on a chip: it is what the step would take if nothing waited for
anything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sgl_jax.aot.chips import Chip
from sgl_jax.aot.program_cost import Collective, ProgramCost
from sgl_jax.kernels.tpu_memory import LANES
from sgl_jax.models.config import ModelConfig
from sgl_jax.plan.experts import experts_time

# Instructions of the prefill kernel's loop per 10^9 operations, counted in its compiled schedule
# (docs/kernels.md: 32 query and 8 KV heads of 128, bfloat16, page 128); one a cycle.
PREFILL_BUNDLES_PER_GFLOP: Mapping[str, int] = MappingProxyType(
    {"TPU v5 lite": 7610, "TPU v6 lite": 4930, "TPU v5": 7790, "TPU7x": 5130}
)
# From one chip to the next, for each step of an exchange (jax-ml.github.io/scaling-book).
ICI_HOP_S = 1e-6
# A ring through the slice uses two of a chip's links, one in each direction.
_RING_LINKS = 2


@dataclass(frozen=True)
class StepWork:
    """What one rank computes in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # by all rows together
    query_key_pairs: int  # of attention
    is_prefill: bool = True  # decode's products hide behind its reads


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
    cost: ProgramCost, work: StepWork, config: ModelConfig, memory: "DeviceBytes", chip: Chip
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
    kv = work.kv_tokens_read * memory.kv_token_bytes / chip.hbm_bytes_per_s
    heads = config.num_heads / memory.tp_size
    # Smaller heads share a row of the cache, K beside V, and are multiplied with all of it.
    lanes = max(config.head_dim, LANES)
    attention_flops = 4 * work.query_key_pairs * heads * lanes * config.num_layers
    bundles = attention_flops / 1e9 * PREFILL_BUNDLES_PER_GFLOP[chip.device_kind]
    attention_mxu = bundles / chip.clock_hz
    attention = max(kv, attention_mxu) if work.is_prefill else kv
    collectives = sum(collective_time(collective, chip) for collective in cost.collectives)
    flops = 2 * work.tokens * memory.layer_and_head_bytes / memory.weight_itemsize
    products = flops / chip.bf16_flops_per_s
    fused = max(program, weights)
    experts = experts_time(
        *(work.tokens, config, memory.expert_bytes, memory.weight_itemsize, memory.tp_size, chip)
    )
    parts = {"HBM": 0.0, "MXU": 0.0, "ICI": collectives, "instructions": 0.0}
    parts[_bound_of(fused, hbm=weights, mxu=products)] += fused
    parts["HBM" if attention == kv else "MXU"] += attention
    parts["HBM" if experts.total_s == experts.hbm_s else "MXU"] += experts.total_s
    bound = max(parts, key=lambda name: parts[name])
    total = fused + attention + experts.total_s + collectives
    return StepTime(
        total_s=total,
        program_s=program,
        weights_s=weights,
        attention_s=attention,
        experts_s=experts.total_s,
        collectives_s=collectives,
        bound=bound,
    )


def _bound_of(seconds: float, hbm: float, mxu: float) -> str:
    """What most of a program's time would be needed for in any case, if anything."""
    if max(hbm, mxu) < seconds / 2:
        return "instructions"
    return "HBM" if hbm >= mxu else "MXU"


@dataclass(frozen=True)
class DeviceBytes:
    """What one device holds, by how it is read."""

    layer_and_head_bytes: int  # read whole in every step, experts left out
    expert_bytes: int
    weight_itemsize: int
    kv_token_bytes: int
    tp_size: int


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
