"""Reports of cache-only and served runs: values for programs, text for people, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sgl_jax.bench.trace.reading import TracedRequest
from sgl_jax.bench.trace.served import RequestLog, Sample, ServedRun
from sgl_jax.bench.trace.turns import turn_values
from sgl_jax.planner.plot_file import add_grids_and_legends, figure_class, save_figure

_NUM_INTERVALS = 60  # intervals of the run, for rates and percentiles
_MAX_POINTS = 240  # points per line
PERCENTILES = (50, 90, 99)


class CacheRow(NamedTuple):
    """Hit rates at one capacity."""

    blocks: int
    is_unlimited: bool  # more blocks than the trace has
    num_skipped: int  # prompts with more blocks: not served, and no hits
    tree: dict[str, float]  # radix tree, by eviction policy
    oracles: dict[str, float]


def cache_table(rows: Sequence[CacheRow]) -> str:
    """Return one line per capacity."""
    names = [*(f"tree, {policy}" for policy in rows[0].tree), *rows[0].oracles]
    widths = [max(len(name), 8) for name in names]
    head = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [f"{'blocks of 512':>13}  {head}"]
    for row in rows:
        rates = [*row.tree.values(), *row.oracles.values()]
        cells = "  ".join(f"{rate:>{width}.3f}" for rate, width in zip(rates, widths, strict=True))
        blocks = "no limit" if row.is_unlimited else f"{row.blocks:,}"
        skipped = f"  {row.num_skipped:,} longer prompts skipped" if row.num_skipped else ""
        lines.append(f"{blocks:>13}  {cells}{skipped}")
    return "\n".join(lines)


def served_values(
    run: ServedRun, oracles: Mapping[str, float], trace: Sequence[TracedRequest] = ()
) -> dict[str, Any]:
    """Return JSON values; times are seconds of the clock, `host_*` microseconds of CPU time.

    Args:
        run: a run that served at least one request.
        oracles: hit rates of block caches of the same capacity, by name.
        trace: the requests; if agents sent them, the values include each kind of turn.
    """
    arrived = [log for log in run.requests if not np.isnan(log.arrival_s)]
    served = [log for log in arrived if log.refusal is None]
    counters = run.counters
    prompt_tokens, output_tokens = counters["prompt_tokens"], counters["generated_tokens"]
    host_us = np.array(run.host_s) * 1e6
    return {
        "requests": len(arrived),
        "finished": len(served),
        "refused": len(arrived) - len(served),
        "refusals": sorted({log.refusal for log in arrived if log.refusal is not None}),
        "turns": turn_values(trace, run.requests) if any(each.agent for each in trace) else {},
        "retracted": counters["requests_retracted"],
        "evicted_pages": counters["evicted_pages"],
        "prompt_tokens": prompt_tokens,
        "cached_tokens": counters["cached_tokens"],
        "fetched_tokens": counters["host_fetched_tokens"],
        "copied_pages": counters["host_copied_pages"],
        "loaded_tokens": counters["store_loaded_tokens"],
        "fetch_choices": run.fetch_choices,
        "load_choices": run.load_choices,
        "hit_rate": counters["cached_tokens"] / prompt_tokens,
        "oracle_hit_rates": dict(oracles),
        "output_tokens": output_tokens,
        "queueing_s": spread([log.start_s - log.arrival_s for log in served]),
        "ttft_s": spread([log.first_token_s - log.arrival_s for log in served]),
        "end_to_end_s": spread([log.end_s - log.arrival_s for log in served]),
        "most_running": max(sample.num_running for sample in run.samples),
        "most_waiting": max(sample.num_waiting for sample in run.samples),
        "steps": len(run.host_s),
        "duration_s": run.duration_s,
        "busy_share": run.busy_s / run.duration_s,
        "prompt_tokens_per_s": prompt_tokens / run.duration_s,
        "output_tokens_per_s": output_tokens / run.duration_s,
        "host_us_per_step": {
            "mean": float(host_us.mean()),
            "p99": float(np.percentile(host_us, 99)),
            "max": float(host_us.max()),
        },
        "host_us_per_arrival": run.arrivals_host_s / len(arrived) * 1e6,
    }


def spread(seconds: ArrayLike) -> dict[str, float]:
    """Return the `PERCENTILES` and the maximum by name."""
    values = np.array(seconds)
    spread = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return spread | {"max": float(values.max())}


def served_text(values: Mapping[str, Any]) -> str:
    oracles = ", ".join(f"{name} {rate:.3f}" for name, rate in values["oracle_hit_rates"].items())
    host = values["host_us_per_step"]
    lines = [
        f"hit rate             {values['hit_rate']:.3f}  ({values['cached_tokens']:,} of "
        f"{values['prompt_tokens']:,} prompt tokens)",
        f"  from the host      {values['fetched_tokens']:,} tokens fetched, "
        f"{values['copied_pages']:,} pages copied there, {values['loaded_tokens']:,} tokens loaded "
        "from the store",
        f"  of block oracles   {oracles}",
        *(
            _choices_line(kind, choices)
            for kind in ("fetch", "load")
            if (choices := values[f"{kind}_choices"]).get("choices")
        ),
        "",
        f"{'seconds':<20} {'p50':>9} {'p90':>9} {'p99':>9} {'max':>9}",
        _spread_line("queueing", values["queueing_s"]),
        _spread_line("to the first token", values["ttft_s"]),
        _spread_line("end to end", values["end_to_end_s"]),
        *_turn_lines(values["turns"]),
        "",
        f"requests             {values['finished']:,} finished, {values['refused']:,} refused, "
        f"{values['retracted']:,} retracts; at most {values['most_running']:,} ran, "
        f"{values['most_waiting']:,} waited",
        f"evicted              {values['evicted_pages']:,} pages",
        f"duration             {values['duration_s']:,.0f} s, the device busy for "
        f"{values['busy_share']:.1%}; {values['prompt_tokens_per_s']:,.0f} prompt tokens/s, "
        f"{values['output_tokens_per_s']:,.0f} output tokens/s",
        f"steps                {values['steps']:,}; the host's share of each: mean "
        f"{host['mean']:,.0f} us, p99 {host['p99']:,.0f} us, max {host['max']:,.0f} us; "
        f"{values['host_us_per_arrival']:,.0f} us an arrival",
        *(f"refused: {text}" for text in values["refusals"]),
    ]
    return "\n".join(lines)


def _turn_lines(turns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not turns:
        return []
    names = ("turns", "completed", "hit rate", "mean s to the first token", "most")
    return [
        "",
        f"{'turns of agents':<20} " + " ".join(f"{name:>9}" for name in names),
        *(
            f"  {kind:<20} {each['turns']:>7,} {each['completed']:>9,} {each['hit_rate']:>9.3f} "
            f"{each['mean_ttft_s']:>25.3f} {each['max_ttft_s']:>9.3f}"
            for kind, each in turns.items()
        ),
    ]


def _choices_line(kind: str, choices: Mapping[str, float]) -> str:
    return (
        f"{f'{kind} or compute':<20} {choices['choices']:,} choices, {choices['loaded']:,} to "
        f"{kind}: {choices['chosen_s']:,.1f} s to their first tokens; an oracle of both times "
        f"{choices['oracle_s']:,.1f} s, always {choices['always_s']:,.1f} s, never "
        f"{choices['never_s']:,.1f} s"
    )


def _spread_line(name: str, spread: Mapping[str, float]) -> str:
    return f"  {name:<18} " + " ".join(f"{value:>9.3f}" for value in spread.values())


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

    served = [log for log in requests if log.refusal is None and not np.isnan(log.arrival_s)]
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
