"""Recorded prompts with layers that keep less than every token, and the returns of agents.

    python -m benchmarks.trace {windows,states,returns} FILE

`windows`: models with sliding windows, next to one whose layers keep everything, in the same
memory.

`states`: a model with recurrent layers, by the memory of its snapshots, next to one with all
states.

`returns`: how often recorded agents return around the time at which their paths are expected.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trace.recurrent import QWEN3_NEXT, plot_shares, recurrent_hit_rates, recurrent_table
from benchmarks.trace.returns import return_rows, returns_table
from benchmarks.trace.windowed import LAYER_MIXES, WindowedRow, windowed_hit_rates, windowed_table
from sgl_jax.bench.trace.cache_only import Trace
from sgl_jax.bench.trace.command import add_capacities, chosen_capacities
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, read_trace
from sgl_jax.core.command_line import add_arguments
from sgl_jax.planner.plot_file import check_plot_file

# Bytes of snapshots per byte of KV.
_SNAPSHOT_SHARES = (0.125, 0.25, 0.5, 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay and print; return the exit code: 0, or 2 for bad input."""
    words = _parser().parse_args(argv)
    try:
        if words.plot is not None:
            check_plot_file(words.plot)
        trace = read_trace(words.file, words.num_requests)
        print(words.run(trace, words))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    windows = kinds.add_parser("windows", help="models with sliding windows")
    states = kinds.add_parser("states", help="a model with recurrent layers")
    returns = kinds.add_parser("returns", help="expected and real returns of agents")
    for kind in (windows, states, returns):
        kind.add_argument("file", type=Path, help="requests, one JSON object a line")
        kind.add_argument("--num-requests", type=int, metavar="N", help="the first N only")
    for kind in (windows, states):
        kind.add_argument("--json", action="store_true", help="print values as JSON")
        kind.add_argument("--page-size", type=int, default=BLOCK_TOKENS, help="(%(default)s)")
        add_arguments(kind, only=("radix_eviction_policy", "max_total_tokens"))
        add_capacities(kind)
    states.add_argument("--plot", type=Path, help="draw the shares")
    returns.add_argument("--sigma", type=float, help="of clients' forecasts, lognormal factors")
    windows.set_defaults(run=_windows, plot=None)
    returns.set_defaults(run=_returns, plot=None)
    states.set_defaults(run=_states)
    return parser


def _windows(trace: Trace, words: argparse.Namespace) -> str:
    """Return one line for each mix of layers and capacity."""
    page_size, policy = words.page_size, words.radix_eviction_policy
    rows = [
        WindowedRow(
            mix.name,
            capacity,
            *windowed_hit_rates(trace, capacity, mix, page_size=page_size, policy=policy),
        )
        for mix in LAYER_MIXES
        for capacity in chosen_capacities(words)
    ]
    if words.json:
        return json.dumps([row._asdict() for row in rows], indent=2)
    return (
        f"{len(trace):,} requests, in the same memory: share of their prompt tokens that is "
        f"served, pages of {page_size} tokens, {policy} eviction\n\n{windowed_table(rows)}"
    )


def _states(trace: Trace, words: argparse.Namespace) -> str:
    """Return a line for each capacity and share; draw the picture if requested."""
    page_size, policy = words.page_size, words.radix_eviction_policy
    rates = {
        capacity: recurrent_hit_rates(
            trace, capacity, _SNAPSHOT_SHARES, page_size=page_size, policy=policy
        )
        for capacity in chosen_capacities(words)
    }
    title = (
        f"{QWEN3_NEXT.name}: a snapshot takes the bytes of {QWEN3_NEXT.snapshot_tokens:,} tokens"
    )
    if words.plot is not None:
        plot_shares(rates, title, words.plot)
    if words.json:
        return json.dumps({capacity: each._asdict() for capacity, each in rates.items()}, indent=2)
    return (
        f"{len(trace):,} requests: share of their prompt tokens that is served, pages of "
        f"{page_size} tokens, {policy} eviction\n{title}\n\n{recurrent_table(rates)}"
    )


def _returns(trace: Trace, words: argparse.Namespace) -> str:
    return returns_table(return_rows(trace, words.sigma))


if __name__ == "__main__":
    sys.exit(main())
