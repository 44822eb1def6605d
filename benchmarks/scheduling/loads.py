"""The loads of the benchmark, by name."""

from dataclasses import replace

from benchmarks.scheduling.featured_loads import FEATURED
from benchmarks.scheduling.plain_loads import PLAIN
from benchmarks.scheduling.regressions import REGRESSIONS

LOADS = {load.name: load for load in (*REGRESSIONS, *PLAIN, *FEATURED)}

# Ten loads that tests run, each for so many seconds of the logical clock.
_SHORT_SECONDS = {
    "aborts-16": 4.0,
    "full-rank-16": 2.0,
    "short-next-to-long": 4.0,
    "retracted-long-4k": 8.0,
    "lockstep": 6.0,
    "preempted-stream": 20.0,
    "uneven-ranks": 5.0,
    "long-prompt": 2.0,
    "prefixes": 4.0,
    "shares": 4.0,
}
SHORT_LOADS = {name: replace(LOADS[name], seconds=s) for name, s in _SHORT_SECONDS.items()}
