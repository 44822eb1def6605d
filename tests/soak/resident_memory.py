"""Does the memory of the server's processes grow? Samples, and what they say."""

from statistics import median
from typing import NamedTuple

import psutil

MAX_GROWTH_SHARE = 0.03
MAX_GROWTH_BYTES = 20 << 20
# Fewer say nothing.
MIN_SAMPLES = 6
_WARM_UP_SHARE = 1 / 3
_MOST_WARM_UP_S = 300.0


class Sample(NamedTuple):
    """Resident bytes of each process, `at_s` seconds into the soak."""

    at_s: float
    rss_bytes: dict[str, int]


class ResidentMemory:
    """The processes of one server: the one that speaks HTTP, and those it started."""

    def __init__(self, pid: int) -> None:
        front = psutil.Process(pid)
        self._processes = {"server": front}
        # Text workers come and go, and with faults so does the process that they are forked from.
        children = [c for c in front.children() if "sgl_jax.text.worker" not in c.cmdline()]
        for i, child in enumerate(children):
            self._processes["engine" if i == 0 else f"engine {i}"] = child
        self.samples: list[Sample] = []

    def sample(self, at_s: float) -> None:
        """Note what each process holds now. Raises psutil.NoSuchProcess if one has ended."""
        sizes = {name: process.memory_info().rss for name, process in self._processes.items()}
        self.samples.append(Sample(at_s, sizes))

    @property
    def mib(self) -> dict[str, float]:
        """Of the last sample."""
        return {name: size / (1 << 20) for name, size in self.samples[-1].rss_bytes.items()}

    def growth(self) -> dict[str, tuple[int, int]]:
        """Median bytes of the first and of the last third of the samples after a warm-up.

        Caches fill and allocators find their level in the warm-up: the first third of the soak,
        or five minutes. Empty if there are too few samples.
        """
        if not self.samples:
            return {}
        warm_up_s = min(_MOST_WARM_UP_S, self.samples[-1].at_s * _WARM_UP_SHARE)
        warm = [sample for sample in self.samples if sample.at_s >= warm_up_s]
        if len(warm) < MIN_SAMPLES:
            return {}
        third = len(warm) // 3

        def level(samples: list[Sample], name: str) -> int:
            return int(median(sample.rss_bytes[name] for sample in samples))

        return {
            name: (level(warm[:third], name), level(warm[-third:], name))
            for name in self._processes
        }


def is_growing(before: int, after: int) -> bool:
    """Whether a process that held `before` bytes and then `after` grows beyond the bounds."""
    return after - before > max(MAX_GROWTH_BYTES, MAX_GROWTH_SHARE * before)
