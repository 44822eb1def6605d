"""`sgl-jax bench trace FILE`: serve recorded traffic without a device.

Exit code 0: the run ended and its memory passed the audit. 1: the memory does not match its ledger.
2: bad input.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.bench.trace.cache_only import (
    Trace,
    num_distinct_blocks,
    oracle_hit_rates,
    tree_hit_rate,
)
from sgl_jax.bench.trace.host_link import HostLink
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, read_trace
from sgl_jax.bench.trace.report import CacheRow, cache_table, plot_run, served_text, served_values
from sgl_jax.bench.trace.served import serve_trace
from sgl_jax.bench.trace.simulated_engine import (
    DEFAULT_PAGE_SIZE,
    PLANNER_SETTINGS,
    add_record,
    add_settings,
    add_step_time,
    check_engine,
    print_result,
    simulated_engine,
)
from sgl_jax.core.command_line import check_numbers
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from sgl_jax.planner.plot_file import PLOT_SUFFIXES, check_plot_file, figure_class

ENGINE_SETTINGS = (
    "radix_eviction_policy",
    *("enable_hierarchical_cache", "hicache_ratio", "hicache_write_policy"),
    *("hicache_fetch_policy", "hicache_storage_backend", "hicache_storage_prefetch_policy"),
    *("dp_size", "tp_size", "max_total_tokens", "max_running_requests"),
    *("chunked_prefill_size", "schedule_policy", "working_set_s"),
    *("working_set_max_wait_s", "load_balance_method"),
    *PLANNER_SETTINGS,
)
_CAPACITIES = "1000,3000,10000,30000"


def main(argv: Sequence[str] | None = None) -> int:
    words = _parser().parse_args(argv)
    return print_result(lambda: _run(words))


def _run(words: argparse.Namespace) -> str:
    _check(words)
    trace = read_trace(words.file, words.num_requests)
    run = _cache_only if words.cache_only else _served
    return run(trace, words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-jax bench trace",
        description="Serve recorded traffic by the real scheduler and memory, without a device.",
    )
    add_record(parser)
    parser.add_argument(
        "--check-memory",
        choices=("idle", "busy"),
        nargs="?",
        const="busy",
        default="idle",
        help="prove the ledger at the end, or after each step too (busy, or no word)",
    )
    add_settings(parser, ENGINE_SETTINGS)
    cache = parser.add_argument_group(
        "the prefix cache alone", f"A page is a block of {BLOCK_TOKENS} tokens, by default."
    )
    cache.add_argument("--cache-only", action="store_true", help="no scheduler, no answers")
    add_capacities(cache)
    served = parser.add_argument_group("the served run")
    add_step_time(served)
    served.add_argument(
        "--host-link-gb-s",
        type=float,
        default=16.0,
        help="gigabytes a second to the host and back, of each rank (%(default)s)",
    )
    served.add_argument(
        "--store-gb-s",
        type=float,
        default=3.0,
        help="of the store below host memory in a direction, which keeps everything, with "
        "--hicache-storage-backend (default %(default)s)",
    )
    served.add_argument(
        "--closed-loop-s",
        type=float,
        metavar="SECONDS",
        help="for recorded agents: the next request comes its recorded pause after the answer, and "
        "none after so many seconds (default: as recorded)",
    )
    served.add_argument("--plot", type=Path, help=f"picture ({', '.join(PLOT_SUFFIXES)})")
    return parser


def add_capacities(parser: argparse._ActionsContainer) -> None:
    """Add the flag that `chosen_capacities` reads in addition to `--max-total-tokens`."""
    parser.add_argument(
        "--capacity-blocks",
        type=_capacities,
        metavar="N,N,...",
        help=f"blocks of {BLOCK_TOKENS} tokens to try ({_CAPACITIES}), or --max-total-tokens",
    )


def _capacities(text: str) -> list[int]:
    capacities = [int(word) for word in text.split(",")]
    if min(capacities) < 1:
        raise ValueError("capacities are positive")
    return capacities


def _check(words: argparse.Namespace) -> None:
    """Raise ValueError at once for arguments that would fail, or give no result, after minutes."""
    check_numbers(
        words,
        counts=("num_requests",),
        positive=("closed_loop_s",),
        finite=("host_link_gb_s", "store_gb_s"),
    )
    check_engine(words)
    if words.plot is None:
        return
    if words.cache_only:
        raise ValueError("--plot shows a served run: leave out --cache-only")
    check_plot_file(words.plot)
    figure_class()


# -- only the prefix cache -------------------------------------------------------------------------


def _cache_only(trace: Trace, words: argparse.Namespace) -> str:
    """Return one line per capacity; the last capacity evicts nothing."""
    page_size, capacities = words.page_size or BLOCK_TOKENS, chosen_capacities(words)
    all_blocks = num_distinct_blocks(trace)
    rows = []
    for capacity in [*capacities, all_blocks]:
        tree = {
            policy: tree_hit_rate(
                trace,
                capacity,
                page_size=page_size,
                policy=policy,
                check_each_request=words.check_memory == "busy",
            )
            for policy in EVICTION_POLICIES
        }
        oracles = oracle_hit_rates(trace, capacity)
        num_skipped = sum(len(request.block_ids) > capacity for request in trace)
        rows.append(CacheRow(capacity, capacity >= all_blocks, num_skipped, tree, oracles))
    if words.json:
        return json.dumps([row._asdict() for row in rows], indent=2)
    num_tokens = sum(request.input_len for request in trace)
    head = (
        f"{len(trace):,} requests, {num_tokens:,} prompt tokens: share of them that is served, one "
        f"request after another, pages of {page_size} tokens"
    )
    return f"{head}\n\n{cache_table(rows)}"


def chosen_capacities(words: argparse.Namespace) -> list[int]:
    if words.max_total_tokens is not None:
        return [max(words.max_total_tokens // BLOCK_TOKENS, 1)]
    return words.capacity_blocks or _capacities(_CAPACITIES)


# -- the served run -------------------------------------------------------------------------------


def _served(trace: Trace, words: argparse.Namespace) -> str:
    """Return the figures of one run; write the picture for `--plot`."""
    settings = {name: getattr(words, name) for name in ENGINE_SETTINGS}
    page_size = words.page_size or DEFAULT_PAGE_SIZE
    args = ServerArgs(
        **settings,
        page_size=page_size,
        hicache_storage_dir="nowhere",
        model_path=words.planner_model or "",
        max_queued_requests=len(trace),
        check_memory=words.check_memory,
    )
    longest = max(request.input_len + request.output_len for request in trace)
    sizes, step_seconds, about, page_bytes = simulated_engine(args, words, longest)
    link: HostLink | None = None
    if sizes.host_blocks:
        link = HostLink(page_bytes, words.host_link_gb_s * 1e9, words.store_gb_s * 1e9)
    run = serve_trace(
        trace,
        sizes,
        args,
        step_seconds,
        speedup=words.speedup,
        link=link,
        closed_s=words.closed_loop_s,
    )
    pool_tokens = sizes.dp_size * (sizes.pool_pages[0] - 1) * sizes.page_size
    capacity = pool_tokens // BLOCK_TOKENS
    oracles = oracle_hit_rates(trace, capacity)
    if sizes.host_blocks:
        in_host = sizes.dp_size * (sizes.host_blocks[0] - 1) * sizes.page_size // BLOCK_TOKENS
        oracles |= {"LRU of the host's size": oracle_hit_rates(trace, in_host)["LRU"]}
    oracles |= {"no limit": oracle_hit_rates(trace, num_distinct_blocks(trace))["LRU"]}
    values = served_values(run, oracles, trace)
    title = (
        f"{len(trace):,} requests, {sizes.dp_size} x {pool_tokens // sizes.dp_size:,} "
        f"KV tokens in pages of {sizes.page_size}, {words.radix_eviction_policy} eviction"
    )
    if words.plot is not None:
        plot_run(run, title, words.plot)
    if words.json:
        return json.dumps({"engine": sizes._asdict(), "step_time": about, **values}, indent=2)
    return f"{title}\n{about}\n\n{served_text(values)}"
