"""How long a step's experts take: three grouped products in each layer, by the TPU's kernel.

The compiler knows nothing of them. They take the longer of two times: that of the bytes they move,
matrices of experts in use and lines; and that of the instructions which the kernel's schedule has
for its visits, each of which computes a whole tile of lines, though its group may have only one
there (`kernels.grouped_matmul`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.aot.chips import Chip
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles
from sgl_jax.models.config import ModelConfig, MoeConfig


class VisitBundles(NamedTuple):
    """Instructions of one visit of the kernel, one a cycle."""

    any: int  # independent of its size
    per_matrix_mib: int  # loading the matrix unit's weights
    per_gflop: int  # of the whole tile of lines


# Fitted to the kernel's compiled schedules (docs/kernels.md), bfloat16, tiles of 64 to 256 lines,
# 2048 inputs with 192 and 768 outputs: within 20 % of each, within 12 % of most.
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
    """Estimate the experts' part of a step.

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
    """Of a tile of `lines` and a matrix of so many weights, of two bytes each."""
    return (
        costs.any
        + costs.per_matrix_mib * weights * 2 / 2**20
        + costs.per_gflop * 2 * lines * weights / 1e9
    )


def experts_touched(tokens: int, moe: MoeConfig) -> float:
    """Share of the experts that at least one of the tokens is sent to, if all are as likely."""
    return 1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens
