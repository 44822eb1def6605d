"""Loading a prefix from host memory or from the store, compared to computing it."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.mem_cache.lease import num_pages_read
from sgl_jax.mem_cache.offload.load_prices import load_s
from sgl_jax.planner.arguments import PlanRequest

_SHOWN_TOKENS = (1024, 8192, 32768)


class PrefixTimes(NamedTuple):
    """Seconds until a prefix of `tokens` tokens is in the pages of a rank."""

    tokens: int
    host_s: float
    store_s: float | None  # None: a store needs a single host
    compute_s: float


class PrefixLoading(NamedTuple):
    """Times of a few prefixes, and the tokens from which loading takes no longer than computing;
    None if it always takes longer."""

    times: tuple[PrefixTimes, ...]
    host_from: int | None
    store_from: int | None


def plan_loading(
    request: PlanRequest,
    config: EngineConfig,
    longest: int,
    compute_s: Callable[[int], float],
) -> PrefixLoading:
    """Compare prefixes of whole pages, up to `longest` tokens. `compute_s` returns the seconds to
    compute a number of tokens."""
    chip, tp_size = request.topology.chip, request.args.tp_size
    links = max(1, tp_size // chip.devices_per_chip) * chip.host_link_bytes_per_s
    link = links if request.host_link_gb_s is None else request.host_link_gb_s * 1e9
    has_store = request.topology.num_hosts == 1
    page_size = config.args.page_size
    most_pages = longest // page_size

    def times(tokens: int) -> PrefixTimes:
        num_bytes = prefix_bytes(config, tokens)
        host_s = load_s(num_bytes, 1 / link)
        store_s = load_s(num_bytes, 1 / link, num_bytes, 1e-9 / request.store_gb_s)
        return PrefixTimes(tokens, host_s, store_s if has_store else None, compute_s(tokens))

    def first(seconds: Callable[[PrefixTimes], float]) -> int | None:
        # Per token, loading does not slow down with length, and computing hardly speeds up.
        def is_sooner(pages: int) -> bool:
            each = times(pages * page_size)
            return seconds(each) <= each.compute_s

        pages = range(1, most_pages + 1)
        found = bisect_left(pages, True, key=is_sooner)
        return pages[found] * page_size if found < len(pages) else None

    shown = sorted({min(tokens // page_size, most_pages) for tokens in (*_SHOWN_TOKENS, longest)})
    return PrefixLoading(
        tuple(times(pages * page_size) for pages in shown if pages),
        first(lambda each: each.host_s),
        first(lambda each: each.store_s or 0.0) if has_store else None,
    )


def prefix_bytes(config: EngineConfig, num_tokens: int) -> int:
    """Return the bytes of a rank's blocks that the token after `num_tokens` reads: all pages of
    full attention, the last pages of windows, and one state."""
    return sum(
        num_pages_read(group, config.args.page_size, num_tokens) * config.page_bytes[group.pool]
        for group in config.groups
    )
