"""A record of how often the routers of a model's layers chose each expert.

Steps count on the device and never reset the counts: a record is a difference, and the step program
needs no switch. Counts are 32 bits and wrap: a record is correct if the tokens of no rank chose one
expert of one layer 2**32 times.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# uint32[ranks, layers, experts] counts so far; None: the programs do not count.
ReadCounts = Callable[[], NDArray[np.uint32] | None]


class ExpertRecorder:
    """Records experts, one record at a time."""

    def __init__(self, read: ReadCounts) -> None:
        self._read = read
        self._before: NDArray[np.uint32] | None = None  # None: nothing is recorded
        self._recorded: NDArray[np.int64] | None = None

    def start(self) -> None:
        """Start a record. Raises RuntimeError if one is running, or nothing is counted."""
        if self._before is not None:
            raise RuntimeError("a record of experts runs already")
        self._before = self._read()
        if self._before is None:
            raise RuntimeError(
                "experts are counted only with --expert-distribution-recorder-mode stat"
            )

    def stop(self) -> None:
        """End the record. Raises RuntimeError if none is running."""
        if self._before is None:
            raise RuntimeError("no record of experts runs")
        self._recorded, self._before = self.counts(), None

    def counts(self) -> NDArray[np.int64]:
        """Return int64[layers, experts] of the current or last record: prompt and output tokens
        that chose each expert, without cached tokens. Raises RuntimeError if there was no record.
        """
        if self._before is None:
            if self._recorded is None:
                raise RuntimeError("no experts were recorded")
            return self._recorded
        now = self._read()
        assert now is not None
        counts: NDArray[np.int64] = (now - self._before).sum(axis=0, dtype=np.int64)
        return counts

    def after_reset(self) -> None:
        """Continue a record after the devices have lost its counts so far."""
        if self._before is not None:
            self._before = np.zeros_like(self._before)
