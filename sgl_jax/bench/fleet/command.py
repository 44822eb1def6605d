"""`sgl-jax bench fleet FILE`: recorded traffic over many engines, by several routing policies.

Exit code 0: all runs ended, and the memory of all engines passed its audit. 1: an engine's memory
does not match its ledger. 2: bad input.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.bench.fleet.engine import fleet_sizes
from sgl_jax.bench.fleet.policies import POLICIES
from sgl_jax.bench.fleet.report import Target, plot_fleet, run_values, table
from sgl_jax.bench.fleet.run import FleetRun, run_fleet
from sgl_jax.bench.fleet.workers import FleetShape
from sgl_jax.bench.trace.reading import read_trace
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
from sgl_jax.planner.plot_file import PLOT_SUFFIXES, check_plot_file, figure_class

_SETTINGS = (
    *("radix_eviction_policy", "schedule_policy"),
    *("tp_size", "max_total_tokens", "max_running_requests", "chunked_prefill_size"),
    *PLANNER_SETTINGS,
)
# The router forwards without a limit: far more than an engine's queue ever holds.
_MAX_QUEUED = 20_000


def main(argv: Sequence[str] | None = None) -> int:
    words = _parser().parse_args(argv)
    return print_result(lambda: _run(words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-jax bench fleet",
        description="Serve recorded traffic by many engines, without a device: the real scheduler "
        "and memory of each, behind a router.",
    )
    add_record(parser)
    parser.add_argument(
        "--num-engines", type=int, default=8, metavar="N", help="of one rank each (%(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=4,
        metavar="N",
        help="repetitions of the traffic, each with different prefixes (%(default)s)",
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        metavar="NAME,NAME,...",
        help=f"of {', '.join(POLICIES)} (all)",
    )
    parser.add_argument(
        "--first-token-s", type=float, default=5.0, help="of a good answer, at most (%(default)s)"
    )
    parser.add_argument(
        "--per-token-s",
        type=float,
        default=0.1,
        help="between the tokens of a good answer, on average, at most (%(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes that the engines share (one for each core)",
    )
    parser.add_argument("--plot", type=Path, help=f"picture ({', '.join(PLOT_SUFFIXES)})")
    add_settings(parser, _SETTINGS)
    add_step_time(parser.add_argument_group("the clock"))
    return parser


def _check(words: argparse.Namespace) -> None:
    """Raise ValueError at once for arguments that would fail, or give no result, after minutes."""
    check_numbers(
        words,
        counts=("num_requests", "num_engines", "copies", "processes"),
        positive=("first_token_s", "per_token_s"),
    )
    if unknown := [name for name in words.policies if name not in POLICIES]:
        raise ValueError(f"--policies are {', '.join(POLICIES)}; got {', '.join(unknown)}")
    check_engine(words)
    if words.plot is not None:
        check_plot_file(words.plot)
        figure_class()


def _run(words: argparse.Namespace) -> str:
    """Return the report of all runs; write the picture for `--plot`."""
    _check(words)
    trace = read_trace(words.file, words.num_requests)
    args = ServerArgs(
        **{name: getattr(words, name) for name in _SETTINGS},
        page_size=words.page_size or DEFAULT_PAGE_SIZE,
        model_path=words.planner_model or "",
        max_queued_requests=_MAX_QUEUED,
        check_memory="off",
    )
    longest = max(request.input_len + request.output_len for request in trace)
    engine = simulated_engine(args, words, longest)
    shape = FleetShape(
        words.num_engines,
        fleet_sizes(engine.sizes),
        args.for_scheduler(),
        engine.step_seconds,
        trace,
        words.copies,
        words.speedup,
    )
    runs: dict[str, FleetRun] = {}
    seconds = {}
    for name in words.policies:
        print(f"{name} ...", file=sys.stderr, flush=True)
        begin_s = time.monotonic()
        runs[name] = run_fleet(name, shape, words.processes or os.cpu_count() or 1)
        seconds[name] = time.monotonic() - begin_s
    target = Target(words.first_token_s, words.per_token_s)
    values = {name: run_values(run, target) for name, run in runs.items()}
    num_tokens = (engine.sizes.pool_pages[0] - 1) * engine.sizes.page_size
    title = (
        f"{len(trace) * words.copies:,} requests to {words.num_engines:,} engines of "
        f"{num_tokens:,} KV tokens"
    )
    if words.plot is not None:
        plot_fleet(runs, target, title, words.plot)
    if words.json:
        about = {
            "title": title,
            "step_time": engine.about,
            "arguments": {**vars(words), "file": str(words.file), "plot": None},
            "run_s": seconds,
        }
        return json.dumps({**about, "policies": values}, indent=2)
    took = ", ".join(f"{name} {took_s:.0f} s" for name, took_s in seconds.items())
    good = (
        f"a good answer begins within {target.first_token_s:g} s, and has a token every "
        f"{1000 * target.per_token_s:g} ms"
    )
    return f"{title}\n{engine.about}\n{good}\n\n{table(values)}\n\nsimulated in: {took}"
