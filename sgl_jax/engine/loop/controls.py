"""Handles calls to a running engine: sessions, memory, caches, pauses, weights, settings, traces.

Each call runs between two turns of the engine loop. It changes requests only through scheduler
events, so a recording contains the changes.
"""

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sgl_jax.core import calls, messages, profile_messages
from sgl_jax.core.engine_messages import Reply, answer, refusal
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.weight_messages import WeightMessage
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.loop.saved_cache import CacheSaver
from sgl_jax.engine.loop.weight_updates import UpdatedEngine, WeightUpdates
from sgl_jax.executor.expert_recorder import ExpertRecorder
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.scheduler.events import Configure, Flush, Pause, Resume, RetractAll
from sgl_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

NOT_AWAITED = "its caller no longer waits"
# No program or buffer depends on these settings, except for the chunk size, which may only shrink.
CHANGEABLE = (
    "schedule_policy",
    "load_balance_method",
    "waiting_timeout",
    "request_timeout",
    "priority_scheduling_preemption_threshold",
    "chunked_prefill_size",
)
# Upper bound on calls without a reply (`Frontend.call`), so older calls can no longer be cancelled.
_MAX_STEPS = 1024
_FLUSH_LIMIT_S = 20.0  # after which a waiting flush is refused
_WORDS = {str: "text", int: "a whole number", float: "a number"}


class Controlled(UpdatedEngine, Protocol):
    """The parts of `EngineCore` that `Controls` uses."""

    args: ServerArgs
    info: dict[str, Any]
    channel: Channel

    def state(self) -> dict[str, Any]: ...


class CallUndo:
    """The last call that changed each subject (for example a session), with its undo step."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, Callable[[], object]]] = {}

    def note(self, rid: str, subject: str, undo: Callable[[], object]) -> None:
        self._steps.pop(subject, None)
        self._steps[subject] = rid, undo
        if len(self._steps) > _MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def undo(self, rid: str) -> None:
        """Undo call `rid`, unless it changed nothing or its subject has changed since."""
        for subject, (noted, undo) in self._steps.items():
            if noted == rid:
                del self._steps[subject]
                undo()
                return


class PendingFlushes:
    """The flushes that wait until no prefix is being written to the store.

    Attributes:
        calls: the calls without a reply, each with its deadline by `time.monotonic()`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.calls: list[tuple[messages.FlushCache, float]] = []

    def add(self, message: messages.FlushCache) -> None:
        self.calls.append((message, time.monotonic() + _FLUSH_LIMIT_S))

    def take(self, rid: str) -> list[messages.FlushCache]:
        taken = [message for message, _ in self.calls if message.rid == rid]
        self.calls = [each for each in self.calls if each[0].rid != rid]
        return taken

    def answer_all(self, send: Callable[[Reply], object], defect_text: str) -> None:
        """Flush if that is possible now, and reply to the calls that need not wait any longer.

        If the flush finds a defect of the memory, all calls are refused with `defect_text` and
        `MemoryDefectError` is raised.
        """
        # Removed first, so that a flush that finds a defect of the memory is not repeated.
        pending, self.calls = self.calls, []
        if self._scheduler.is_paused:  # paused requests compute their KV again
            self._scheduler.handle(RetractAll())
        is_running = self._scheduler.num_running > 0
        may_flush = not is_running and not self._scheduler.offload.is_moving_out
        try:
            is_flushed = may_flush and self._scheduler.handle(Flush())
        except MemoryDefectError:
            for message, _ in pending:
                send(refusal(message, defect_text, status_code=500))
            raise
        if is_flushed:
            for message, _ in pending:
                send(answer(message, calls.Flushed()))
            return
        what = "requests are running" if is_running else "the store still writes prefixes"
        now_s = time.monotonic()
        for message, until_s in pending:
            if is_running or until_s < now_s:
                send(refusal(message, f"{what}; the cache was not flushed", code="busy"))
            else:
                self.calls.append((message, until_s))


