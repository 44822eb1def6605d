"""Tables of the results."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from benchmarks.scheduling.run import MOST_WAIT, Comparison, wait_ratio
from benchmarks.scheduling.simulation import GroupResult, Result
from benchmarks.scheduling.traffic import Load

T = TypeVar("T")

# Column, its width, and the text of one result.
_COLUMNS: tuple[tuple[str, int, Callable[[Result], str]], ...] = (
    ("tokens/s", 30, lambda result: _short(result.tokens_per_s)),
    ("output tokens/s", 25, lambda result: _short(result.output_per_s)),
    ("mean wait, ms", 26, lambda result: _short(result.mean_wait_ms)),
    ("retracts", 19, lambda result: str(result.retracts)),
    ("preempted", 14, lambda result: str(result.preemptions)),
    ("computed again", 28, lambda result: _short(result.recomputed)),
    ("pages", 16, lambda result: f"{result.utilization:.2f}".lstrip("0")),
)
_PAGE_COLUMNS = ("tokens/s", "mean wait, ms", "retracts", "computed again")
_GROUP_COLUMNS: tuple[tuple[str, int, Callable[[GroupResult], str]], ...] = (
    ("number", 24, lambda group: str(group.count)),
    ("mean wait, ms", 28, lambda group: _short(group.mean_wait_ms)),
    ("p99 wait, ms", 28, lambda group: _short(group.p99_wait_ms)),
    ("first token, ms", 28, lambda group: _short(group.mean_first_token_ms)),
)


def table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a line for each load."""
    head = "".join(f"{name:>{width}}" for name, width, _ in _COLUMNS)
    lines = [f"{'load':22}{'speed':>6}{'wait':>7}{head}"]
    for name, each in comparisons.items():
        cells = "".join(f"{_three(each, text):>{width}}" for _, width, text in _COLUMNS)
        lines.append(f"{name:22}{each.speed:>6.2f}{each.wait:>7.2f}{cells}")
    return "\n".join(lines)


def markdown_table(comparisons: Mapping[str, Comparison]) -> str:
    """Return the columns that the page of measurements has."""
    columns = [(name, text) for name, _, text in _COLUMNS if name in _PAGE_COLUMNS]
    heads = ["load", "speed", "wait", *(name for name, _ in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, each in comparisons.items():
        ratios = [f"{each.speed:.2f}", f"{each.wait:.2f}"]
        cells = [name, *ratios, *(_three(each, text) for _, text in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def groups_table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a line for each group of requests of each load."""
    head = "".join(f"{name:>{width}}" for name, width, _ in _GROUP_COLUMNS)
    lines = [f"{'load':22}{'requests of':14}{head}"]
    for name, each in comparisons.items():
        for group in each.ours.groups:
            own = [None if result is None else result.groups.get(group) for result in each]
            cells = "".join(f"{_three(own, text):>{width}}" for _, width, text in _GROUP_COLUMNS)
            lines.append(f"{name:22}{group:14}{cells}")
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


def against(comparisons: Mapping[str, Comparison], before: Mapping[str, Any]) -> str:
    """Return a line for each load: ours now and in `before`, figures that `values` returned."""
    lines = [
        f"{'load':22}{'speed':>6}{'wait':>7}{'tokens/s':>20}{'mean wait, ms':>18}{'retracts':>14}"
    ]
    for name, each in comparisons.items():
        if name not in before:
            continue
        ours, was = each.ours, before[name]["ours"]
        speed = ours.tokens_per_s / was["tokens_per_s"]
        wait = wait_ratio(ours.mean_wait_ms, [was["mean_wait_ms"]])
        rates = f"{_short(ours.tokens_per_s)} / {_short(was['tokens_per_s'])}"
        waits = f"{_short(ours.mean_wait_ms)} / {_short(was['mean_wait_ms'])}"
        retracts = f"{ours.retracts} / {was['retracts']}"
        lines.append(f"{name:22}{speed:>6.2f}{wait:>7.2f}{rates:>20}{waits:>18}{retracts:>14}")
    return "\n".join(lines)


def counts(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, Any]]:
    """Return the integer figures of ours and the reference, which tests compare."""
    names = ("steps", "requests", "output_tokens", "retracts", "preemptions", "recomputed")
    return {
        name: {
            scheduler: {field: getattr(result, field) for field in names}
            for scheduler, result in (("ours", each.ours), ("reference", each.reference))
            if result is not None
        }
        for name, each in comparisons.items()
    }


def _three(results: Iterable[T | None], text: Callable[[T], str]) -> str:
    return " / ".join("-" if result is None else text(result) for result in results)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
