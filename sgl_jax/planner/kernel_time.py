"""The time of a step's kernels on one device, of which the compiler counts no cycles.

Each kernel takes the longer of two times, which overlap: its bytes over the bandwidth of the
memory, and the instructions of its schedule, one a cycle. The instructions were counted in compiled
schedules (docs/inside/kernels.md), not measured on a chip.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.expert_lines.lines import UNDIVIDED_TOKENS, are_few, lines_at_once
from sgl_jax.kernels.expert_lines.tpu.moves import TILE_LINES
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles
from sgl_jax.kernels.qkv_heads import block_tokens
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.models.config import ModelConfig, MoeConfig
from sgl_jax.planner.latent_time import LatentSizes, latent_attention_time
from sgl_jax.planner.quantized_products import QuantizedProduct
from sgl_jax.planner.ring_products import RingProduct
from sgl_jax.planner.step_work import KernelTime, StepWork
from sgl_jax.planner.topology import Chip


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes that one device holds, by how they are read."""

    layer_and_head_bytes: int  # read whole in every step, experts left out
    layer_and_head_numbers: int  # of the same weights, each multiplied with every token
    expert_bytes: int
    itemsize: int  # of an activation
    kv_token_bytes: int  # of all layers
    kv_itemsize: int
    tp_size: int  # devices that share the heads, and each expert if `expert_devices` is 1
    expert_devices: int = 1  # that whole experts are dealt out to
    expert_ranks: int = 1  # whose tokens these experts serve
    expert_copies: int = 0  # beside the experts, on all devices together
    quantized: tuple[QuantizedProduct, ...] = ()  # some of the layers' weights
    ring: tuple[RingProduct, ...] = ()  # all of the layers' weights, if they are multiplied so
    expert_conversion: float = 0.0  # instructions for 2**20 values of quantized experts
    state_bytes: int = 0  # of one sequence, in all layers with a recurrence


# -- attention ------------------------------------------------------------------------------------


class AttentionBundles(NamedTuple):
    """Instructions of the kernels' hot loops."""

    decode: float  # for a token of KV of 8 heads of 128, in one layer
    prefill: int  # for 10^9 operations


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
_COUNTED_ELEMENTS = 2 * 8 * 128  # of K and V, for which decode's bundles were counted


def attention_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> KernelTime:
    """The time of all rows of a step."""
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
        # Smaller heads share a row of the cache, K beside V, and are multiplied with all of it.
        lanes = max(config.head_dim, LANES)
        heads = config.num_heads / memory.tp_size
        flops = 4 * work.query_key_pairs * heads * lanes * config.num_attention_layers
        cycles = flops / 1e9 * bundles.prefill
    else:
        cycles = kv_bytes / memory.kv_itemsize / _COUNTED_ELEMENTS * bundles.decode
    return KernelTime(kv_bytes / chip.hbm_bytes_per_s, cycles / chip.clock_hz, work.is_prefill)


# -- experts --------------------------------------------------------------------------------------


class VisitBundles(NamedTuple):
    """Instructions of one visit of the kernel."""

    any: int  # independent of its size
    per_matrix_mib: int  # loading the matrix unit's weights
    per_gflop: int  # of the whole tile of lines


# Fitted to schedules with tiles of 64 to 256 lines of bfloat16 and 2048 inputs with 192 and 768
# outputs: within 20 % of each, within 12 % of most.
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
    """The time of a step's experts: three grouped products in each layer; zero without experts.

    `tokens` are of a rank. The bytes are of experts in use and of lines. A visit of the kernel
    computes a whole tile of lines, though its group may have only one there
    (`kernels.grouped_matmul`). Experts that are dealt out are as likely, so devices do alike.
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
    # A tile that does not end where a group does is visited by the next group, too.
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
    """Share of the experts that at least one of the tokens is sent to, if all are as likely."""
    return 1.0 - (1.0 - moe.choice.top_k / moe.num_experts) ** tokens


class LineBundles(NamedTuple):
    """Instructions that choose the experts of tokens, and bring these to lines and back."""

    norm: int  # of 256 tokens, 2048 wide
    routed: int  # their product with a router of 128 experts
    choose: int  # 8 of 128 experts, for 256 tokens
    sort: int  # 8 choices of 256 tokens
    sort_expert: float  # more for each expert of the device
    once: int  # of 256 tokens, 2048 wide
    tile: int  # 128 lines from these tokens, and back
    gate: int  # the lines' inner values, 768 wide
    gathered_row: int  # of 2048, where XLA gathers
    scattered_row: int  # the same, added where it belongs
    sorted_key: float


LINE_BUNDLES: Mapping[str, LineBundles] = MappingProxyType(
    {
        "TPU v5 lite": LineBundles(982, 839, 887, 142, 4.9, 1372, 2431, 632, 12, 57, 0.8),
        "TPU v6 lite": LineBundles(1111, 0, 1149, 175, 4.5, 1055, 1710, 389, 14, 48, 0.7),
        "TPU v5": LineBundles(1057, 758, 953, 181, 4.8, 1372, 2541, 685, 12, 57, 0.8),
        "TPU7x": LineBundles(1044, 0, 1189, 149, 4.8, 1035, 1661, 384, 14, 52, 0.7),
    }
)
_GATHERED_NUMBER = 10  # instructions of one weight
_LINE_KERNELS = 5  # a layer: visits, sort, gather, gate, add


def lines_time(tokens: int, config: ModelConfig, memory: DeviceBytes, chip: Chip) -> float:
    """Seconds of all layers in which tokens are normalised, their experts chosen, and their lines
    sorted, gathered, gated and added.

    `tokens` are of a rank. Above `UNDIVIDED_TOKENS` XLA sorts and gathers, and scatters few
    lines; the program's cycles have the gates, and the sums of gathered rows.
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
    """Instructions of one layer, heads of 128."""

    decode_token: int  # independent of the heads
    decode_head: float  # of a token, for each value head
    turn: int  # of a chunk, for each of the turns that its heads take
    turn_head: int  # of a chunk, for each value head, with its ordering
    conv_token: int  # independent of the channels
    conv_channels: float  # of a token, for 128 channels


# Lines through the schedules with 32 value heads, two turns, and with 4. A chunk's loops of some
# hundred bundles are left out.
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
    """The time of the convolution and the gated delta rule; zero without recurrent layers."""
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
    """Cycles of the kernel that normalises and rotates heads; instructions one a cycle."""

    call: int  # the compiler's count for its own smallest operation
    normalised: float  # instructions for a head of 128 of one token
    plain: float  # where heads are only rotated


# The more of 8 query heads and one KV head, and of 32 and 8; bfloat16.
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
    """The time of splitting, normalising and rotating heads (`kernels.qkv_heads`).

    `num_tokens` are of the program's shape, padding included; `itemsize` is of an activation.
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
