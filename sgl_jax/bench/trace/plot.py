"""A picture of a served run over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_jax.bench.trace.served import RequestLog, Sample, ServedRun
from sgl_jax.planner.plot_file import add_grids_and_legends, figure_class, save_figure

_NUM_INTERVALS = 60  # intervals of the run, for rates and percentiles
_MAX_POINTS = 240  # points per line


def plot_run(run: ServedRun, title: str, path: Path) -> None:
    """Draw requests, pages, hit rate and time to the first token over the run's minutes."""
    figure = figure_class()(figsize=(9, 9), layout="constrained")
    requests, pages, hits, latency = figure.subplots(4, 1, sharex=True)
    series: Any = Sample(*np.array(run.samples).T)  # each field an array over the samples
    means: Any = Sample._make(_means(values) for values in series)
    requests.plot(means.time_s / 60, means.num_running, lw=1, label="running")
    requests.plot(means.time_s / 60, means.num_waiting, lw=1, label="waiting")
    requests.set(ylabel="requests", ylim=(0, None))
    _plot_pages(pages, means)
    minutes = series.time_s / 60
    edges = np.linspace(0, minutes[-1], _NUM_INTERVALS + 1)
    _plot_hit_rate(hits, edges, series)
    _plot_first_tokens(latency, edges, run.requests)
    add_grids_and_legends((requests, pages, hits, latency))
    latency.set(xlabel="minutes", xlim=(0, minutes[-1]))
    figure.suptitle(title)
    save_figure(figure, path)


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return means of at most `_MAX_POINTS` groups of adjacent values."""
    group = -(-len(values) // _MAX_POINTS)
    starts = np.arange(0, len(values), group)
    sums: NDArray[np.float64] = np.add.reduceat(values, starts)
    return sums / np.diff(starts, append=len(values))


def _plot_pages(axes: Any, series: Any) -> None:
    """Plot leased, cached and free pages, stacked to the whole pool."""
    pool = series.free_pages + series.leased_pages + series.cached_pages
    parts = {
        "leased": series.leased_pages,
        "cached, in use": series.locked_pages,
        "cached, evictable": series.cached_pages - series.locked_pages,
        "free": series.free_pages,
    }
    shares = [part / pool for part in parts.values()]
    minutes = series.time_s / 60
    axes.stackplot(minutes, *shares, labels=parts, colors=("C0", "C1", "C2", "0.9"), alpha=0.8)
    axes.set(ylabel="share of the pages", ylim=(0, 1))


def _plot_hit_rate(axes: Any, edges: NDArray[np.float64], series: Any) -> None:
    """Plot the hit rate per interval and in total; a request's tokens count from its admission."""
    minutes = series.time_s / 60
    prompt_tokens, cached_tokens = series.prompt_tokens, series.cached_tokens
    prompts = np.diff(np.interp(edges, minutes, prompt_tokens))
    hits = np.diff(np.interp(edges, minutes, cached_tokens))
    rates = np.divide(hits, prompts, out=np.full_like(hits, np.nan), where=prompts > 0)
    axes.stairs(rates, edges, label="now")
    is_known = prompt_tokens > 0
    total = _means(cached_tokens[is_known] / prompt_tokens[is_known])
    axes.plot(_means(minutes[is_known]), total, label="since the start")
    axes.set(ylabel="hit rate", ylim=(0, None))


def _plot_first_tokens(
    axes: Any, edges: NDArray[np.float64], requests: Sequence[RequestLog]
) -> None:
    """Plot percentiles of the time to the first token, by the interval of the arrival."""
    from matplotlib.ticker import LogLocator, NullFormatter

    served = [log for log in requests if log.refusal is None]
    arrivals = np.array([log.arrival_s for log in served]) / 60
    seconds = np.array([log.first_token_s - log.arrival_s for log in served])
    interval = np.clip(np.searchsorted(edges, arrivals, side="right") - 1, 0, len(edges) - 2)
    for percentile in (50, 99):
        values = [
            np.percentile(seconds[interval == i], percentile) if (interval == i).any() else np.nan
            for i in range(len(edges) - 1)
        ]
        axes.stairs(values, edges, baseline=None, label=f"p{percentile}")
    axes.set(ylabel="seconds to the first token", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
