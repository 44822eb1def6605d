"""The engine loop of every host except host 0: it runs host 0's commands on this host's devices.

It has no scheduler and no memory stack. It reads the result of each step only to bound the steps in
flight and to measure their time.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sgl_jax.core.engine_messages import Heartbeat
from sgl_jax.core.messages import Shutdown
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.watchdog import Watchdog
from sgl_jax.executor.devices import join_hosts, leave_hosts
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.weights import WeightsError
from sgl_jax.multihost.commands import CallExecutor, Command, Draw, End, Launch, MovePages
from sgl_jax.multihost.description import describe_host
from sgl_jax.multihost.group import group_key, group_of
from sgl_jax.multihost.group_executor import step_errors, with_free_rows
from sgl_jax.multihost.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.2
_BUSY_POLL_S = 0.001
_MAX_IN_FLIGHT = 2  # host 0 launches no more before it reads a result


class WorkerCore:
    """A `Core` (engine/process.py) driven by host 0's commands; `info` is the executor's."""

    def __init__(self, args: ServerArgs, progress: Progress | None = None) -> None:
        """Connect to host 0, load this host's part of the weights, and compile.

        Raises GroupError if host 0 does not respond in time or refuses this host.
        """
        self._args = args
        self._progress = progress or Progress()
        group = group_of(args)
        self._link = WorkerLink(group, group_key(args), args.host_timeout, self._progress)
        self._link.meet(describe_host(args), args.dist_timeout)
        with self._reporting():
            join_hosts(args, group.address, group.port + 1)
            self._executor = ModelExecutor(args, self._progress)
            self._executor.warm_up()
            self._executor.start_background()
        self.info: dict[str, Any] = self._executor.info
        self._in_flight: deque[tuple[LaunchedStep, float]] = deque()  # with its arrival
        executor, recorder = self._executor, self._executor.expert_recorder
        self._calls: dict[str, Callable[..., object]] = {
            "reset": self._reset,
            "update_weights": self._update_weights,
            "start_profile": lambda folder, steps: executor.profiler.start(Path(folder), steps),
            "stop_profile": executor.profiler.stop,
            "start_expert_record": recorder.start,
            "stop_expert_record": recorder.stop,
            "read_expert_record": recorder.counts,
        }

    def run(self, channel: Channel, *, after_turn: Callable[[bool], object] | None = None) -> None:
        """Run host 0's commands until it sends `End`."""

        def beat(heartbeat: Heartbeat) -> None:
            channel.send(msgspec.structs.replace(heartbeat, figures=self._link.figures))

        watchdog = Watchdog(beat, self._progress, self._args.watchdog_timeout)
        has_left = False
        with watchdog, self._reporting():
            while True:
                watchdog.feed()
                command = self._link.receive(_BUSY_POLL_S if self._in_flight else _IDLE_POLL_S)
                if isinstance(command, End):
                    break
                if command is not None:
                    is_call = isinstance(command, CallExecutor)
                    with watchdog.patience() if is_call else step_errors():
                        self._run(command)
                with step_errors():
                    self._read_results(is_forced=len(self._in_flight) > _MAX_IN_FLIGHT)
                self._link.background_end = self._executor.background_end()
                if not has_left and any(isinstance(each, Shutdown) for each in channel.poll(0.0)):
                    has_left = True
                    self._link.leave()
                if after_turn is not None:
                    after_turn(command is None and not self._in_flight)
        self._executor.close()
        leave_hosts()
        self._link.end()
        self._link.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error inside the context to host 0, which ends the group with the reason."""
        try:
            yield
        except Exception as error:
            self._link.fail(f"{type(error).__name__}: {error}")
            self._link.close()
            raise

    def _run(self, command: Command) -> None:
        match command:
            case Launch(plan=plan):
                arrived_s = time.monotonic()
                self._in_flight.append((self._executor.launch(plan), arrived_s))
                self._link.figures = self._link.figures.plus(launch_s=time.monotonic() - arrived_s)
            case MovePages(transfers=transfers):
                self._executor.transfer(transfers)
                self._executor.ended_transfers()  # dropped: host 0 reports its transfers itself
            case Draw(ranks=ranks):
                self._executor.draw(self._in_flight[-1][0], with_free_rows(ranks))
            case CallExecutor(name=name, args=args):
                try:
                    self._calls[name](*args)
                except (RuntimeError, OSError, WeightsError) as error:
                    # Host 0 was refused in the same way, or only this host fails to write a trace.
                    logger.warning("%s: %s", name, error)

    def _read_results(self, *, is_forced: bool) -> None:
        """Read the results of ended steps. With `is_forced`, wait for the oldest."""
        while self._in_flight:
            handle, arrived_s = self._in_flight[0]
            if not (is_forced or handle.has_ended):
                return
            self._executor.result(handle)
            self._in_flight.popleft()
            self._link.figures = self._link.figures.plus(
                num_steps=1, step_s=time.monotonic() - arrived_s
            )
            is_forced = False

    def _reset(self) -> None:
        self._in_flight.clear()
        self._executor.reset()

    def _update_weights(self, model_path: str, may_give_up_kv: bool) -> None:
        while self._in_flight:
            self._read_results(is_forced=True)
        self._executor.update_weights(model_path, (lambda: None) if may_give_up_kv else None)
