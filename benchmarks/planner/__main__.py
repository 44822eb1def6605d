"""Compare the planner's estimates with published figures, and fit the rates that engines reach.

    python -m benchmarks.planner --record    # compile the steps (minutes each) and keep their times
    python -m benchmarks.planner             # print the table from the kept times

The figures are divided before anything is fitted: in the order of their names, every second one is
held out.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from benchmarks.planner.published import PUBLISHED, Published
from sgl_jax.executor import engine_config
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.programs import Programs
from sgl_jax.planner.engine_programs import EngineProgramsOnPaper
from sgl_jax.planner.estimate import make_estimate
from sgl_jax.planner.load import Reach, requests_per_s
from sgl_jax.planner.program_cost import ProgramCost, program_cost
from sgl_jax.planner.step_time import StepTime

STEPS = Path(__file__).with_name("steps.json")
_COMPILED_CLIENTS = 64
_CLOSE = 0.25  # of the published figure
_PROGRAM = [share / 100 for share in range(20, 101, 4)]
_LINKS = [share / 100 for share in range(10, 101, 5)]
_HOST_S = [half_ms / 2000 for half_ms in range(21)]
_PEAK = Reach(attention=1.0, program=1.0, links=1.0, host_s=0.0)


class Row(NamedTuple):
    """A published figure and the estimated steps of its load."""

    published: Published
    rows: int
    chunk: int
    steps: tuple[StepTime, StepTime]

    def ratio(self, reach: Reach) -> float:
        """Return the estimate over the published figure."""
        load = self.published
        rate = requests_per_s(
            self.rows, load.input_len, load.output_len, self.chunk, self.steps, reach
        )
        return rate * load.output_len / load.output_tokens_per_s


class SharedCosts:
    """Costs of steps, of which few are compiled: a table of figures would take hours.

    One decode step and one chunk are compiled for each model and slice, without the part that draws
    tokens, and with a loop over single layers. Exchanges are scaled by the number of tokens.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, ...], tuple[int, ProgramCost]] = {}

    def __call__(
        self, published: Published, engine: EngineProgramsOnPaper, bucket: Bucket
    ) -> ProgramCost:
        kind = "decode" if bucket.tokens == bucket.rows else "chunk"
        key = published.model, published.topology, kind
        if key not in self._compiled:
            self._compiled[key] = bucket.tokens, _first_half(engine.programs, bucket)
        tokens, cost = self._compiled[key]
        exchanges = tuple(
            own._replace(num_bytes=own.num_bytes * bucket.tokens // tokens)
            for own in cost.collectives
        )
        return cost._replace(collectives=exchanges)


def _first_half(programs: Programs, bucket: Bucket) -> ProgramCost:
    programs.trace_halves(bucket)
    first, _ = programs._traced_halves.pop(bucket)
    return program_cost(first.compile(compiler_options=programs._compiler_options(bucket)))


def record(only: str) -> None:
    """Estimate the steps of the figures whose names contain `only`, and keep their times."""
    jax.config.update("jax_platforms", "cpu")
    kept: dict[str, Any] = json.loads(STEPS.read_text()) if STEPS.exists() else {}
    costs = SharedCosts()
    # Of a model and slice, the load nearest to 64 clients is compiled.
    for own in sorted(PUBLISHED, key=lambda own: abs(own.clients - _COMPILED_CLIENTS)):
        if only in own.name:
            with mock.patch.object(engine_config, "_UNROLLED_LAYERS", 1):
                plan = make_estimate(own.request, partial(costs, own))
            times = {
                kind: dataclasses.asdict(step.time)
                for kind, step in (("decode", plan.decode), ("prefill", plan.prefill))
            }
            kept[own.name] = {"rows": plan.concurrency, "chunk": plan.prefill.tokens, **times}
            STEPS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(own.name, file=sys.stderr, flush=True)


def halves() -> tuple[list[Row], list[Row]]:
    """Return the figures to fit, and those that are held out; figures without steps are left out
    after the division."""
    kept = json.loads(STEPS.read_text())
    by_half: tuple[list[Row], list[Row]] = [], []
    for number, own in enumerate(sorted(PUBLISHED, key=lambda own: own.name)):
        if (found := kept.get(own.name)) is not None:
            steps = StepTime(**found["decode"]), StepTime(**found["prefill"])
            by_half[number % 2].append(Row(own, found["rows"], found["chunk"], steps))
    return by_half


def mean_error(rows: Sequence[Row], reach: Reach) -> float:
    """Return the mean of the absolute logarithms of the ratios."""
    return sum(abs(math.log(row.ratio(reach))) for row in rows) / len(rows)


def fitted(rows: Sequence[Row]) -> Reach:
    """Return the rates of a grid with the least mean error."""
    grid = (Reach(program=p, links=n, host_s=h) for p, n, h in product(_PROGRAM, _LINKS, _HOST_S))
    return min(grid, key=lambda reach: mean_error(rows, reach))


def table(fit: Sequence[Row], held: Sequence[Row], reach: Reach) -> Iterator[str]:
    """Yield the lines of a table in Markdown, and a summary of each half."""
    yield "| model, slice, load | published | at peak rates | expected | half |"
    yield "|---|---|---|---|---|"
    both = {**dict.fromkeys(fit, "fitted"), **dict.fromkeys(held, "held out")}
    for row in sorted(both, key=lambda row: row.published.name):
        rate = row.published.output_tokens_per_s
        yield (
            f"| {row.published.name} | {rate:,.0f} | {row.ratio(_PEAK) * rate:,.0f} "
            f"({row.ratio(_PEAK):.2f}) | {row.ratio(reach) * rate:,.0f} "
            f"({row.ratio(reach):.2f}) | {both[row]} |"
        )
    yield ""
    for name, rows in (("fitted", fit), ("held out", held)):
        for kind, own in (("at peak rates", _PEAK), ("expected", reach)):
            close = sum(abs(row.ratio(own) - 1) <= _CLOSE for row in rows)
            error = math.exp(mean_error(rows, own))
            yield f"{name}, {kind}: {close} of {len(rows)} within 25 %, mean factor {error:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner")
    parser.add_argument("--record", action="store_true", help="compile and keep the steps' times")
    parser.add_argument("--only", default="", help="with --record: part of the figures' names")
    words = parser.parse_args(argv)
    if words.record:
        record(words.only)
        return 0
    fit, held = halves()
    reach = fitted(fit)
    print(f"fitted: {reach}\n")
    print("\n".join(table(fit, held, reach)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
