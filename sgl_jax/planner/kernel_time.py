"""The time of a step's kernels on one device, for which the compiler has no cycle estimate.

Each kernel takes the maximum of two overlapping times: its bytes divided by the memory bandwidth,
and the instructions of its schedule, one per cycle. The instructions were counted in compiled
schedules (docs/inside/kernels.md), not measured on a chip.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS, are_few, lines_at_once
from sgl_jax.kernels.expert_dispatch.tpu.moves import TILE_LINES
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles
from sgl_jax.kernels.qkv_heads import block_tokens
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.models.config import ModelConfig, MoeConfig
from sgl_jax.planner.latent_time import LatentSizes, latent_attention_time
from sgl_jax.planner.quantized_products import QuantizedProduct
from sgl_jax.planner.step_work import KernelTime, StepWork
from sgl_jax.planner.topology import Chip


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes on one device, by how they are read."""

    layer_and_head_bytes: int  # read completely in every step, without experts
    layer_and_head_numbers: int  # elements of these weights, each multiplied with every token
    expert_bytes: int
    itemsize: int  # bytes of an activation
    kv_token_bytes: int  # over all layers
    kv_itemsize: int
    tp_size: int  # devices that share the heads, and each expert if `expert_devices` is 1
    expert_devices: int = 1  # devices across which whole experts are distributed
    expert_ranks: int = 1  # ranks with tokens for these experts
    expert_copies: int = 0  # redundant copies of experts, over all devices
    quantized: tuple[QuantizedProduct, ...] = ()  # quantized weights of the layers
    expert_conversion: float = 0.0  # instructions for 2**20 values of quantized experts
    state_bytes: int = 0  # per sequence, over all recurrent layers


# -- attention ------------------------------------------------------------------------------------


class AttentionBundles(NamedTuple):
    """Instructions of the kernels' hot loops."""

    decode: float  # per KV token of 8 heads of 128, in one layer
    prefill: int  # per 10^9 operations


# 32 query and 8 KV heads of 128, page 128, queries in bfloat16.
BUNDLES: Mapping[str, AttentionBundles] = MappingProxyType(
    {
        "TPU v5 lite": AttentionBundles(1.41, 7610),
        "TPU v6 lite": AttentionBundles(1.13, 4930),
        "TPU v5": AttentionBundles(1.41, 7790),
        "TPU7x": AttentionBundles(1.21, 5130),
    }
)
BUNDLES_8_BITS: Mapping[str, AttentionBundles] = MappingProxyType(
    {
        "TPU v5 lite": AttentionBundles(1.88, 8510),
        "TPU v6 lite": AttentionBundles(1.79, 5430),
        "TPU v5": AttentionBundles(1.89, 8410),
        "TPU7x": AttentionBundles(1.23, 5140),
    }
)
_COUNTED_ELEMENTS = 2 * 8 * 128  # of K and V, the basis of decode's count


def attention_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> KernelTime:
    if config.latent is not None:
        sizes = LatentSizes(
            heads=config.num_heads // memory.tp_size,
            rank=config.latent.rank,
            rope_dim=config.latent.rope_dim,
            layers=config.num_attention_layers,
            token_bytes=memory.kv_token_bytes,
        )
        return latent_attention_time(work, sizes, chip)
    bundles = (BUNDLES_8_BITS if memory.kv_itemsize == 1 else BUNDLES)[chip.device_kind]
    kv_bytes = work.kv_tokens_read * memory.kv_token_bytes
    if work.is_prefill:
        # Smaller heads share a cache row, K next to V, and are multiplied with the whole row.
        lanes = max(config.head_dim, LANES)
        heads = config.num_heads / memory.tp_size
        flops = 4 * work.query_key_pairs * heads * lanes * config.num_attention_layers
        cycles = flops / 1e9 * bundles.prefill
    else:
        cycles = kv_bytes / memory.kv_itemsize / _COUNTED_ELEMENTS * bundles.decode
    return KernelTime(kv_bytes / chip.hbm_bytes_per_s, cycles / chip.clock_hz, work.is_prefill)


# -- experts --------------------------------------------------------------------------------------


class VisitBundles(NamedTuple):
    """Instructions of one visit of the grouped matmul kernel."""

    any: int  # independent of its size
    per_matrix_mib: int  # for loading the matrix unit's weights
    per_gflop: int  # for the whole tile of lines


