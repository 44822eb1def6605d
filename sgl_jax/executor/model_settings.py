"""The settings and pool layouts of an engine that depend on its model."""

import dataclasses

import jax.numpy as jnp

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.layer_configs import GatedDeltaConfig
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag
from sgl_jax.kernels.attention.cache_dtype import cache_dtype
from sgl_jax.kernels.gated_delta.batch import check_heads
from sgl_jax.kernels.latent_attention.latents import latent_row_size
from sgl_jax.kernels.state_space.api import check_state_space
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.mem_cache.device_pool import KVPoolLayout, StatePoolLayout
from sgl_jax.models.config import ModelConfig


def check_kv_scales(model: ModelConfig) -> None:
    """Raise ValueError if the model's 8-bit KV cache cannot have scales."""
    if model.latent is not None:
        raise ValueError("scales of an 8-bit KV cache are of heads, and latents have none")
    for is_so, what in (
        (model.has_unlike_heads, "heads of unlike sizes"),
        (model.has_shared_caches, "layers that read another layer's cache"),
    ):
        if is_so:
            raise ValueError(f"scales of an 8-bit KV cache are not supported for {what}")


def check_recurrence(model: ModelConfig, tp_size: int) -> None:
    """Raise ValueError if the Pallas kernels cannot compute the recurrence of `model`."""
    own = model.recurrence
    if isinstance(own, GatedDeltaConfig):
        check_heads(own.num_value_heads // tp_size, own.key_dim, own.value_dim)
    elif own is not None:
        check_state_space(own.num_heads // tp_size, own.state_dim, 2 * own.head_dim)


def stores_kv_scales(model: ModelConfig) -> bool:
    """Return whether the checkpoint has scales of an 8-bit KV cache."""
    return model.quantization is not None and model.quantization.has_kv_scales


def resolve_for_model(args: ServerArgs, model: ModelConfig) -> ServerArgs:
    """Resolve the settings that depend on the model.

    Raises ValueError if the context exceeds the model's, or for settings that the model or another
    setting excludes.
    """
    context_len = args.context_length or model.max_position_embeddings
    if context_len > model.max_position_embeddings:
        raise ValueError(
            f"--context-length {context_len} exceeds the model's limit of "
            f"{model.max_position_embeddings} positions"
        )
    if model.moe is None:
        needing = {"ep_size": 1, "expert_distribution_recorder_mode": "none"}
        for name, none in {**needing, "enable_return_routed_experts": False}.items():
            if (value := getattr(args, name)) != none:
                given = flag(name) if value is True else f"{flag(name)} {value}"
                raise ValueError(f"{given} needs a model with experts")
    if args.kv_cache_scales or stores_kv_scales(model):
        check_kv_scales(model)
    if _has_indexer(model) and args.kv_cache_dtype == "fp8_e4m3":
        # The TPU's compiler copies an 8-bit cache to gather single rows of it.
        raise ValueError("--kv-cache-dtype fp8_e4m3 is not supported for models with an indexer")
    args = dataclasses.replace(
        args, context_length=context_len, num_decode_steps=_decode_steps(args, model)
    )
    if args.enable_deterministic_inference:
        _check_invariant(args, model)
    return args


def _has_indexer(model: ModelConfig) -> bool:
    return model.latent is not None and model.latent.indexer is not None


def _check_invariant(args: ServerArgs, model: ModelConfig) -> None:
    """Raise ValueError for what `--enable-deterministic-inference` does not cover."""
    if _has_indexer(model):
        raise ValueError(
            "--enable-deterministic-inference needs a model without an indexer: of almost equal "
            "scores it may choose another token in another batch"
        )
    needed = {"ep_size": 1, "hidden_sharding": "replicated", "num_decode_steps": "1"}
    if args.device == "tpu":
        # XLA cuts a product's sums differently in programs of other shapes.
        needed["attention_backend"] = "pallas"
    for name, value in needed.items():
        if (given := getattr(args, name)) != value:
            raise ValueError(
                f"--enable-deterministic-inference needs {flag(name)} {value}, not {given}"
            )


def _decode_steps(args: ServerArgs, model: ModelConfig) -> str:
    """Return the resolved `--num-decode-steps`: 1 with drafts, recurrent layers or several hosts;
    also for auto, if no program is compiled before its first use."""
    is_single = args.num_draft_tokens or model.recurrence is not None or args.num_hosts > 1
    if is_single or (args.num_decode_steps == "auto" and args.warmup == "none"):
        return "1"
    return args.num_decode_steps


def pool_layout(args: ServerArgs, model: ModelConfig, group: CacheGroup) -> KVPoolLayout:
    """Return the contents of a page of `group`, one of those that share a pool."""
    own, model = model.latent, model.of_layer(model.all_layers[group.layers[0]])
    num_kv_heads = replicated_kv_heads(model.num_heads, model.num_kv_heads, args.tp_size)
    return KVPoolLayout(
        num_layers=len(group.layers),
        num_kv_heads=num_kv_heads,
        page_size=args.page_size,
        head_dim=latent_row_size(own.rank, own.rope_dim, own.key_dim) if own else model.head_dim,
        dtype=cache_dtype(args.kv_cache_dtype),
        is_latent=own is not None,
        num_copies=num_kv_heads // model.num_kv_heads,
    )


def state_layout(
    args: ServerArgs, model: ModelConfig, groups: tuple[CacheGroup, ...]
) -> StatePoolLayout | None:
    """Return the contents of a slot of recurrent states; None for a model without them."""
    recurrent = [group for group in groups if group.is_recurrent]
    if not recurrent or model.recurrence is None:
        return None
    return StatePoolLayout(
        len(recurrent[0].layers),
        model.recurrence,
        jnp.dtype(args.dtype),
        jnp.dtype(args.recurrent_state_dtype),
    )
