"""The time of one step, from its compiled program and the rates of the chip.

A step is estimated as the longer of (the compiler's cycles of all but kernels and collectives) and
(the bytes of weights over the bandwidth), plus heads, plus attention, plus recurrences, plus
experts, plus collectives. The compiler counts no cycles of Pallas kernels: attention is the longer
of its KV bytes over the bandwidth and the instructions of its kernels' schedules, experts and
recurrences are likewise, and heads (`kernels.qkv_heads`) by bytes and operations.
Nothing of this was measured on a chip: it is the time of a step in which nothing waits for
anything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles
from sgl_jax.kernels.qkv_heads import NORMALISED_NAME, PLAIN_NAME, block_tokens
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.models.config import ModelConfig, MoeConfig
from sgl_jax.planner.program_cost import Collective, ProgramCost
from sgl_jax.planner.recurrence_time import recurrences_time
from sgl_jax.planner.topology import Chip


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # by all rows together
    query_key_pairs: int  # of attention
    rows: int = 0  # whose states are read and written
    is_prefill: bool = True  # decode's products hide behind its reads


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes that one device holds, by how they are read."""

    layer_and_head_bytes: int  # read whole in every step, experts left out
    expert_bytes: int
    weight_itemsize: int
    kv_token_bytes: int  # of all layers
    kv_itemsize: int
    tp_size: int
    state_bytes: int = 0  # of one sequence, in all layers with a recurrence


class KernelBundles(NamedTuple):
    """Instructions of the kernels' hot loops, counted in their compiled schedules; one a cycle."""

    decode: float  # for a token of KV of 8 heads of 128, in one layer
    prefill: int  # for 10^9 operations


# docs/inside/kernels.md: 32 query and 8 KV heads of 128, page 128, queries in bfloat16.
BUNDLES: Mapping[str, KernelBundles] = MappingProxyType(
    {
        "TPU v5 lite": KernelBundles(1.50, 7610),
        "TPU v6 lite": KernelBundles(1.21, 4930),
        "TPU v5": KernelBundles(1.51, 7790),
        "TPU7x": KernelBundles(1.29, 5130),
    }
)
BUNDLES_8_BITS: Mapping[str, KernelBundles] = MappingProxyType(
    {
        "TPU v5 lite": KernelBundles(1.91, 8510),
        "TPU v6 lite": KernelBundles(1.74, 5430),
        "TPU v5": KernelBundles(1.89, 8410),
        "TPU7x": KernelBundles(1.39, 5140),
    }
)
_COUNTED_ELEMENTS = 2 * 8 * 128  # of K and V, for which decode's bundles were counted


class AttentionTime(NamedTuple):
    """Seconds of all layers on one device."""

    hbm_s: float  # reading KV
    instructions_s: float
    is_prefill: bool

    @property
    def total_s(self) -> float:
        return max(self.hbm_s, self.instructions_s)

    @property
    def bound(self) -> str:
        """The main wait; prefill's instructions are there to feed the matrix units."""
        if self.hbm_s >= self.instructions_s:
            return "HBM"
        return "MXU" if self.is_prefill else "instructions"


def attention_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> AttentionTime:
    """The time of all rows of a step; arguments as of `estimate_step`."""
    bundles = (BUNDLES_8_BITS if memory.kv_itemsize == 1 else BUNDLES)[chip.device_kind]
    kv_bytes = work.kv_tokens_read * memory.kv_token_bytes
    if work.is_prefill:
        # Smaller heads share a row of the cache, K beside V, and are multiplied with all of it.
        lanes = max(config.head_dim, LANES)
        heads = config.num_heads / memory.tp_size
        flops = 4 * work.query_key_pairs * heads * lanes * config.num_attention_layers
        cycles = flops / 1e9 * bundles.prefill
    else:
        cycles = kv_bytes / memory.kv_itemsize / _COUNTED_ELEMENTS * bundles.decode
    return AttentionTime(
        hbm_s=kv_bytes / chip.hbm_bytes_per_s,
        instructions_s=cycles / chip.clock_hz,
        is_prefill=work.is_prefill,
    )


class VisitBundles(NamedTuple):
    """Instructions of one visit of the kernel, one a cycle."""

    any: int  # independent of its size
    per_matrix_mib: int  # loading the matrix unit's weights
    per_gflop: int  # of the whole tile of lines


