"""How long a step's attention may take: its bytes of KV, or its kernels' instructions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.aot.chips import Chip
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.models.config import ModelConfig
from sgl_jax.plan.step_work import DeviceBytes, StepWork


class KernelBundles(NamedTuple):
    """Instructions of the kernels' hot loops, counted in their compiled schedules; one a cycle."""

    decode: float  # for a token of KV of 8 heads of 128, in one layer
    prefill: int  # for 10^9 operations


# docs/kernels.md: 32 query and 8 KV heads of 128, page 128, queries in bfloat16.
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
        """What most of it waits for; prefill's instructions are there to feed the matrix units."""
        if self.hbm_s >= self.instructions_s:
            return "HBM"
        return "MXU" if self.is_prefill else "instructions"


def attention_time(
    work: StepWork, config: ModelConfig, memory: DeviceBytes, chip: Chip
) -> AttentionTime:
    """Of all rows of a step; arguments as of `step_time.estimate_step`."""
    bundles = (BUNDLES_8_BITS if memory.kv_itemsize == 1 else BUNDLES)[chip.device_kind]
    kv_bytes = work.kv_tokens_read * memory.kv_token_bytes
    if work.is_prefill:
        # Smaller heads share a row of the cache, K beside V, and are multiplied with all of it.
        lanes = max(config.head_dim, LANES)
        heads = config.num_heads / memory.tp_size
        flops = 4 * work.query_key_pairs * heads * lanes * config.num_layers
        cycles = flops / 1e9 * bundles.prefill
    else:
        cycles = kv_bytes / memory.kv_itemsize / _COUNTED_ELEMENTS * bundles.decode
    return AttentionTime(
        hbm_s=kv_bytes / chip.hbm_bytes_per_s,
        instructions_s=cycles / chip.clock_hz,
        is_prefill=work.is_prefill,
    )
