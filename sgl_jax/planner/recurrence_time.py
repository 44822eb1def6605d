"""The time of the layers with a recurrence in a step, from their kernels' schedules.

The longer of their states' bytes over the bandwidth and the instructions of the kernels: the
convolution, and the gated delta rule of decode rows and of prefill rows.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS
from sgl_jax.models.config import ModelConfig
from sgl_jax.planner.topology import Chip


class RecurrenceBundles(NamedTuple):
    """Instructions of one layer, one a cycle, heads of 128."""

    decode_token: int  # independent of the heads
    decode_head: float  # of a token, for each value head
    turn: int  # of a chunk, for each of the turns that its heads take
    turn_head: int  # of a chunk, for each value head
    conv_token: int  # independent of the channels
    conv_channels: float  # of a token, for 128 channels


# Lines through the kernels' schedules with 32 and with 4 value heads (docs/inside/kernels.md).
BUNDLES: Mapping[str, RecurrenceBundles] = MappingProxyType(
    {
        "TPU v5 lite": RecurrenceBundles(156, 75.6, 1987, 278, 147, 2.7),
        "TPU v6 lite": RecurrenceBundles(192, 70.7, 2220, 216, 140, 1.5),
        "TPU v5": RecurrenceBundles(150, 75.6, 1933, 286, 141, 2.7),
        "TPU7x": RecurrenceBundles(195, 71.1, 1516, 246, 135, 1.5),
    }
)
# Ordering a chunk by head and spreading its decays, for each value head; counted for a v6e.
_ORDERING = 92
_LANES = 128


class RecurrencesTime(NamedTuple):
    """Seconds of all layers with a recurrence on one device."""

    hbm_s: float  # reading states, and writing others
    instructions_s: float

    @property
    def total_s(self) -> float:
        """The longer of the two, which overlap."""
        return max(self)

    @property
    def bound(self) -> str:
        return "HBM" if self.hbm_s >= self.instructions_s else "instructions"


def recurrences_time(
    config: ModelConfig,
    chip: Chip,
    *,
    tokens: int,
    rows: int,
    is_prefill: bool,
    state_bytes: int,
    tp_size: int,
) -> RecurrencesTime:
    """The time of all rows of a step.

    Args:
        config: of the model; of one without a recurrence the time is zero.
        chip: the device.
        tokens: queries of all rows.
        rows: whose states are read and written.
        is_prefill: whether they are computed in chunks.
        state_bytes: of one sequence, in all layers on the device.
        tp_size: chips that share the heads of each layer.
    """
    own = config.recurrence
    if own is None:
        return RecurrencesTime(0.0, 0.0)
    count = BUNDLES[chip.device_kind]
    heads = own.num_value_heads / tp_size
    channels = (2 * own.num_key_heads * own.key_dim + own.num_value_heads * own.value_dim) / tp_size
    of_token = count.conv_token + count.conv_channels * channels / _LANES
    if is_prefill:
        turns = max(heads / VALUE_HEADS, 1)
        of_chunk = turns * count.turn + heads * (count.turn_head + _ORDERING)
        of_token += of_chunk / CHUNK_TOKENS
    else:
        of_token += count.decode_token + count.decode_head * heads
    layers = config.num_layers - config.num_attention_layers
    return RecurrencesTime(
        hbm_s=2 * rows * state_bytes / chip.hbm_bytes_per_s,
        instructions_s=layers * tokens * of_token / chip.clock_hz,
    )
