"""The attention call of the models, and the limits of its kernels.

Every implementation has the signature of `RaggedPagedAttention` and is tested against
`tests/kernels/attention/reference.py`.
"""

from typing import Protocol

import jax
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import cache_dtype_name
from sgl_jax.kernels.tpu_chip import tile_slots

# Limits of the Pallas kernels: whole pages are copied to vector memory, and the page ids of four
# rows to scalar memory, which has 1 MiB, as well as two numbers for each image of a step's rows.
MAX_PAGE_SIZE = 256
MAX_ROW_PAGES = 32_768
MAX_SPANS = 32_768


class RaggedPagedAttention(Protocol):
    """Write this step's K and V into the cache, then attend causally over each row's KV. Queries
    of chunks also see the later keys of their spans (`AttentionBatch.spans`).

    Without K and V, the cache holds those of this step already.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv_cache: jax.Array,
        layer: jax.Array,
        batch: AttentionBatch,
        options: ScoreOptions,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the shapes of one chip of one data-parallel rank.

        Args:
            q: [T, q_heads, head_dim]; q_heads is a multiple of kv_heads, and the queries of one KV
                head are adjacent.
            k, v: [T, kv_heads, head_dim] for the same tokens, rounded to the cache's dtype before
                use (`cache_dtype.as_cached`). Padding tokens are written to the null page, which is
                never read. Both are None for a layer that reads another layer's cache.
            kv_cache: [layers, pages, 2 * kv_heads, page_size, head_dim], K heads then V heads;
                or [layers, pages, kv_heads, page_size, 2 * head_dim], K and V side by side. An
                int8 array is a cache of 8-bit floats; see `cache_dtype`.
                Updated in place when the caller donates it or carries it through a loop.
            layer: int32 [], the layer's index in the cache.
            batch: rows and pages.
            options: the layer's scale, window, soft cap and sinks.

        Returns:
            out: [T, q_heads, head_dim] in q's dtype; finite but unspecified for padding tokens.
            kv_cache: with the new K and V.
        """
        ...


def check_pages(page_size: int, row_pages: int, kv_cache_dtype: DTypeLike) -> None:
    """Raise ValueError unless the Pallas kernels can read such pages and rows of `row_pages` pages.

    A page must hold whole tiles, and at most MAX_PAGE_SIZE slots; a row has at most MAX_ROW_PAGES
    pages. XLA can read pages and rows of any size.
    """
    if page_size % tile_slots(kv_cache_dtype) or page_size > MAX_PAGE_SIZE:
        sizes = [1 << i for i in range(MAX_PAGE_SIZE.bit_length())]
        allowed = ", ".join(str(size) for size in sizes if size >= tile_slots(kv_cache_dtype))
        raise ValueError(
            f"--page-size must be one of {allowed} with the Pallas kernels and a "
            f"{cache_dtype_name(kv_cache_dtype)} cache, got {page_size}; "
            "--attention-backend xla takes any"
        )
    if row_pages > MAX_ROW_PAGES:
        raise ValueError(
            f"--context-length takes {row_pages} pages of {page_size} tokens, and the Pallas "
            f"kernels read at most {MAX_ROW_PAGES} a request: choose a larger --page-size (up to "
            f"{MAX_PAGE_SIZE}), a shorter --context-length, or --attention-backend xla"
        )


def check_spans(num_rows: int, num_images: int) -> None:
    """Raise ValueError unless the Pallas kernels can read `num_images` spans of each of a step's
    `num_rows` rows. XLA can read any number."""
    if num_rows * num_images > MAX_SPANS:
        raise ValueError(
            f"the Pallas kernels read the places of at most {MAX_SPANS} images in a step of this "
            f"model, and --max-images-per-request {num_images} times {num_rows} requests "
            f"(--max-running-requests) is {num_rows * num_images}: lower one of them, or choose "
            "--attention-backend xla"
        )
