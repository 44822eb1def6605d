"""Print the table of the host's costs."""

import argparse
from collections.abc import Iterator

import benchmarks.host as host
from benchmarks.host.memory import bench_allocator, bench_eviction, bench_tree
from benchmarks.host.ranks import SHAPES, ranks_lines
from benchmarks.host.serving import LOADS, serving_lines
from benchmarks.host.steps import (
    DP_SIZE,
    background_audit_line,
    bench_steps,
    busy_check_line,
    recording_line,
)
from benchmarks.host.timing import HEADER, Timing
from benchmarks.host.waiting import waiting_lines


def all_timings(repeats: int) -> Iterator[Timing]:
    """Measure and yield the lines of the table one by one."""
    for page_size in (16, 1):
        yield from bench_steps(page_size, repeats)
    for page_size in (16, 1):
        yield from bench_tree(page_size, repeats)
    yield from bench_eviction(1, repeats)
    yield from bench_eviction(1000, repeats)
    yield from bench_allocator(repeats)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=host.__doc__)
    parser.add_argument("--quick", action="store_true", help="10 repeats of each instead of 200")
    repeats = 10 if parser.parse_args().quick else 200
    print(HEADER)
    for timing in all_timings(repeats):
        print(timing.line(), flush=True)
    for dp_size in (1, DP_SIZE):
        print(busy_check_line(dp_size, 16, repeats), flush=True)
        print(background_audit_line(dp_size, 16, 2 * repeats), flush=True)
    print(recording_line(repeats), flush=True)
    for shape in SHAPES:
        for line in ranks_lines(*shape, repeats):
            print(line, flush=True)
    for name in LOADS:
        for line in serving_lines(name, 2 * repeats):
            print(line, flush=True)
    for policy in ("fcfs", "lpm"):
        for line in waiting_lines(policy, 2 * repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
