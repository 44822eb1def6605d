"""Bytes and time that a decode step costs host 0 of an engine on several hosts.

    python -m benchmarks.hosts.channel --hosts 8 --ranks 8 --rows 256

Each other host is a process on this machine's loopback, which receives and decodes every command.
Host 0 has one core for itself, and the others share the rest.
With `--stopped`, one of them is stopped before the steps: sending must not wait for it.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import threading
import time
from typing import Any

import numpy as np

from sgl_jax.core.array_codec import make_encoder
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.progress import Progress
from sgl_jax.core.step_plan import RankPlan, StepPlan
from sgl_jax.hosts.commands import End, Launch
from sgl_jax.hosts.follower_link import FollowerLink
from sgl_jax.hosts.group import HostGroup
from sgl_jax.hosts.leader_link import LeaderLink

_KEY = "the key of the benchmark's hosts"
_CONTEXT = 131_072
_PAGE_SIZE = 16
_STEP_S = 0.01  # between two steps, as on chips
_TIMEOUT_S = 60.0


def main() -> None:
    """Print bytes a host and step, and the microseconds that `send` takes.

    Processor time is shown too: with more processes than cores, a send is often interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of each rank")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--port", type=int, default=15000)
    parser.add_argument("--stopped", action="store_true", help="stop one host before the steps")
    args = parser.parse_args()
    first, *rest = sorted(os.sched_getaffinity(0))
    plans = [_plan(args.ranks, args.rows, step) for step in range(args.steps)]
    size = len(make_encoder().encode(Launch(plans[0])))
    leader = LeaderLink(_group(args, 0), _KEY, _TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_follow, args=(_group(args, rank), rest), daemon=True)
        for rank in range(1, args.hosts)
    ]
    for process in others:
        process.start()
    os.sched_setaffinity(0, {first})
    leader.meet({}, _TIMEOUT_S)
    if args.stopped:
        os.kill(_pid(others[0]), signal.SIGSTOP)
    seconds, own_seconds, all_s = [], [], -time.process_time()
    for plan in plans:
        begin_s, own_begin_s = time.perf_counter(), time.thread_time()
        leader.send(Launch(plan))
        own_seconds.append(time.thread_time() - own_begin_s)
        seconds.append(time.perf_counter() - begin_s)
        time.sleep(_STEP_S)
    all_s += time.process_time()
    if args.stopped:
        os.kill(_pid(others[0]), signal.SIGCONT)
    leader.close()
    print(f"{args.hosts} hosts, {args.ranks} x {args.rows} rows: {size} bytes a host and step")
    print("send, microseconds:", _summary(seconds))
    print("its processor time:", _summary(own_seconds))
    print(f"all threads of host 0: {1e6 * all_s / args.steps:.0f} a step, encryption among them")
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


def _group(args: argparse.Namespace, rank: int) -> HostGroup:
    return HostGroup(args.hosts, rank, "127.0.0.1", args.port)


def _follow(group: HostGroup, cores: list[int]) -> None:
    """A host that does nothing with its commands."""
    if cores:
        os.sched_setaffinity(0, cores)
    threading.current_thread().name = f"host {group.rank}"
    link = FollowerLink(group, _KEY, _TIMEOUT_S, Progress())
    link.meet({}, _TIMEOUT_S)
    while not isinstance(link.receive(0.2), End):
        continue
    link.end()
    link.close()


def _plan(num_ranks: int, num_rows: int, step: int) -> StepPlan:
    """A decode step of full ranks at the end of a long context; every sixteenth row has a new
    page, as each row has in every sixteenth step."""
    ones = np.ones(num_rows, np.int32)
    ranks = tuple(
        RankPlan(
            rows=np.arange(1, num_rows + 1, dtype=np.int32),
            kv_starts=(_CONTEXT - 1000 + step) * ones,
            q_lens=ones,
            samples=np.ones(num_rows, np.bool_),
            num_pages=_CONTEXT // _PAGE_SIZE,
            num_decode=num_rows,
            relayed=np.ones(num_rows, np.bool_),
        )
        for _ in range(num_ranks)
    )
    num_changes = num_ranks * num_rows // _PAGE_SIZE
    cells = np.arange(num_changes, dtype=np.intp) * (_CONTEXT // _PAGE_SIZE)
    return StepPlan(step, ranks, PageChanges(cells, np.arange(num_changes, dtype=np.int32)))


if __name__ == "__main__":
    main()
