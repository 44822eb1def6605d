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
from sgl_jax.kernels.grouped_matmul.tiles import choose_tiles
from sgl_jax.models.config import ModelConfig, MoeConfig

# Bundles of the kernel's loop for one visit, counted in its compiled schedule (docs/kernels.md):
# those that any visit takes, and those for each 10^9 operations; one a cycle.
VISIT_BUNDLES: Mapping[str, tuple[int, int]] = MappingProxyType({})
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
    products = config.num_layers * _PRODUCTS
    line_bytes = products * lines * (config.hidden_size + inner) * itemsize
    tile = choose_tiles(lines, moe.num_experts, config.hidden_size, inner, itemsize).lines
    # A tile that does not end where a group does is visited by the next group, too.
    visits = moe.num_experts * touched + -(-lines // tile) - 1
    gflop = 2 * tile * config.hidden_size * inner / 1e9
    fixed, per_gflop = VISIT_BUNDLES[chip.device_kind]
    return ExpertsTime(
        hbm_s=(expert_bytes * touched + line_bytes) / chip.hbm_bytes_per_s,
        instructions_s=products * visits * (fixed + per_gflop * gflop) / chip.clock_hz,
    )


def experts_touched(tokens: int, moe: MoeConfig) -> float:
    """Share of the experts that at least one of the tokens is sent to, if all are as likely."""
    return 1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens
