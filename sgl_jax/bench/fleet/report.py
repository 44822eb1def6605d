"""Reports of a fleet's runs: values for programs, a table for people, and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.bench.fleet.run import FleetRun
from sgl_jax.bench.trace.report import PERCENTILES, spread
from sgl_jax.planner.plot_file import add_grids_and_legends, figure_class, save_figure


class Target(NamedTuple):
    """The maximum latencies of a good answer, in seconds."""

    first_token_s: float
    per_token_s: float  # mean time between the answer's tokens

    def is_met(self, run: FleetRun) -> NDArray[np.bool_]:
        """Return bool[requests]: True if a request met both limits; refused requests did not."""
        later = np.maximum(run.output_tokens - 1, 1)
        per_token_s = (run.end_s - run.first_token_s) / later
        is_met: NDArray[np.bool_] = (run.first_token_s <= self.first_token_s) & (
            per_token_s <= self.per_token_s
        )
        return is_met


def run_values(run: FleetRun, target: Target) -> dict[str, Any]:
    """Return JSON values of one run; times are seconds of the clock. `goodput` is good answers per
    second of arrivals. Raises RuntimeError if all were refused."""
    is_met, is_served = target.is_met(run), ~run.is_refused
    if not is_served.any():
        raise RuntimeError("every request was refused: none fits an engine")
    prompt_tokens = int(run.prompt_tokens[is_served].sum())
    num_plans = sum(total.num_plans for total in run.totals)
    return {
        "requests": len(is_met),
        "refused": int(run.is_refused.sum()),
        "prompt_tokens": prompt_tokens,
        "hit_rate": float(run.cached_tokens[is_served].sum() / prompt_tokens),
        "first_token_s": spread(run.first_token_s[is_served]),
        "good_share": float(is_met.mean()),
        "goodput": float(is_met.sum() / (np.ptp(run.arrivals_s) or run.duration_s)),
        "duration_s": run.duration_s,
        "busy_mean": float(run.busy.mean()),
        "busy_max": float(run.busy.max()),
        "steps": sum(total.num_steps for total in run.totals),
        "plans": num_plans,
    }


def table(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per policy, from the values of its run."""
    lines = [
        f"{'':14}{'hit':>7}{'first token, s':>24}{'good':>8}{'good':>10}{'busy':>14}",
        f"{'policy':14}{'rate':>7}{'p50':>8}{'p90':>8}{'p99':>8}{'share':>8}{'per s':>10}"
        f"{'mean':>7}{'most':>7}",
    ]
    for name, row in values.items():
        first = row["first_token_s"]
        times = "".join(f"{first[f'p{p}']:8.2f}" for p in PERCENTILES)
        lines.append(
            f"{name:14}{row['hit_rate']:7.3f}{times}{row['good_share']:8.3f}{row['goodput']:10.2f}"
            f"{row['busy_mean']:7.2f}{row['busy_max']:7.2f}"
        )
    return "\n".join(lines)


def plot_fleet(runs: Mapping[str, FleetRun], target: Target, title: str, path: Path) -> None:
    """Draw each policy's times to the first token, and its hits and good answers by minute."""
    figure = figure_class()(figsize=(9, 9), layout="constrained")
    first, hits, good = figure.subplots(3, 1)
    shares = np.linspace(0, 100, 201)
    for name, run in runs.items():
        first.plot(np.nanpercentile(run.first_token_s, shares), shares / 100, label=name)
        arrivals = (run.arrivals_s // 60).astype(np.int64)
        minutes, by_minute = np.unique(arrivals, return_inverse=True)
        prompt_tokens = _sums(run.prompt_tokens, by_minute)
        hits.plot(minutes, _sums(run.cached_tokens, by_minute) / prompt_tokens, label=name)
        good.plot(minutes, _sums(target.is_met(run), by_minute) / _sums(1, by_minute), label=name)
    first.axvline(target.first_token_s, color="0.5", lw=1, ls=":")
    first.set(xscale="log", xlabel="seconds to the first token", ylabel="share of the requests")
    hits.set(ylabel="hit rate", ylim=(0, None))
    good.set(ylabel="share of good answers", ylim=(0, 1), xlabel="minute of the arrival")
    add_grids_and_legends((first, hits, good))
    figure.suptitle(title)
    save_figure(figure, path)


def _sums(values: Any, groups: NDArray[np.int64]) -> NDArray[np.float64]:
    weights = np.broadcast_to(values, groups.shape)
    return np.bincount(groups, weights=weights).astype(np.float64)
