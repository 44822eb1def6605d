"""The processor time that other processes of the machine use while something is measured."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


class OtherLoad:
    """`num_cores`: cores used, on average, by processes outside this one's tree."""

    num_cores = 0.0


@contextmanager
def measure_others() -> Iterator[OtherLoad]:
    """Measure during a `with` block; the result is set when the block ends."""
    load, begun_at, before_s = OtherLoad(), time.monotonic(), _others_s()
    yield load
    load.num_cores = (_others_s() - before_s) / (time.monotonic() - begun_at)


def _others_s() -> float:
    machine = psutil.cpu_times()
    busy_s = machine.user + machine.system + getattr(machine, "steal", 0.0)
    busy_s += getattr(machine, "nice", 0.0)
    root = psutil.Process()
    return busy_s - sum(_used_s(process) for process in [root, *root.children(recursive=True)])


def _used_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])  # those of ended children included
    except psutil.NoSuchProcess:
        return 0.0
