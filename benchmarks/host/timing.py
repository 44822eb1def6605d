"""Measured times, and the lines of the table they are printed in."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Timing(NamedTuple):
    """One line of the table: `num_ops` operations took `seconds`, one sample for each repeat."""

    name: str
    seconds: list[float]
    num_ops: int

    def line(self) -> str:
        """Return median and longest time in microseconds, and median operations per second."""
        middle, longest = median(self.seconds), max(self.seconds)
        times = f"{middle * 1e6:>11,.1f} {longest * 1e6:>11,.1f}"
        return f"{self.name:<62} {times} {self.num_ops / middle:>13,.0f}"


HEADER = f"{'':<62} {'us, median':>11} {'us, worst':>11} {'operations/s':>13}"


def timed(name: str, call: Callable[[], object], *, repeats: int, num_ops: int = 1) -> Timing:
    """Call `call` once to warm up, then time `repeats` calls."""
    call()
    return Timing(name, [timed_once(call) for _ in range(repeats)], num_ops)


def timed_once(call: Callable[[], object]) -> float:
    """Return the processor seconds of this thread that one call took."""
    start = time.thread_time()
    call()
    return time.thread_time() - start