# Fitted to schedules with tiles of 64 to 256 lines of bfloat16 and 2048 inputs with 192 and 768
# outputs: within 20 % of each, and 12 % of most.
VISIT_BUNDLES: Mapping[str, VisitBundles] = MappingProxyType(
    {
        "TPU v5 lite": VisitBundles(351, 0, 6866),
        "TPU v6 lite": VisitBundles(215, 149, 1912),
        "TPU v5": VisitBundles(416, 0, 6740),
        "TPU7x": VisitBundles(333, 199, 738),
    }
)
_PRODUCTS = 3  # gate, up, down


def experts_time(tokens: int, config: ModelConfig, memory: DeviceBytes, chip: Chip) -> KernelTime:
    """Return the time of a step's experts: three grouped matmuls per layer; zero without experts.

    `tokens` are one rank's. The bytes count used experts and lines. Each visit of the kernel
    computes a whole tile of lines, even if its group has only one line (`kernels.grouped_matmul`).
    All experts are assumed equally likely, so that all devices take the same time.
    """
    moe, itemsize = config.moe, memory.itemsize
    if moe is None:
        return KernelTime(0.0, 0.0)
    tokens, devices = tokens * memory.expert_ranks, memory.expert_devices
    touched = experts_touched(tokens, moe)
    experts = -(-(moe.num_experts + memory.expert_copies) // devices)
    lines = tokens * moe.choice.top_k / devices
    inner = moe.intermediate_size // (memory.tp_size if devices == 1 else 1)
    products = sum(spec.moe is not None for spec in config.all_layers) * _PRODUCTS
    line_bytes = products * lines * (config.hidden_size + inner) * itemsize
    room = lines_at_once(tokens, moe.choice.top_k, devices)
    tile = choose_tiles(room, experts, config.hidden_size, inner, itemsize).lines
    # A tile that contains a group boundary is also visited by the next group.
    visits = experts * touched + math.ceil(lines / tile) - 1
    bundles, weights = VISIT_BUNDLES[chip.device_kind], config.hidden_size * inner
    visit = (
        bundles.any
        + bundles.per_matrix_mib * weights * 2 / 2**20
        + bundles.per_gflop * 2 * tile * weights / 1e9
        + memory.expert_conversion * weights / 2**20
    )
    return KernelTime(
        hbm_s=(memory.expert_bytes * touched + line_bytes) / chip.hbm_bytes_per_s,
        instructions_s=products
        * visits
        * max(visit / chip.clock_hz, chip.matrix_seconds(2 * tile * weights)),
        feeds_mxu=True,
    )


def experts_touched(tokens: int, moe: MoeConfig) -> float:
    """Return the expected share of experts chosen by any token, if all are equally likely."""
    return 1.0 - (1.0 - moe.choice.top_k / moe.num_experts) ** tokens


class LineBundles(NamedTuple):
    """Instructions to choose experts, dispatch tokens to them, and combine the results."""

    norm: int  # norm of 256 tokens, 2048 wide
    routed: int  # their product with a router of 128 experts
    choose: int  # 8 of 128 experts, for 256 tokens
    sort: int  # 8 choices of 256 tokens
    sort_expert: float  # additional, per expert of the device
    once: int  # per 256 tokens, 2048 wide
    tile: int  # 128 lines from these tokens, and back
    gate: int  # the lines' inner values, 768 wide
    gathered_row: int  # row of 2048 gathered by XLA
    scattered_row: int  # row of 2048 scattered and added by XLA
    sorted_key: float


LINE_BUNDLES: Mapping[str, LineBundles] = MappingProxyType(
    {
        "TPU v5 lite": LineBundles(982, 839, 887, 142, 4.9, 1372, 2431, 632, 12, 57, 0.8),
        "TPU v6 lite": LineBundles(1111, 0, 1149, 175, 4.5, 1055, 1710, 389, 14, 48, 0.7),
        "TPU v5": LineBundles(1057, 758, 953, 181, 4.8, 1372, 2541, 685, 12, 57, 0.8),
        "TPU7x": LineBundles(1044, 0, 1189, 149, 4.8, 1035, 1661, 384, 14, 52, 0.7),
    }
)
_GATHERED_NUMBER = 10  # instructions to gather one routing weight
_LINE_KERNELS = 5  # per layer: visits, sort, gather, gate, add


def lines_time(tokens: int, config: ModelConfig, memory: DeviceBytes, chip: Chip) -> float:
    """Return the seconds, over all layers, to normalize tokens, choose their experts, and sort,
    gather, gate and add their lines.

    `tokens` are one rank's. Above `UNDIVIDED_TOKENS`, XLA sorts and gathers, and scatters few
    lines; the program's cycles then include the gates and the sums of gathered rows.
    """
    moe = config.moe
    if moe is None:
        return 0.0
    count, call = LINE_BUNDLES[chip.device_kind], HEADS_CYCLES[chip.device_kind].call
    share, width = max(tokens, LANES) / 256, config.hidden_size / 2048
    routed = (count.routed * width + count.choose * moe.choice.top_k / 8) * moe.num_experts / 128
    cycles = call + (count.norm * width + routed) * share
    tokens *= memory.expert_ranks
    own = tokens * moe.choice.top_k / memory.expert_devices
    if tokens > UNDIVIDED_TOKENS:
        room = lines_at_once(tokens, moe.choice.top_k, memory.expert_devices)
        choices = tokens * moe.choice.top_k
        if are_few(room, choices):
            keys, moved = choices + room, room * (count.gathered_row + count.scattered_row)
            cycles += room * _GATHERED_NUMBER
        else:
            keys, moved = 2 * choices, (room + choices) * count.gathered_row
        cycles += keys * count.sorted_key + moved * width
    else:
        inner = moe.intermediate_size / (memory.tp_size if memory.expert_devices == 1 else 1)
        tiles, block = math.ceil(own / TILE_LINES), tokens / 256 * width
        cycles += (count.once + tiles * count.tile) * block + tiles * count.gate * inner / 768
        experts = (moe.num_experts + memory.expert_copies) / memory.expert_devices
        share = max(tokens, LANES) / 256 * moe.choice.top_k / 8
        cycles += share * (count.sort + count.sort_expert * experts) + _LINE_KERNELS * call
    layers = sum(spec.moe is not None for spec in config.all_layers)
    return layers * cycles / chip.clock_hz


# -- recurrences ----------------------------------------------------------------------------------


class RecurrenceBundles(NamedTuple):
    """Instructions of one layer with heads of 128."""

    decode_token: int  # independent of the heads
    decode_head: float  # per token and value head
    turn: int  # per chunk and turn of its value heads
    turn_head: int  # per chunk and value head, including its ordering
    conv_token: int  # independent of the channels
    conv_channels: float  # per token and 128 channels


# Linear fits through the schedules with 32 value heads (two turns) and with 4. A chunk's loops of a
# few hundred bundles are ignored.
RECURRENCE_BUNDLES: Mapping[str, RecurrenceBundles] = MappingProxyType(
    {
        "TPU v5 lite": RecurrenceBundles(156, 75.6, 2146, 140, 147, 2.7),
        "TPU v6 lite": RecurrenceBundles(192, 70.7, 2167, 93, 140, 1.5),
        "TPU v5": RecurrenceBundles(150, 75.6, 2048, 146, 141, 2.7),
        "TPU7x": RecurrenceBundles(195, 71.1, 1895, 109, 135, 1.5),
    }
)


def recurrences_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> KernelTime:
    """Return the time of convolution and gated delta rule; zero without recurrent layers."""
    own = config.recurrence
    if own is None:
        return KernelTime(0.0, 0.0)
    count = RECURRENCE_BUNDLES[chip.device_kind]
    heads = own.num_value_heads / memory.tp_size
    channels = 2 * own.num_key_heads * own.key_dim + own.num_value_heads * own.value_dim
    of_token = count.conv_token + count.conv_channels * (channels / memory.tp_size) / LANES
    if work.is_prefill:
        turns = max(heads / VALUE_HEADS, 1)
        of_chunk = turns * count.turn + heads * count.turn_head
        of_token += of_chunk / CHUNK_TOKENS
    else:
        of_token += count.decode_token + count.decode_head * heads
    layers = sum(spec.recurrence is not None for spec in config.layers)
    return KernelTime(
        hbm_s=2 * work.rows * memory.state_bytes / chip.hbm_bytes_per_s,
        instructions_s=layers * work.tokens * of_token / chip.clock_hz,
    )


# -- heads ----------------------------------------------------------------------------------------


class HeadsCycles(NamedTuple):
    """Cycles of the kernel that normalizes and rotates heads, at one instruction per cycle."""

    call: int  # the compiler's estimate for its smallest operation
    normalised: float  # instructions per head of 128 and token
    plain: float  # if heads are only rotated


# Maximum over (8 query heads, 1 KV head) and (32, 8); bfloat16.
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

    calls_s: float  # fixed cost of kernel calls
    hbm_s: float  # reading the QKV product, and writing Q, K and V
    instructions_s: float
    num_blocks: int  # blocks of tokens; transfers overlap computation

    @property
    def total_s(self) -> float:
        """Return the total. The first block's load and the last one's store do not overlap."""
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
    """Return the time to split, normalize and rotate heads (`kernels.qkv_heads`). `num_tokens`
    includes the program's padding; `itemsize` is the bytes of an activation."""
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
