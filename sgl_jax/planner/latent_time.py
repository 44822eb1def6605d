"""The time of latent attention's kernels on one device; see `kernel_time`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.latent_attention.tpu.tuned import EXPANDED_TOKENS
from sgl_jax.planner.step_work import KernelTime, StepWork
from sgl_jax.planner.topology import Chip


class LatentBundles(NamedTuple):
    """Instructions of the kernels' loops over keys, of DeepSeek-V3's sizes in bfloat16."""

    decode: tuple[float, float]  # for a token of context, of 16 heads and of 128
    absorbed: int  # for 10^9 operations of prefill, as `latent_flops` counts them
    expanded: int  # in this form for the same 10^9


LATENT_BUNDLES: Mapping[str, LatentBundles] = MappingProxyType(
    {
        "TPU v5 lite": LatentBundles((0.75, 2.26), 7410, 3410),
        "TPU v6 lite": LatentBundles((0.65, 1.06), 2790, 1600),
        "TPU v5": LatentBundles((0.75, 2.19), 7000, 3450),
        "TPU7x": LatentBundles((0.64, 0.92), 2030, 2090),
    }
)


class LatentSizes(NamedTuple):
    """The latent attention of one device."""

    heads: int
    rank: int
    rope_dim: int
    layers: int
    token_bytes: int  # of the cache, in all layers


def latent_flops(pairs: int, sizes: LatentSizes) -> int:
    """Operations of `pairs` of a query and a token of context: products with rows and latents."""
    return 2 * pairs * sizes.heads * (2 * sizes.rank + sizes.rope_dim) * sizes.layers


def latent_attention_time(work: StepWork, sizes: LatentSizes, chip: Chip) -> KernelTime:
    """The time of all rows of a step, writes left out."""
    bundles, each = LATENT_BUNDLES[chip.device_kind], 0.0
    if work.is_prefill:
        expanded = work.tokens >= EXPANDED_TOKENS
        each = float(bundles.expanded if expanded else bundles.absorbed)
        cycles = latent_flops(work.query_key_pairs, sizes) / 1e9 * each
    else:
        few, many = bundles.decode
        # Fewer heads than 16 take as long: loads of the matrix unit's weights bind.
        each = few + (many - few) * max(sizes.heads - 16, 0) / (128 - 16)
        cycles = work.kv_tokens_read * sizes.layers * each
    return KernelTime(
        hbm_s=work.kv_tokens_read * sizes.token_bytes / chip.hbm_bytes_per_s,
        instructions_s=cycles / chip.clock_hz,
        feeds_mxu=work.is_prefill or sizes.heads > 64,
    )
