"""The time of a step's kernels on one device, by a roofline.

The compiler has no cycle estimate for these kernels. Each takes the longest of three overlapping
times: its bytes at the bandwidth of memory, its products at `MATRIX_SHARE` of the matrix units'
peak, and its other numbers at `VECTOR_RATE`. The factors are rounded from instruction counts of
compiled schedules on all generations (docs/inside/kernels.md), and were not measured on a chip.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from sgl_jax.core.layer_configs import IndexerConfig, LatentConfig, StateSpaceConfig, WeightFormat
from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS, lines_at_once
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles
from sgl_jax.kernels.latent_attention.chosen import PREFILL_QUERIES
from sgl_jax.kernels.latent_attention.latents import latent_row_size
from sgl_jax.kernels.latent_attention.tpu import EXPANDED_QUERIES, EXPANDED_TOKENS
from sgl_jax.kernels.quantized_matmul.tpu import kernel_of
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.models.config import LayerSpec, ModelConfig, MoeConfig
from sgl_jax.models.layer_specs import num_indexers
from sgl_jax.planner.quantized_products import QuantizedProduct
from sgl_jax.planner.topology import Chip

MATRIX_SHARE = 0.8  # of the matrix units' peak
VECTOR_RATE = 400  # numbers per cycle: scores, converted weights, elements of recurrent chunks
GATHER_SHARE = 0.6  # of the memory's bandwidth, for rows that XLA gathers
CHOSEN_CYCLES = 12  # for each chosen latent, which one instruction stream fetches by its DMA
_PRODUCTS = 3  # of an expert: gate, up, down
BLOCK_PRODUCTS = 3  # the time of a chunk with decays by channel, to one of whole heads


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # total over all rows
    query_key_pairs: int  # of attention
    rows: int = 0  # rows with recurrent states read and written
    is_prefill: bool = True


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes on one device, by how they are read."""

    layer_and_head_bytes: int  # read completely in every step, without experts
    layer_and_head_numbers: int  # elements of these weights, each multiplied with every token
    expert_bytes: int
    itemsize: int  # bytes of an activation
    kv_token_bytes: int  # over all layers
    tp_size: int  # devices that share the heads, and each expert if `expert_devices` is 1
    expert_devices: int = 1  # devices across which whole experts are distributed
    expert_ranks: int = 1  # ranks with tokens for these experts
    expert_copies: int = 0  # redundant copies of experts, over all devices
    quantized: tuple[QuantizedProduct, ...] = ()  # quantized weights of the layers
    expert_weight: WeightFormat | None = None  # format of quantized experts
    state_bytes: int = 0  # per sequence, over all recurrent layers


