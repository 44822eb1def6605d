"""Host 0's executor of an engine on several hosts: it runs each step on all of them.

Only host 0 has a scheduler. All hosts run the same sequence of programs, so their collectives
match. Results are the same on every host, and host 0 reads its local results.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_messages import HostFigures, HostReport
from sgl_jax.core.errors import GroupError
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import Int32Array, RankResult, StepPlan
from sgl_jax.core.transfers import Transfers
from sgl_jax.executor.devices import join_hosts, leave_hosts
from sgl_jax.executor.expert_recorder import ExpertRecorder
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.plan_check import check_plan
from sgl_jax.executor.profiler import Profiler
from sgl_jax.multihost.commands import CallExecutor, Command, Draw, Launch, MovePages, RankMasks
from sgl_jax.multihost.coordinator_link import CoordinatorLink
from sgl_jax.multihost.description import describe_host
from sgl_jax.multihost.group import group_key, group_of


class GroupExecutor(ModelExecutor):
    """A `ModelExecutor` that sends each use of the devices as a command to the other hosts first.

    Before `warm_up` has ended it sends none, because every host loads and warms up independently.
    """

    def __init__(self, args: ServerArgs, progress: Progress | None = None) -> None:
        """Connect to the other hosts, then load as they do. Raises GroupError if that fails."""
        group = group_of(args)
        self._link = CoordinatorLink(group, group_key(args), args.host_timeout)
        self._is_leading = False
        self._figures = HostFigures()
        self._launched_s: deque[float] = deque()
        self._link.meet(describe_host(args), args.dist_timeout)
        join_hosts(args, group.address, group.port + 1)
        super().__init__(args, progress)
        recorder = _GroupRecorder(self._expert_counts)
        self.profiler, self.expert_recorder = _GroupProfiler(), recorder
        self.profiler.send = recorder.send = self._send

    def on_leaving(self, call: Callable[[int], object]) -> None:
        """Call `call` with the rank of a host that gets a signal to end, on another thread."""
        self._link.on_leaving = call

    def host_reports(self) -> list[HostReport]:
        return [HostReport(0, self._figures), *self._link.reports()]

    def warm_up(self) -> None:
        super().warm_up()
        self._is_leading = True

    def background_end(self) -> str | None:
        ends = [super().background_end(), *self._link.background_ends]
        return None if None in ends else next(filter(None, ends), "")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        check_plan(plan, self.sizes)  # before sending it to any host
        begin_s = time.monotonic()
        self._send(Launch(plan))
        with step_errors():
            launched = super().launch(plan)
        self._launched_s.append(begin_s)
        self._figures = self._figures.plus(launch_s=time.monotonic() - begin_s)
        return launched

    def _draw(self, handle: LaunchedStep, masks: Sequence[Int32Array]) -> None:
        if self._is_leading:
            self._send(Draw([_without_free_rows(own) for own in masks]))
        with step_errors():
            super()._draw(handle, masks)

    def result(self, handle: LaunchedStep) -> tuple[RankResult, ...]:
        with step_errors():
            results = super().result(handle)
        step_s = time.monotonic() - self._launched_s.popleft()
        self._figures = self._figures.plus(num_steps=1, step_s=step_s)
        return results

    def transfer(self, transfers: Transfers) -> None:
        self._send(MovePages(transfers))
        with step_errors():
            super().transfer(transfers)

    def reset(self) -> None:
        self._launched_s.clear()
        self._send(CallExecutor("reset"))
        super().reset()

    def update_weights(
        self, model_path: str, give_up_kv: Callable[[], object] | None = None
    ) -> None:
        self._send(CallExecutor("update_weights", [model_path, give_up_kv is not None]))
        super().update_weights(model_path, give_up_kv)

    def close(self) -> None:
        super().close()
        self._link.close()
        leave_hosts()

    def _send(self, command: Command) -> None:
        if self._is_leading:
            self._link.send(command)


@contextmanager
def step_errors() -> Iterator[None]:
    """Convert errors of a step to GroupErrors: usually another host has ended. Otherwise the step
    may not have failed on the other hosts, so the hosts no longer agree."""
    try:
        yield
    except Exception as error:  # of any type
        raise GroupError(f"a step failed on this host: {error}") from error


def _without_free_rows(masks: Int32Array) -> RankMasks:
    """Drop rows that allow all tokens from one rank's masks, int32[rows, 1 + drafts, words]."""
    rows = np.flatnonzero((masks != -1).any(axis=(1, 2))).astype(np.int32)
    return RankMasks(len(masks), rows, masks[rows])


def with_free_rows(ranks: Sequence[RankMasks]) -> list[Int32Array]:
    """Return every rank's masks, int32[rows, 1 + drafts, words], from `_without_free_rows`."""
    masks = [np.full((own.num_rows, *own.masks.shape[1:]), -1, np.int32) for own in ranks]
    for full, own in zip(masks, ranks, strict=True):
        full[own.rows] = own.masks
    return masks


class _GroupProfiler(Profiler):
    """Every host writes a trace, into the same path of its local disk."""

    send: Callable[[Command], object]

    def start(self, folder: Path, num_steps: int | None = None) -> None:
        super().start(folder, num_steps)
        self.send(CallExecutor("start_profile", [str(folder), num_steps]))

    def stop(self) -> Path:
        folder = super().stop()
        self.send(CallExecutor("stop_profile"))
        return folder


class _GroupRecorder(ExpertRecorder):
    """Counts are read by a program that all hosts run."""

    send: Callable[[Command], object]

    def start(self) -> None:
        self.send(CallExecutor("start_expert_record"))
        super().start()

    def stop(self) -> None:
        self.send(CallExecutor("stop_expert_record"))
        super().stop()

    def counts(self) -> NDArray[np.int64]:
        self.send(CallExecutor("read_expert_record"))
        return super().counts()
