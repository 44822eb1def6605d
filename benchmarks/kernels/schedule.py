"""The cost of a Pallas kernel on TPU, read from the TPU compiler's schedule.

The compiler can dump each kernel's final schedule: its bundles (instructions that issue together,
about one bundle per cycle unless one waits for memory), the loops that contain them, and the units
that each uses. This module requests and reads dumps. Nothing runs, so the figures are not times: a
loop that waits for its DMAs takes longer than its bundles.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(L[HBE]|P[BF]|CT)?\s*:\s*((?:>\s*)*)\{(.*)")
_SCHEDULE = re.compile(r"-(\w+?)(?:\.\d+)?-\d+-final_bundles\.txt$")


def request_dumps(folder: Path) -> None:
    """Make libtpu write schedules to `folder`; this has no effect after libtpu is loaded."""
    passes = ".*(final_bundles|final_hlo-static).*"
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex={passes}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


class Loop(NamedTuple):
    """The bundles of one loop, without inner loops."""

    depth: int
    bundles: int
    dmas: int  # transfers started
    units: dict[str, int]  # instructions on each of UNITS

    @property
    def spills(self) -> int:
        """Return how many times registers are stored and loaded because too few are free."""
        return self.units["SPILL"] + self.units["FILL"]


class Schedule(NamedTuple):
    kernel: str
    bundles: int
    loops: list[Loop]

    @property
    def hot_loops(self) -> list[Loop]:
        """Return the loops by their use of the matrix unit, the heaviest first."""
        return sorted(self.loops, key=lambda loop: -loop.units["MXU"])


def read_schedules(folder: Path) -> list[Schedule]:
    """Return the schedules dumped to `folder`, in the order of their compilation."""
    result = []
    for bundles in sorted(folder.glob("*-final_bundles.txt")):
        found = _SCHEDULE.search(bundles.name)
        if not found or "schedule-analysis" in bundles.name:
            continue
        prefix = re.sub(r"-\d+-final_bundles\.txt$", "", bundles.name)
        uses = next(iter(folder.glob(f"{prefix}-*-final_hlo-static-per-bundle-utilization.txt")))
        result.append(_parse(found.group(1), bundles.read_text(), uses.read_text()))
    return result


class _Bundle(NamedTuple):
    begins_loop: bool
    depth: int  # number of loops that contain it
    dmas: int
    uses: list[int]  # instructions on each of UNITS


def _parse(kernel: str, bundles: str, uses: str) -> Schedule:
    rows = list(_bundles(bundles, uses))
    loops = _loops(rows)
    return Schedule(kernel, len(rows), [_sum(rows[start], members) for start, members in loops])


def _sum(first: _Bundle, members: list[_Bundle]) -> Loop:
    totals = [sum(column) for column in zip(*(row.uses for row in members), strict=True)]
    units = dict(zip(UNITS, totals, strict=True))
    return Loop(first.depth, len(members), sum(row.dmas for row in members), units)


def _bundles(bundles: str, uses: str) -> Iterator[_Bundle]:
    matches = [m for m in map(_BUNDLE.match, bundles.splitlines()) if m]
    counts = [
        [int(n) for n in line.split()]
        for line in uses.splitlines()
        if re.fullmatch(r"\s*\d+(\s+\d+)+\s*", line)
    ]
    # The first line of numbers may be the units' capacities.
    for match, count in zip(matches, counts[len(counts) - len(matches) :], strict=True):
        tag, depth, body = match.groups()
        yield _Bundle(tag == "LB", depth.count(">"), body.count(" dma."), count)


def _loops(rows: list[_Bundle]) -> list[tuple[int, list[_Bundle]]]:
    """Return the index of each loop's first bundle, and its bundles without inner loops.

    Bundles of a loop may be marked as outside it: empty ones, and ones with moved instructions. A
    loop is left only when no bundle of its depth follows before another loop of that depth begins.
    """
    loops: list[tuple[int, list[_Bundle]]] = []
    open_loops: list[tuple[int, list[_Bundle]]] = []
    for i, row in enumerate(rows):
        while open_loops and _is_left(rows, i, rows[open_loops[-1][0]].depth):
            open_loops.pop()
        if row.begins_loop:
            open_loops.append((i, []))
            loops.append(open_loops[-1])
        if open_loops:
            open_loops[-1][1].append(row)
    return loops


def _is_left(rows: list[_Bundle], index: int, depth: int) -> bool:
    """Return whether a loop of `depth` that was open before rows[index] is closed."""
    following = next((row for row in rows[index:] if row.depth >= depth), None)
    return following is None or (following.begins_loop and following.depth == depth)
