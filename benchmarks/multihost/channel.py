"""Bytes and time that a decode step costs host 0 of an engine on several hosts.

    python -m benchmarks.multihost.channel --hosts 8 --ranks 8

The scheduler plans decode steps of 256 rows per rank, as in a busy engine, and each is sent. Each
other host is a process on this machine's loopback, which receives and decodes every command. Host 0
has a core to itself, and the other processes share the rest. With `--stopped`, one of them is
stopped before the steps: sending must not wait for it.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import threading
import time
from typing import Any

from benchmarks.host.steps import ROWS_PER_RANK, decoding_loop
from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.core.array_codec import make_encoder
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.progress import Progress
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.multihost.commands import End, Launch
from sgl_jax.multihost.coordinator_link import CoordinatorLink
from sgl_jax.multihost.group import MultihostGroup
from sgl_jax.multihost.worker_link import WorkerLink

_KEY = "the key of the benchmark's hosts"
_CONTEXT = 131_072
_PAGE_SIZE = 16
_STEP_S = 0.01  # between two steps, as on chips
_TIMEOUT_S = 60.0


class _SendingExecutor(FakeExecutor):
    """Sends each plan, once it has a `coordinator`."""

    def __init__(self, sizes: EngineSizes) -> None:
        super().__init__(sizes)
        self.coordinator: CoordinatorLink | None = None
        self.last_plan: StepPlan | None = None
        self.seconds: list[float] = []
        self.own_seconds: list[float] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        self.last_plan = plan
        if self.coordinator is not None:
            begin_s, own_begin_s = time.perf_counter(), time.thread_time()
            self.coordinator.send(Launch(plan))
            self.own_seconds.append(time.thread_time() - own_begin_s)
            self.seconds.append(time.perf_counter() - begin_s)
        return super().launch(plan)


def main() -> None:
    """Print bytes a host and step, and the microseconds that `send` takes.

    Processor time is shown too: with more processes than cores, a send is often interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--port", type=int, default=15000)
    parser.add_argument("--stopped", action="store_true", help="stop one host before the steps")
    args = parser.parse_args()
    first, *rest = sorted(os.sched_getaffinity(0))
    loop = decoding_loop(_PAGE_SIZE, args.ranks, _SendingExecutor, max_context_len=_CONTEXT)
    executor = loop.executor
    assert isinstance(executor, _SendingExecutor)
    coordinator = CoordinatorLink(_group(args, 0), _KEY, _TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_follow, args=(_group(args, rank), rest), daemon=True)
        for rank in range(1, args.hosts)
    ]
    for process in others:
        process.start()
    os.sched_setaffinity(0, {first})
    coordinator.meet({}, _TIMEOUT_S)
    if args.stopped:
        os.kill(_pid(others[0]), signal.SIGSTOP)
    executor.coordinator, all_s = coordinator, -time.process_time()
    for _ in range(args.steps):
        loop.turn()
        time.sleep(_STEP_S)
    all_s += time.process_time()
    if args.stopped:
        os.kill(_pid(others[0]), signal.SIGCONT)
    coordinator.close()
    load = f"{args.hosts} hosts, {args.ranks} x {ROWS_PER_RANK} rows"
    assert executor.last_plan is not None
    size = len(make_encoder().encode(Launch(executor.last_plan)))
    print(f"{load}: {size} bytes a host and step")
    print("send, microseconds:", _summary(executor.seconds))
    print("its processor time:", _summary(executor.own_seconds))
    print(f"all threads of host 0: {1e6 * all_s / args.steps:.0f} a step, planning among them")
    for process in others:
        process.join(_TIMEOUT_S)


def _summary(seconds: list[float]) -> str:
    micros = sorted(1e6 * each for each in seconds)
    return (
        f"median {statistics.median(micros):.0f}, mean {statistics.mean(micros):.0f}, "
        f"p99 {micros[int(0.99 * len(micros))]:.0f}, largest {micros[-1]:.0f}"
    )


def _pid(process: Any) -> int:
    pid: int = process.pid
    return pid


def _group(args: argparse.Namespace, rank: int) -> MultihostGroup:
    return MultihostGroup(args.hosts, rank, "127.0.0.1", args.port)


def _follow(group: MultihostGroup, cores: list[int]) -> None:
    """Receive and discard commands until the group ends, as a host that does no work."""
    if cores:
        os.sched_setaffinity(0, cores)
    threading.current_thread().name = f"host {group.rank}"
    link = WorkerLink(group, _KEY, _TIMEOUT_S, Progress())
    link.meet({}, _TIMEOUT_S)
    while not isinstance(link.receive(0.2), End):
        continue
    link.end()
    link.close()


if __name__ == "__main__":
    main()
