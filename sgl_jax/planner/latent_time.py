"""The time of the latent attention kernels on one device; see `kernel_time`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.latent_attention.tpu.tuned import EXPANDED_TOKENS
from sgl_jax.planner.step_work import KernelTime, StepWork
from sgl_jax.planner.topology import Chip


class LatentBundles(NamedTuple):
    """Instructions of the kernels' loops over keys, for DeepSeek-V3's sizes in bfloat16."""

    decode: tuple[float, float]  # per token of context, with 16 heads and with 128
    absorbed: int  # absorbed prefill, per 10^9 operations by `latent_flops`
    expanded: int  # expanded prefill, per 10^9 operations by `latent_flops`


LATENT_BUNDLES: Mapping[str, LatentBundles] = MappingProxyType(
    {
        "TPU v5 lite": LatentBundles((0.75, 2.26), 7410, 3410),
        "TPU v6 lite": LatentBundles((0.65, 1.06), 2790, 1600),
        "TPU v5": LatentBundles((0.75, 2.19), 7000, 3450),
        "TPU7x": LatentBundles((0.64, 0.92), 2030, 2090),
    }
)


class LatentSizes(NamedTuple):
    """Sizes of latent attention on one device."""

    heads: int
    rank: int
    rope_dim: int
    layers: int
    token_bytes: int  # cached bytes per token, in all layers


def latent_flops(pairs: int, sizes: LatentSizes) -> int:
    """Return the operations for `pairs` (query, context token): products with rows and latents."""
    return 2 * pairs * sizes.heads * (2 * sizes.rank + sizes.rope_dim) * sizes.layers


def latent_attention_time(work: StepWork, sizes: LatentSizes, chip: Chip) -> KernelTime:
    """Return the time of all rows of a step, without writes."""
    bundles, each = LATENT_BUNDLES[chip.device_kind], 0.0
    if work.is_prefill:
        expanded = work.tokens >= EXPANDED_TOKENS
        each = float(bundles.expanded if expanded else bundles.absorbed)
        cycles = latent_flops(work.query_key_pairs, sizes) / 1e9 * each
    else:
        few, many = bundles.decode
        # Fewer than 16 heads take as long: loading the matrix unit's weights is the bound.
        each = few + (many - few) * max(sizes.heads - 16, 0) / (128 - 16)
        cycles = work.kv_tokens_read * sizes.layers * each
    return KernelTime(
        hbm_s=work.kv_tokens_read * sizes.token_bytes / chip.hbm_bytes_per_s,
        instructions_s=cycles / chip.clock_hz,
        feeds_mxu=work.is_prefill or sizes.heads > 64,
    )
