"""What an engine will look like, decided from its arguments and its model alone.

No device is asked and no array made, so a planner decides the same for chips it does not have.
What is still open is how many KV pages there are, which memory decides.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.buckets import Buckets, StepLimits, choose_buckets, step_limits
from sgl_jax.executor.row_tables import row_table_shapes
from sgl_jax.executor.step import StepState
from sgl_jax.kernels.attention.api import check_pages
from sgl_jax.kernels.attention.cache_dtype import cache_dtype
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.layers.sampling.sample import BLOCK_ROWS
from sgl_jax.mem_cache.device_pool import KVPoolLayout, kv_pool_shape
from sgl_jax.models.config import ModelConfig


class EngineShape(NamedTuple):
    """The decisions that need no device."""

    args: ServerArgs
    dtype: jnp.dtype  # of weights and activations
    context_len: int
    vocab_size: int
    pool_layout: KVPoolLayout
    limits: StepLimits
    buckets: Buckets

    @classmethod
    def decide(cls, args: ServerArgs, config: ModelConfig, platform: str) -> "EngineShape":
        """Decide for "cpu", "gpu" or "tpu".

        Raises ValueError for a context beyond the model's, heads that cannot be dealt out, or
        pages that the attention kernel cannot read or that are too many for it.
        """
        context_len = args.context_length or config.max_position_embeddings
        if context_len > config.max_position_embeddings:
            raise ValueError(
                f"--context-length {context_len} exceeds the model's own limit of "
                f"{config.max_position_embeddings} positions"
            )
        dtype = _resolve_dtype(args.dtype, platform)
        pool_layout = KVPoolLayout(
            num_layers=config.num_layers,
            num_kv_heads=replicated_kv_heads(config.num_heads, config.num_kv_heads, args.tp_size),
            page_size=args.page_size,
            head_dim=config.head_dim,
            dtype=dtype if args.kv_cache_dtype == "auto" else cache_dtype(args.kv_cache_dtype),
        )
        row_pages = -(-context_len // args.page_size)
        check_pages(
            *(args.attention_backend, platform, args.page_size, row_pages, pool_layout.dtype)
        )
        limits = step_limits(args, platform)
        buckets = choose_buckets(limits, platform)
        return cls(args, dtype, context_len, config.vocab_size, pool_layout, limits, buckets)

    @property
    def pages_per_row(self) -> int:
        """Pages of a request of the full context."""
        return -(-self.context_len // self.args.page_size)

    @property
    def logit_bytes(self) -> int:
        """Logits of the largest step, float32; and of a block of its rows, what drawing makes.

        Several chips share the logits, which leaves the rest of this to other temporaries. What
        drawing makes is at most six arrays of the block's logits: changed, with noise,
        probabilities, and twice the counts of tokens in prompts and in outputs.
        """
        num_drawn = self.limits.decode_tokens
        return 4 * self.vocab_size * (num_drawn + 6 * min(num_drawn, BLOCK_ROWS))

    def sizes(self, num_pages: int) -> EngineSizes:
        """Everything the scheduler must stay within, with `num_pages` on each rank."""
        return EngineSizes(
            dp_size=self.args.dp_size,
            page_size=self.args.page_size,
            num_pages=num_pages,
            num_rows=self.limits.rows + 1,
            max_context_len=self.context_len,
            max_step_tokens=self.limits.tokens,
            max_prompt_logprob_tokens=self.limits.prompt_logprob_tokens,
            vocab_size=self.vocab_size,
            step_token_shapes=tuple(bucket.tokens for bucket in self.buckets.all),
            max_draft_tokens=self.limits.draft_tokens,
        )

    def state_shapes(self, num_pages: int, mesh: Mesh) -> tuple[Any, Any]:
        """State and row parameters of the engine as `jax.ShapeDtypeStruct`, with shardings."""
        tables = row_table_shapes(self.sizes(num_pages), mesh)
        pool: Any = kv_pool_shape(self.pool_layout, num_pages, mesh)
        return StepState(tables.tokens, tables.lens, pool), tables.params


def _resolve_dtype(name: str, platform: str) -> jnp.dtype:
    """The dtype called `name`; XLA on the CPU is some 30 times slower in bfloat16."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
