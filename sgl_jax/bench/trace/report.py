"""Reports of cache-only and served runs, as values for programs and as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sgl_jax.bench.trace.served import ServedRun

PERCENTILES = (50, 90, 99)


class CacheRow(NamedTuple):
    """Hit rates at one capacity."""

    blocks: int
    is_unlimited: bool  # more blocks than the trace has
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
        lines.append(f"{blocks:>13}  {cells}")
    return "\n".join(lines)


def served_values(run: ServedRun, oracles: Mapping[str, float]) -> dict[str, Any]:
    """Return JSON values; times are seconds of the clock, `host_*` microseconds of CPU time.

    Args:
        run: a run that served at least one request.
        oracles: hit rates of block caches of the same capacity, by name.
    """
    served = [log for log in run.requests if log.refusal is None]
    counters = run.counters
    prompt_tokens, output_tokens = counters["prompt_tokens"], counters["generated_tokens"]
    host_us = np.array(run.host_s) * 1e6
    return {
        "requests": len(run.requests),
        "finished": len(served),
        "refused": len(run.requests) - len(served),
        "refusals": sorted({log.refusal for log in run.requests if log.refusal is not None}),
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
        "host_us_per_arrival": run.arrivals_host_s / len(run.requests) * 1e6,
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


def _choices_line(kind: str, choices: Mapping[str, float]) -> str:
    return (
        f"{f'{kind} or compute':<20} {choices['choices']:,} choices, {choices['loaded']:,} to "
        f"{kind}: {choices['chosen_s']:,.1f} s to their first tokens; an oracle of both times "
        f"{choices['oracle_s']:,.1f} s, always {choices['always_s']:,.1f} s, never "
        f"{choices['never_s']:,.1f} s"
    )


def _spread_line(name: str, spread: Mapping[str, float]) -> str:
    return f"  {name:<18} " + " ".join(f"{value:>9.3f}" for value in spread.values())
