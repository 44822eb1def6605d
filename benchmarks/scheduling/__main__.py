"""Compare our scheduler with two simple ones under synthetic loads.

    python -m benchmarks.scheduling [--loads NAME ... | --short | --drawn SEED N] [-j N]
    python -m benchmarks.scheduling --json FILE    # in one checkout; --against FILE in another
    python -m benchmarks.scheduling --short --counts tests/benchmarks/scheduling_counts.json

Each load runs on a logical clock with modelled step times: by our scheduler, by ours with
--schedule-conservativeness 0, and by a plain first-come, first-served scheduler. A load is listed
if ours serves it more than 5 % slower, or with a mean wait more than 1.3 times longer, than the
better of the two. Its documented reason is printed, if there is one. Exit code 1: one has no such
reason. Tests compare the counts of the short form: the last line updates them after a change of
policy.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.scheduling.drawn_loads import DRAWN, drawn_load
from benchmarks.scheduling.loads import LOADS, SHORT_LOADS
from benchmarks.scheduling.report import (
    against,
    counts,
    groups_table,
    markdown_table,
    table,
    values,
    waiting_lines,
    worse_groups,
    worse_loads,
)
from benchmarks.scheduling.run import Comparison, compare
from benchmarks.scheduling.traffic import Load


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; return the exit code."""
    words = _parser().parse_args(argv)
    loads = SHORT_LOADS if words.short else LOADS
    if words.list:
        print("\n".join(f"{load.name:24}{load.about}" for load in loads.values()))
        return 0
    if words.drawn is not None:
        first, count = words.drawn
        loads = {load.name: load for load in map(drawn_load, range(first, first + count))}
    chosen = {name: loads[name] for name in words.loads or loads}
    comparisons = dict(zip(chosen, _run(list(chosen.values()), words.jobs), strict=True))
    if words.json is not None:
        words.json.write_text(json.dumps(values(comparisons), indent=1))
    if words.counts is not None:
        words.counts.write_text(json.dumps(counts(comparisons), indent=1) + "\n")
    if words.markdown is not None:
        words.markdown.write_text(markdown_table(comparisons) + "\n")
    _print(comparisons, chosen)
    if words.against is not None:
        print(f"\nours / ours in {words.against}; speed and wait relative to it")
        print(against(comparisons, json.loads(words.against.read_text())))
    return int(any(each.is_worse and not chosen[name].reason for name, each in comparisons.items()))


def _print(comparisons: Mapping[str, Comparison], loads: Mapping[str, Load]) -> None:
    print("ours / ours with --schedule-conservativeness 0 / reference")
    print("speed (tokens/s) and wait (the mean): ours relative to the better of the two others\n")
    print(f"{table(comparisons)}\n\n{groups_table(comparisons)}")
    for title, lines in (
        ("waiting requests that fit next to the worst case of all running", waiting_lines),
        ("groups that wait more than 1.3 times longer than by a simple scheduler", worse_groups),
    ):
        print(f"\n{title}:", *(lines(comparisons) or ["none"]), sep="\n")
    print("\nserved worse than by a simple scheduler:")
    print("\n".join(worse_loads(comparisons, loads)) or "none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--loads", nargs="+", choices=list(LOADS), metavar="NAME")
    which.add_argument("--short", action="store_true", help="ten loads")
    which.add_argument(
        "--drawn", nargs=2, type=int, metavar=("SEED", "N"), help="N loads drawn from SEED on"
    )
    parser.add_argument("--list", action="store_true", help="list the loads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table of the docs to FILE"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with the figures of another --json"
    )
    parser.add_argument(
        "--counts", type=Path, metavar="FILE", help="write exact counts to FILE, for the tests"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes (1)")
    return parser


def _run(loads: Sequence[Load], num_jobs: int) -> list[Comparison]:
    keys = [(load.name, load.seconds) for load in loads]
    if num_jobs == 1:
        return list(map(_compare, keys))
    with ProcessPoolExecutor(num_jobs) as pool:
        return list(pool.map(_compare, keys))


def _compare(key: tuple[str, float]) -> Comparison:
    """Run a load, given by name and seconds since loads cannot be sent to another process."""
    name, seconds = key
    drawn = name.removeprefix(DRAWN)
    load = LOADS[name] if drawn == name else drawn_load(int(drawn))
    comparison = compare(replace(load, seconds=seconds))
    print(f"{name}: {comparison.speed:.2f} {comparison.wait:.2f}", file=sys.stderr, flush=True)
    return comparison


if __name__ == "__main__":
    sys.exit(main())