# Fitted to the kernel's compiled schedules (docs/inside/kernels.md), bfloat16, tiles of 64 to 256
# lines, 2048 inputs with 192 and 768 outputs: within 20 % of each, within 12 % of most.
VISIT_BUNDLES: Mapping[str, VisitBundles] = MappingProxyType(
    {
        "TPU v5 lite": VisitBundles(351, 0, 6866),
        "TPU v6 lite": VisitBundles(215, 149, 1912),
        "TPU v5": VisitBundles(416, 0, 6740),
        "TPU7x": VisitBundles(333, 199, 738),
    }
)
_PRODUCTS = 3  # gate, up, down


class ExpertsTime(NamedTuple):
    """Seconds of one device in a step."""

    hbm_s: float  # moving matrices and lines
    instructions_s: float

    @property
    def total_s(self) -> float:
        """The longer of the two, which overlap."""
        return max(self)


def experts_time(
    tokens: int, config: ModelConfig, expert_bytes: int, itemsize: int, tp_size: int, chip: Chip
) -> ExpertsTime:
    """Estimate the experts' part of a step: three grouped products in each layer.

    They take the longer of two times: for the bytes they move, matrices of experts in use and
    lines; and for the instructions of the kernel's visits, each of which computes a whole tile
    of lines, though its group may have only one there (`kernels.grouped_matmul`).

    Args:
        tokens: of the step.
        config: of the model; of one without experts the time is zero.
        expert_bytes: of all experts of all layers on the device.
        itemsize: bytes of a weight, and of an activation.
        tp_size: chips that share each expert.
        chip: the device.
    """
    moe = config.moe
    if moe is None:
        return ExpertsTime(0.0, 0.0)
    touched = experts_touched(tokens, moe)
    lines, inner = tokens * moe.top_k, moe.intermediate_size // tp_size
    products = sum(spec.moe is not None for spec in config.layers) * _PRODUCTS
    line_bytes = products * lines * (config.hidden_size + inner) * itemsize
    tile = choose_tiles(lines, moe.num_experts, config.hidden_size, inner, itemsize).lines
    # A tile that does not end where a group does is visited by the next group, too.
    visits = moe.num_experts * touched + -(-lines // tile) - 1
    visit = _visit_bundles(VISIT_BUNDLES[chip.device_kind], tile, config.hidden_size * inner)
    return ExpertsTime(
        hbm_s=(expert_bytes * touched + line_bytes) / chip.hbm_bytes_per_s,
        instructions_s=products * visits * visit / chip.clock_hz,
    )


def _visit_bundles(costs: VisitBundles, lines: int, weights: int) -> float:
    """Bundles of a tile of `lines` and a matrix of so many weights, of two bytes each."""
    return (
        costs.any
        + costs.per_matrix_mib * weights * 2 / 2**20
        + costs.per_gflop * 2 * lines * weights / 1e9
    )


def experts_touched(tokens: int, moe: MoeConfig) -> float:
    """Share of the experts that at least one of the tokens is sent to, if all are as likely."""
    return 1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens


class HeadsCycles(NamedTuple):
    """Cycles of the kernel that normalises and rotates heads; instructions one a cycle."""

    call: int  # the compiler's count for its own smallest operation
    normalised: float  # instructions for a head of 128 of one token
    plain: float  # where heads are only rotated


# docs/inside/kernels.md: the more of 8 query heads and one KV head, and of 32 and 8; bfloat16.
HEADS_CYCLES: Mapping[str, HeadsCycles] = MappingProxyType(
    {
        "TPU v5 lite": HeadsCycles(1827, 1.02, 0.80),
        "TPU v6 lite": HeadsCycles(2122, 0.74, 0.51),
        "TPU v5": HeadsCycles(2124, 1.03, 0.80),
        "TPU7x": HeadsCycles(2298, 0.75, 0.51),
    }
)


class HeadsTime(NamedTuple):
    """Seconds of all layers on one device in a step."""

    calls_s: float  # that a kernel runs at all
    hbm_s: float  # reading the product of Q, K and V, and writing each
    instructions_s: float
    num_blocks: int  # of tokens: while one is computed, the next one comes and the last one goes

    @property
    def total_s(self) -> float:
        """The first block's way in and the last one's way out overlap with nothing."""
        shorter, longer = sorted((self.hbm_s, self.instructions_s))
        return self.calls_s + longer + shorter / self.num_blocks


def heads_time(
    num_tokens: int,
    config: ModelConfig,
    itemsize: int,
    tp_size: int,
    chip: Chip,
    *,
    normalised: bool,
) -> HeadsTime:
    """Estimate the splitting, normalising and rotating of heads by `kernels.qkv_heads`.

    Args:
        num_tokens: of the program's shape, padding included.
        config: of the model.
        itemsize: bytes of an activation.
        tp_size: chips that share the heads.
        chip: the device.
        normalised: whether queries and keys are.
    """
    kv_heads = max(config.num_kv_heads // tp_size, 1)
    width = (config.num_heads // tp_size + 2 * kv_heads) * config.head_dim
    angle_bytes = 2 * config.head_dim // 2 * 4
    token_bytes = 2 * width * itemsize + angle_bytes
    cycles = HEADS_CYCLES[chip.device_kind]
    instructions = num_tokens * width / LANES * (cycles.normalised if normalised else cycles.plain)
    layers = config.num_attention_layers
    return HeadsTime(
        calls_s=layers * cycles.call / chip.clock_hz,
        hbm_s=layers * num_tokens * token_bytes / chip.hbm_bytes_per_s,
        instructions_s=layers * instructions / chip.clock_hz,
        num_blocks=-(-num_tokens // block_tokens(num_tokens, width * itemsize)),
    )


# From one chip to the next, for each step of an exchange (jax-ml.github.io/scaling-book).
ICI_HOP_S = 1e-6
# A ring through the slice uses two of a chip's links, one in each direction.
_RING_LINKS = 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device, and of its parts."""

    total_s: float
    program_s: float  # the compiler's estimate, without kernels and collectives
    weights_s: float  # reading weights, without experts
    heads_s: float  # normalising and rotating queries and keys, where a kernel does it
    attention_s: float
    recurrences_s: float
    experts_s: float
    collectives_s: float
    bound: str  # "HBM", "MXU", "ICI" or "instructions"


def estimate_step(
    cost: ProgramCost,
    num_tokens: int,
    work: StepWork,
    config: ModelConfig,
    memory: DeviceBytes,
    chip: Chip,
) -> StepTime:
    """Put one step's time together.

    Args:
        cost: of its compiled program.
        num_tokens: of the program's shape, padding included.
        work: of the step.
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
    heads_s = 0.0
    kernel = next((name for name in cost.kernels if name in (NORMALISED_NAME, PLAIN_NAME)), None)
    if kernel:
        sizes = (num_tokens, config, memory.weight_itemsize, memory.tp_size, chip)
        heads_s = heads_time(*sizes, normalised=kernel == NORMALISED_NAME).total_s
    parts = {"HBM": 0.0, "MXU": 0.0, "ICI": collectives, "instructions": heads_s}
    parts[_bound_of(fused, hbm=weights, mxu=products)] += fused
    parts[attention.bound] += attention.total_s
    recurrences = recurrences_time(
        config,
        chip,
        tokens=work.tokens,
        rows=work.rows,
        is_prefill=work.is_prefill,
        state_bytes=memory.state_bytes,
        tp_size=memory.tp_size,
    )
    parts[recurrences.bound] += recurrences.total_s
    parts["HBM" if experts.total_s == experts.hbm_s else "MXU"] += experts.total_s
    bound = max(parts, key=lambda name: parts[name])
    total = fused + heads_s + attention.total_s + recurrences.total_s + experts.total_s
    total += collectives
    return StepTime(
        total_s=total,
        program_s=program,
        weights_s=weights,
        heads_s=heads_s,
        attention_s=attention.total_s,
        recurrences_s=recurrences.total_s,
        experts_s=experts.total_s,
        collectives_s=collectives,
        bound=bound,
    )


def _bound_of(seconds: float, hbm: float, mxu: float) -> str:
    """The resource that bounds most of a program's time; empty if none does."""
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
    # Bytes from a chip to each of the others alone go a quarter of the way round on the average.
    hops = max(1.0, n / 4) if collective.kind == "all-to-all" else 1.0
    one = rounds * (hops * part / ring + ICI_HOP_S)
    return collective.times * one
