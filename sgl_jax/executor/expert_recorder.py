"""A record of how often the routers of a model's layers chose each expert.

Steps count on the device, and never start from 0 again: so a record is a difference, and a step's
program needs no switch. Counts are of 32 bits, and wrap: a record is right if no rank's tokens
chose one expert of one layer 2**32 times.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# uint32 [ranks, layers, experts] so far; None: the programs do not count.
ReadCounts = Callable[[], NDArray[np.uint32] | None]


class ExpertRecorder:
    """At most one record at a time."""

    def __init__(self, read: ReadCounts) -> None:
        self._read = read
        self._before: NDArray[np.uint32] | None = None  # None: nothing is recorded
        self._recorded: NDArray[np.int64] | None = None

    def start(self) -> None:
        """Start a record. Raises RuntimeError if there is one, or nothing is counted."""
        if self._before is not None:
            raise RuntimeError("a record of experts runs already")
        self._before = self._read()
        if self._before is None:
            raise RuntimeError(
                "experts are counted with --expert-distribution-recorder-mode stat alone"
            )

    def stop(self) -> None:
        """End the record. Raises RuntimeError if there is none."""
        if self._before is None:
            raise RuntimeError("no record of experts runs")
        self._recorded, self._before = self.counts(), None

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts] of the record that runs, or of the last one: tokens that chose
        each expert, prompts and outputs alike, without cached ones. Raises RuntimeError if there
        was none."""
        if self._before is None:
            if self._recorded is None:
                raise RuntimeError("no experts were recorded")
            return self._recorded
        now = self._read()
        assert now is not None
        counts: NDArray[np.int64] = (now - self._before).sum(axis=0, dtype=np.int64)
        return counts

    def after_reset(self) -> None:
        """Continue a record without its counts so far, which the devices have lost."""
        if self._before is not None:
            self._before = np.zeros_like(self._before)
