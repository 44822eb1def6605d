"""How well paths' records predict when recorded agents return (`path_records.py`).

A path that is fetched from host memory before its expected return holds device memory until it
returns, or until it is given up. Each row is a window around the expected times.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sgl_jax.bench.trace.cache_only import Trace
from sgl_jax.bench.trace.reading import TracedRequest
from sgl_jax.mem_cache.eviction.path_records import PAUSE_S, PathEnd, PathRecords
from sgl_jax.mem_cache.tree_node import TreeNode

# Paths expected sooner stay on the device.
LEAST_PAUSE_S = 20.0
WINDOWS = ((0.9, 1.1), (0.8, 1.25), (0.5, 2.0))


class ReturnsRow(NamedTuple):
    """Paths expected back after `LEAST_PAUSE_S` or more, and those fetched at the window's start
    and given up at its end."""

    window: tuple[float, float]  # parts of the expected pause
    num_paths: int
    num_before: int  # returned before the window, so they are not fetched
    num_inside: int  # returned in it
    block_seconds: float  # held per path that returned in it

    @property
    def used_share(self) -> float:
        return self.num_inside / max(self.num_paths - self.num_before, 1)


def return_rows(trace: Trace, sigma: float | None = None) -> list[ReturnsRow]:
    """Return a row for each window. With `sigma`, clients forecast each pause, times a lognormal
    factor with this deviation."""
    pauses = np.array(list(_pauses(trace, sigma)))
    expected, real, blocks = pauses[pauses[:, 0] >= LEAST_PAUSE_S].T
    rows = []
    for window in WINDOWS:
        begin, end = window[0] * expected, window[1] * expected
        is_fetched = real >= begin
        num_inside = int((is_fetched & (real <= end)).sum())
        held = ((np.minimum(real, end) - begin) * blocks)[is_fetched].sum()
        num_before = int((~is_fetched).sum())
        each = held / max(num_inside, 1)
        rows.append(ReturnsRow(window, len(real), num_before, num_inside, each))
    return rows


def _pauses(trace: Trace, sigma: float | None) -> Iterator[tuple[float, float, int]]:
    """Yield the expected and the real seconds of each pause, and the blocks of its path."""
    rng, records, turns = random.Random(0), PathRecords(), dict[str, list[TracedRequest]]()
    for request in trace:
        if request.agent is not None:
            turns.setdefault(request.agent, []).append(request)
    leaf = TreeNode(0, np.zeros(0, np.int32), None, 0, child_key=b"", namespace="")
    for agent, own in turns.items():
        arrived_s = 0.0
        for turn, following in pairwise(own):
            pause_s = following.think_s
            forecast_s = None if sigma is None else pause_s * rng.lognormvariate(0.0, sigma)
            end = PathEnd(turn.input_len, arrived_s, turn.stop == "end_turn", forecast_s)
            hashes = np.array(turn.block_ids, np.int64)
            found = records.ended(
                hashes, len(hashes), leaf, end._replace(agent=("", agent)), arrived_s + 1.0
            )
            yield float(PAUSE_S[found.return_class]), pause_s, len(hashes)
            arrived_s += 1.0 + pause_s  # the time of an answer does not matter


def returns_table(rows: list[ReturnsRow]) -> str:
    lines = ["window          back before it   of the rest used   block-seconds each"]
    for row in rows:
        begin, end = row.window
        lines.append(
            f"{begin:>5.2f} to {end:<5.2f} {row.num_before / row.num_paths:>15.2f} "
            f"{row.used_share:>18.2f} {row.block_seconds:>20,.0f}"
        )
    return "\n".join(lines)