class KernelTime(NamedTuple):
    """Seconds of all layers on one device."""

    hbm_s: float
    mxu_s: float = 0.0
    vector_s: float = 0.0

    @property
    def total_s(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        """Return the main bound: "HBM", "MXU" or "instructions"."""
        return ("HBM", "MXU", "instructions")[self.index(self.total_s)]


def _matrix_s(flops: float, chip: Chip) -> float:
    return chip.matrix_seconds(flops) / MATRIX_SHARE


def _vector_s(numbers: float, chip: Chip) -> float:
    return numbers / VECTOR_RATE / chip.clock_hz


def attention_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> KernelTime:
    """Return the time of reading the cache, and of the products and scores of all heads."""
    own = config.latent
    if own and own.indexer and work.query_key_pairs > own.indexer.top_k * work.tokens:
        return _chosen_time(work, own, own.indexer, config, memory, chip)
    scores = work.query_key_pairs * config.num_heads / memory.tp_size * config.num_attention_layers
    return KernelTime(
        work.kv_tokens_read * memory.kv_token_bytes / chip.hbm_bytes_per_s,
        _matrix_s(2 * scores * _products_per_score(work, config), chip),
        _vector_s(scores, chip),
    )


def _chosen_time(
    work: StepWork,
    sizes: LatentConfig,
    indexer: IndexerConfig,
    config: ModelConfig,
    memory: DeviceBytes,
    chip: Chip,
) -> KernelTime:
    """Return the time of attention to chosen tokens, when rows are longer than `top_k`.

    In decode a chip of a rank reads the keys and the chosen rows of its share of the rows, in
    prefill those of all rows, and keys once for `PREFILL_QUERIES`. Layers that reuse a choice read
    no keys. XLA gathers whole rows. A score has a number for each of the indexer's heads, and one
    for each bit of the bisection that finds the greatest.
    """
    row_size = latent_row_size(sizes.rank, sizes.rope_dim, indexer.head_dim)
    key_share = 1 - latent_row_size(sizes.rank, sizes.rope_dim) / row_size
    chips = 1 if work.is_prefill else min(memory.tp_size, work.rows)
    keys_read = work.query_key_pairs / PREFILL_QUERIES
    if not work.is_prefill:
        keys_read = work.kv_tokens_read / chips
    layers = config.num_attention_layers
    num_choosing = num_indexers(config.all_layers)
    chosen = work.tokens * indexer.top_k / chips
    pairs = work.query_key_pairs * num_choosing / chips
    num_bytes = keys_read * key_share * num_choosing / layers + chosen
    # In decode with the heads of all chips.
    heads = config.num_heads / (memory.tp_size / chips)
    scores = chosen * heads * layers
    products = pairs * indexer.num_heads * indexer.head_dim + scores * (sizes.width + sizes.rank)
    return KernelTime(
        num_bytes * memory.kv_token_bytes / chip.hbm_bytes_per_s,
        _matrix_s(2 * products, chip),
        max(
            _vector_s(pairs * (indexer.num_heads + 32) + scores, chip),
            chosen * layers * CHOSEN_CYCLES / chip.clock_hz,
        ),
    )


def _products_per_score(work: StepWork, config: ModelConfig) -> float:
    """Return the multiplications of a query with a key, and of the score with a value."""
    sizes = config.latent
    if sizes is None:
        # Smaller heads share a cache row, K next to V, and are multiplied with the whole row.
        return 2 * fmean(max(config.of_layer(spec).head_dim, LANES) for spec in _attention(config))
    if work.is_prefill and work.tokens >= EXPANDED_TOKENS:
        expansion = sizes.rank * (sizes.nope_dim + sizes.value_dim) / EXPANDED_QUERIES
        return sizes.query_dim + sizes.value_dim + expansion
    return sizes.width + sizes.rank


def experts_time(tokens: int, config: ModelConfig, memory: DeviceBytes, chip: Chip) -> KernelTime:
    """Return the time of a step's experts: three grouped matmuls per layer; zero without experts.

    `tokens` are one rank's. The bytes count used experts and lines. Each visit of the kernel
    computes a whole tile of lines, even if its group has only one line (`kernels.grouped_matmul`).
    All experts are assumed equally likely, so that all devices take the same time.
    """
    moe, itemsize = config.moe, memory.itemsize
    if moe is None:
        return KernelTime(0.0)
    tokens, devices = tokens * memory.expert_ranks, memory.expert_devices
    touched = experts_touched(tokens, moe)
    experts = -(-(moe.num_experts + memory.expert_copies) // devices)
    lines = tokens * moe.choice.top_k / devices
    inner = moe.intermediate_size // (memory.tp_size if devices == 1 else 1)
    products = _num_expert_layers(config) * _PRODUCTS
    line_bytes = products * lines * (config.hidden_size + inner) * itemsize
    room = lines_at_once(tokens, moe.choice.top_k, devices)
    tile = choose_tiles(room, experts, config.hidden_size, inner, itemsize).lines
    # A tile that contains a group boundary is also visited by the next group.
    visits = experts * touched + math.ceil(lines / tile) - 1
    weights = products * visits * config.hidden_size * inner
    return KernelTime(
        (memory.expert_bytes * touched + line_bytes) / chip.hbm_bytes_per_s,
        _matrix_s(2 * tile * weights, chip),
        _vector_s(weights, chip) if _is_converted(memory.expert_weight, chip) else 0.0,
    )


def experts_touched(tokens: int, moe: MoeConfig) -> float:
    """Return the expected share of experts chosen by any token, if all are equally likely."""
    return 1.0 - (1.0 - moe.choice.top_k / moe.num_experts) ** tokens


def lines_time(tokens: int, config: ModelConfig, memory: DeviceBytes, chip: Chip) -> KernelTime:
    """Return the time to move one rank's `tokens` to their experts' lines and back.

    Up to `UNDIVIDED_TOKENS` kernels multiply them with 0/1 matrices. Above, XLA gathers rows to
    lines, and scatters them, each like four gathered rows, or gathers each of a token's lines.
    """
    moe = config.moe
    if moe is None:
        return KernelTime(0.0)
    tokens *= memory.expert_ranks
    choices, layers = tokens * moe.choice.top_k, _num_expert_layers(config)
    if tokens <= UNDIVIDED_TOKENS:
        products = tokens * choices / memory.expert_devices * config.hidden_size
        return KernelTime(0.0, _matrix_s(2 * 2 * products * layers, chip))
    room = lines_at_once(tokens, moe.choice.top_k, memory.expert_devices)
    rows = room + min(4 * room, choices)
    moved = 2 * layers * rows * config.hidden_size * memory.itemsize  # read and written
    return KernelTime(moved / (GATHER_SHARE * chip.hbm_bytes_per_s))


def _attention(config: ModelConfig) -> list[LayerSpec]:
    return [spec for spec in config.all_layers if spec.has_attention]


def _num_expert_layers(config: ModelConfig) -> int:
    return sum(spec.moe is not None for spec in config.all_layers)


def recurrences_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> KernelTime:
    """Return the time of recurrences; zero without recurrent layers.

    A token's numbers in a head of the gated delta rule are its state, or in prefill half of a
    chunk's keys: the products of a chunk are triangular matrices. With decays by channel these are
    products of blocks. A state space model computes its state once instead of twice.
    """
    own = config.recurrence
    if own is None:
        return KernelTime(0.0)
    heads, keys, values = own.state_shape
    numbers = keys * (CHUNK_TOKENS // 2 if work.is_prefill else values)
    if isinstance(own, StateSpaceConfig):
        numbers //= 2
    elif work.is_prefill and own.decays_by_channel:
        numbers *= BLOCK_PRODUCTS
    layers = sum(spec.recurrence is not None for spec in config.layers)
    return KernelTime(
        2 * work.rows * memory.state_bytes / chip.hbm_bytes_per_s,
        vector_s=_vector_s(layers * work.tokens * heads / memory.tp_size * numbers, chip),
    )


def heads_time(
    num_tokens: int, config: ModelConfig, itemsize: int, tp_size: int, chip: Chip
) -> KernelTime:
    """Return the time to split, normalize and rotate heads (`kernels.qkv_heads`): its bytes.

    `num_tokens` includes the program's padding; `itemsize` is the bytes of an activation.
    """
    token_bytes = 0
    for spec in _attention(config):
        own = config.of_layer(spec)
        kv_heads = max(own.num_kv_heads // tp_size, 1) if spec.cache_source is None else 0
        width = (own.num_heads // tp_size + 2 * kv_heads) * own.head_dim
        token_bytes += 2 * width * itemsize + own.head_dim * 4  # angles: half cosines, half sines
    return KernelTime(num_tokens * token_bytes / chip.hbm_bytes_per_s)


def quantized_time(
    products: tuple[QuantizedProduct, ...], num_tokens: int, chip: Chip
) -> KernelTime:
    """Return the time of products with quantized matrices in a step of `num_tokens`, including
    padding. Products that XLA computes are part of the compiler's cycles."""
    num_bytes = seconds = converted = 0.0
    for own in products:
        if kernel_of(own.scheme, num_tokens, own.inputs, own.groups) is not None:
            numbers, activation = own.num_layers * own.inputs * own.outputs, own.scheme.activation
            num_bytes += own.num_layers * own.num_bytes
            seconds += chip.matrix_seconds(2 * num_tokens * numbers, activation) / MATRIX_SHARE
            if activation is None and _is_converted(own.scheme.weight, chip):
                converted += numbers
    return KernelTime(num_bytes / chip.hbm_bytes_per_s, seconds, _vector_s(converted, chip))


def _is_converted(weight: WeightFormat | None, chip: Chip) -> bool:
    """Return True for 4- and 8-bit floats that the chip cannot convert in one operation."""
    return weight in ("fp8", "mxfp4") and weight != chip.fast_format