class Controls:
    """Handles the calls of the frontend to `core` between two turns of its loop.

    Attributes:
        flushes: the flushes that wait.
        updates: the updates of weights.
    """

    def __init__(self, core: Controlled, saver: CacheSaver | None) -> None:
        self._core = core
        self._saver = saver
        self._undo = CallUndo()  # with a step for each call with `Call.is_undone`
        self._memory_reader = MemoryReader(core.scheduler, core.executor.compile_counts)
        self.flushes = PendingFlushes(core.scheduler)
        self.updates = WeightUpdates(core)

    def handle(self, message: messages.CallMessage | messages.CancelCall) -> Reply | None:
        """Call the method that the message's record names. Return None if the reply comes later."""
        if isinstance(message, messages.SessionMessage):
            return self._call_sessions(message)
        handler = messages.CALL_OF[type(message)].handler
        if isinstance(message, messages.MemoryMessage):
            return self._read_memory(getattr(self._memory_reader, handler), message)
        owner = self.updates if isinstance(message, WeightMessage) else self
        reply: Reply | None = getattr(owner, handler)(message)
        return reply

    def cancel(self, message: messages.CancelCall) -> None:
        """Undo a call that its caller abandoned. `EngineCore.run` skips such calls that
        have not begun."""
        for flush in self.flushes.take(message.call):
            self._core.channel.send(refusal(flush, NOT_AWAITED))
        self._undo.undo(message.call)

    def _call_sessions(self, message: messages.SessionMessage) -> Reply:
        reply: Reply = self._core.scheduler.handle(message)
        if reply.ok and isinstance(message, messages.OpenSession | messages.ForkSession):
            opened = (
                message.new_session_id
                if isinstance(message, messages.ForkSession)
                else message.session_id
            )
            close = messages.CloseSession(session_id=opened)
            undo = partial(self._core.scheduler.handle, close)
            self._undo.note(message.rid, f"session {opened}", undo)
        return reply

    def flush(self, message: messages.FlushCache) -> Reply | None:
        """Queue a flush of the prefix caches. The reply is sent once nothing runs and no prefix is
        being written to the store, at the earliest in this turn of the loop."""
        self.flushes.add(message)
        return None

    def save_cache(self, message: messages.SaveCache) -> Reply | None:
        """Save the cache on another thread. The reply is sent when the save has ended."""
        if self._saver is None:
            return refusal(message, "there is no --restore-cache to save to", code="no_folder")

        def send_reply(saved: Future[int]) -> None:
            error = saved.exception()
            if error is None:
                self._core.channel.send(answer(message, calls.CacheSaved(saved.result())))
            else:
                logger.error("the cache could not be saved", exc_info=error)
                text = f"the cache could not be saved: {error}"
                self._core.channel.send(refusal(message, text, status_code=500))

        self._saver.save().add_done_callback(send_reply)
        return None

    def _read_memory(self, read: Callable[[Any], Any], message: messages.MemoryMessage) -> Reply:
        try:
            return answer(message, read(message))
        except InvalidRequestError as error:
            return refusal(message, str(error), param=error.param)
        except Exception as error:  # inconsistent records may raise anything
            logger.exception("the memory cannot be read")
            return refusal(message, f"the memory cannot be read: {error}", status_code=500)

    def read_state(self, message: messages.GetState) -> Reply:
        return answer(message, self._core.state())

    def pause(self, message: messages.PauseGeneration) -> Reply:
        """Launch no more steps. Tokens of launched steps are still sent."""
        was_paused = self._core.scheduler.is_paused and not self.updates.ends_pause
        self.updates.ends_pause = False
        self._core.steps.settle()
        self._core.scheduler.handle(Pause(message.mode))
        return self._generation_reply(message, was_paused)

    def resume(self, message: messages.ContinueGeneration) -> Reply:
        """Run steps again, if memory was released once it is there."""
        was_paused = self._core.scheduler.is_paused and not self.updates.ends_pause
        if self.updates.is_blocking:
            if self._core.executor.weights.is_mixed:
                text = "the weights are incomplete: generation continues after an update"
                return refusal(message, text, code="weights_incomplete")
            self.updates.ends_pause = True
        else:
            self._core.scheduler.handle(Resume())
        return self._generation_reply(message, was_paused)

    def _restore_pause(self, is_paused: bool) -> None:
        self._core.steps.settle()
        self.updates.ends_pause = self.updates.is_blocking and not is_paused
        is_paused = is_paused or self.updates.is_blocking
        self._core.scheduler.handle(Pause("in_place") if is_paused else Resume())
        self._core.change_info(is_paused=is_paused)

    def _generation_reply(
        self, message: messages.PauseGeneration | messages.ContinueGeneration, was_paused: bool
    ) -> Reply:
        self._undo.note(message.rid, "generation", partial(self._restore_pause, was_paused))
        scheduler = self._core.scheduler
        self._core.change_info(is_paused=scheduler.is_paused)
        now = calls.GenerationState(
            scheduler.is_paused, scheduler.num_running, scheduler.num_waiting
        )
        return answer(message, now)

    def set_settings(self, message: messages.SetInternalState) -> Reply:
        """Change all settings in `message`, or none if any of them is refused."""
        core, given = self._core, message.server_args
        most = core.executor.sizes.max_chunk_tokens
        try:
            changes = {name: _checked(name, value) for name, value in given.items()}
            chunk_tokens = changes.get("chunked_prefill_size", most)
            if not 1 <= chunk_tokens <= most:
                raise ValueError(
                    f"chunked_prefill_size must be in [1, {most}], for which the programs were "
                    f"compiled, got {chunk_tokens}"
                )
            args = dataclasses.replace(core.args, **changes)
        except (ValueError, OverflowError) as error:
            return refusal(message, str(error), code="not_changeable", param="server_args")
        self._undo.note(
            message.rid, "settings", partial(self._configure, core.args, core.info["settings"])
        )
        self._configure(args, core.info["settings"] | changes)
        return answer(message, calls.SettingsChanged(updated=True, server_args=changes))

    def _configure(self, args: ServerArgs, shown: dict[str, Any]) -> None:
        core = self._core
        core.args = args
        chunk = args.chunked_prefill_size or core.executor.sizes.max_chunk_tokens
        core.scheduler.handle(Configure(args.for_scheduler(), chunk))
        core.change_info(settings=shown)

    def start_profile(self, message: profile_messages.StartProfile) -> Reply:
        """Start a device trace. If it is refused, remove the temporary folder made for it."""
        folder = message.output_dir or tempfile.mkdtemp(prefix="sgl_jax-profile-")
        try:
            self._core.executor.profiler.start(Path(folder), message.num_steps)
        except (RuntimeError, OSError, ValueError) as error:
            if message.output_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
            param = None if isinstance(error, RuntimeError) else "output_dir"
            return refusal(message, str(error), code="profile_refused", param=param)
        return answer(message, calls.Traced(folder))

    def stop_profile(self, message: profile_messages.StopProfile) -> Reply:
        try:
            folder = self._core.executor.profiler.stop()
        except (RuntimeError, OSError) as error:
            return refusal(message, str(error), code="profile_refused")
        return answer(message, calls.Traced(str(folder)))

    def start_expert_record(self, message: profile_messages.StartExpertRecord) -> Reply:
        return self._with_recorder(message, lambda own: own.start())

    def stop_expert_record(self, message: profile_messages.StopExpertRecord) -> Reply:
        return self._with_recorder(message, lambda own: own.stop())

    def dump_expert_record(self, message: profile_messages.DumpExpertRecord) -> Reply:
        return self._with_recorder(message, lambda own: calls.ExpertRecord(own.counts().tolist()))

    def _with_recorder(self, message: Any, act: Callable[[ExpertRecorder], Any]) -> Reply:
        try:
            return answer(message, act(self._core.executor.expert_recorder) or calls.Done())
        except RuntimeError as error:
            return refusal(message, str(error), code="record_refused")


def _checked(name: str, value: Any) -> Any:
    """Convert `value` to the type of setting `name`. Raises ValueError if either is invalid."""
    if name not in CHANGEABLE:
        raise ValueError(
            f"{name} cannot be changed while the server runs; {', '.join(CHANGEABLE)} can"
        )
    (field,) = (field for field in dataclasses.fields(ServerArgs) if field.name == name)
    kind: Any = field.type
    is_kind = isinstance(value, str) if kind is str else isinstance(value, int | float)
    if not is_kind or kind(value) != value:
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}")
    return kind(value)
