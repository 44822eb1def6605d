"""Tables of the results."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.scheduling.run import MOST_WAIT, Comparison
from benchmarks.scheduling.traffic import Load

_HEAD = (
    f"{'load':22}{'tok/s':>26}{'ratio':>7}{'mean wait, ms':>24}{'ratio':>7}{'retracts':>18}"
    f"{'computed again':>28}{'pages':>16}"
)


def table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a line for each load: ours / conservativeness 0 / reference."""
    lines = ["each: ours / ours with --schedule-conservativeness 0 / reference", "", _HEAD]
    for name, each in comparisons.items():
        rates = _three(each, lambda result: _short(result.tokens_per_s))
        waits = _three(each, lambda result: _short(result.mean_wait_ms))
        retracts = _three(each, lambda result: str(result.retracts))
        again = _three(each, lambda result: _short(result.recomputed))
        used = _three(each, lambda result: f"{result.utilization:.2f}".lstrip("0"))
        lines.append(
            f"{name:22}{rates:>26}{each.speed:>7.2f}{waits:>24}{each.wait:>7.2f}{retracts:>18}"
            f"{again:>28}{used:>16}"
        )
    return "\n".join(lines)


def groups_table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a line for each group of requests of each load."""
    lines = [
        f"{'load':22}{'requests of':14}{'number':>22}{'mean wait, ms':>28}{'p99 wait, ms':>28}"
        f"{'first token, ms':>28}"
    ]
    for name, each in comparisons.items():
        for group in each.ours.groups:
            own = [None if result is None else result.groups.get(group) for result in each]
            cells = [
                " / ".join("-" if g is None else _short(getattr(g, column)) for g in own)
                for column in ("count", "mean_wait_ms", "p99_wait_ms", "mean_first_token_ms")
            ]
            lines.append(
                f"{name:22}{group:14}{cells[0]:>22}" + "".join(f"{c:>28}" for c in cells[1:])
            )
    return "\n".join(lines)


def worse_loads(comparisons: Mapping[str, Comparison], loads: Mapping[str, Load]) -> list[str]:
    """Return a line for each load that ours serves worse than a simple scheduler."""
    return [
        f"{name}: {each.speed:.2f} of the speed, {each.wait:.2f} of the wait: "
        f"{loads[name].reason or 'no documented reason'}"
        for name, each in comparisons.items()
        if each.is_worse
    ]


def worse_groups(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return a line for each group of requests that waits longer than by a simple scheduler."""
    return [
        f"{name}, {group}: {each.group_wait(group):.2f} of the wait"
        for name, each in comparisons.items()
        for group in each.ours.groups
        if each.group_wait(group) > MOST_WAIT
    ]


def waiting_lines(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return a line for each load in which a request waited that fits in the worst case."""
    return [
        f"{name}: {sum(own.could_start.values()):,} of {own.waiting_seen:,} ("
        + ", ".join(f"{kind} {num:,}" for kind, num in sorted(own.could_start.items()))
        + ")"
        for name, (own, _, _) in comparisons.items()
        if own.could_start
    ]


def values(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, Any]]:
    """Return all figures as JSON values."""
    return {
        name: {
            "speed": each.speed,
            "wait": each.wait,
            **{
                field: asdict(result)
                for field, result in each._asdict().items()
                if result is not None
            },
        }
        for name, each in comparisons.items()
    }


def counts(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, Any]]:
    """Return the figures of ours and the reference that are integers, which tests compare."""
    names = ("steps", "requests", "output_tokens", "retracts", "preemptions", "recomputed")
    return {
        name: {
            scheduler: {field: getattr(result, field) for field in names}
            for scheduler, result in (("ours", each.ours), ("reference", each.reference))
            if result is not None
        }
        for name, each in comparisons.items()
    }


def _three(comparison: Comparison, text: Any) -> str:
    return " / ".join("-" if result is None else text(result) for result in comparison)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
