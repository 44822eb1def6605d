"""An operator's calls to a running engine: pauses, other weights, other settings, traces.

Each is done between two turns of the loop. Changes to requests are events of the scheduler, so that
a recording has them.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sgl_jax.core.calls import GenerationState, SettingsChanged, Traced, WeightsUpdated
from sgl_jax.core.messages import (
    AbortRequest,
    ContinueGeneration,
    PauseGeneration,
    Reply,
    SetInternalState,
    StartProfile,
    StopProfile,
    UpdateWeightsFromDisk,
)
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.watchdog import Watchdog
from sgl_jax.executor.model_executor import ModelExecutor, WeightsError
from sgl_jax.models.config_fields import ModelConfigError
from sgl_jax.scheduler.record.events import Configure, Flush, Pause, Resume, RetractAll
from sgl_jax.scheduler.scheduler import Scheduler

# Settings that nothing was compiled or sized for, but for the chunk, which may be smaller.
CHANGEABLE = (
    "schedule_policy",
    "load_balance_method",
    "waiting_timeout",
    "request_timeout",
    "priority_scheduling_preemption_threshold",
    "chunked_prefill_size",
)
_WORDS = {str: "text", int: "a whole number", float: "a number"}


class Controlled(Protocol):
    """The parts of an `EngineCore` that its controls use."""

    args: ServerArgs
    info: dict[str, Any]
    executor: ModelExecutor
    scheduler: Scheduler
    watchdog: Watchdog

    def settle(self) -> None: ...

    def change_info(self, **facts: Any) -> None: ...


class Controls:
    """Handles each `ControlMessage` of `core` between two turns of its loop."""

    def __init__(self, core: Controlled) -> None:
        self._core = core

    def pause(self, message: PauseGeneration) -> Reply:
        """Launch nothing more; launched steps still give their tokens."""
        self._core.settle()
        self._core.scheduler.handle(Pause(message.mode))
        return self._tell_generation(message)

    def resume(self, message: ContinueGeneration) -> Reply:
        """Launch steps again."""
        self._core.scheduler.handle(Resume())
        return self._tell_generation(message)

    def _tell_generation(self, message: PauseGeneration | ContinueGeneration) -> Reply:
        scheduler = self._core.scheduler
        self._core.change_info(is_paused=scheduler.is_paused)
        now = GenerationState(scheduler.is_paused, scheduler.num_running, scheduler.num_waiting)
        return answer(message, now)

    def update_weights(self, message: UpdateWeightsFromDisk) -> Reply:
        """Load other weights between two steps; requests go on, also if the load fails."""
        path = message.model_path
        try:
            self._core.executor.check_model(path)
        except ModelConfigError as error:
            return refusal(message, str(error), code="other_model", param="model_path")
        except (OSError, ValueError) as error:  # no file can have such a name
            return refusal(message, str(error), code="weights_refused", param="model_path")
        self._core.settle()
        num_running = 0 if message.abort_all_requests else self._core.scheduler.num_running
        give_up_kv = self._give_up_kv if message.flush_cache else None
        try:
            with self._core.watchdog.patience():
                self._core.executor.update_weights(path, give_up_kv)
        except WeightsError as error:
            return refusal(message, str(error), code="weights_refused", param="model_path")
        if message.abort_all_requests:
            ended = AbortRequest(abort_all=True, message="the weights were updated")
            self._core.scheduler.handle(ended)
        if give_up_kv is not None:
            give_up_kv()
        self._core.change_info(model_path=path)
        text = f"serving the weights in {path!r}"
        return answer(message, WeightsUpdated(True, text, num_running))

    def _give_up_kv(self) -> None:
        """Retract all requests and empty all caches: their KV is of other weights, or must go."""
        self._core.scheduler.handle(RetractAll())
        self._core.scheduler.handle(Flush())

    def set_settings(self, message: SetInternalState) -> Reply:
        """All that are named, or none."""
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
        core.args = args
        chunk = args.chunked_prefill_size or most
        core.scheduler.handle(Configure(args.for_scheduler(), chunk))
        core.change_info(settings=core.info["settings"] | changes)
        return answer(message, SettingsChanged(updated=True, server_args=changes))

    def start_profile(self, message: StartProfile) -> Reply:
        """Trace the devices; a folder that was made for it goes if that is refused."""
        folder = message.output_dir or tempfile.mkdtemp(prefix="sgl_jax-profile-")
        try:
            self._core.executor.profiler.start(Path(folder), message.num_steps)
        except (RuntimeError, OSError, ValueError) as error:
            if message.output_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
            param = None if isinstance(error, RuntimeError) else "output_dir"
            return refusal(message, str(error), code="profile_refused", param=param)
        return answer(message, Traced(folder))

    def stop_profile(self, message: StopProfile) -> Reply:
        try:
            folder = self._core.executor.profiler.stop()
        except (RuntimeError, OSError) as error:
            return refusal(message, str(error), code="profile_refused")
        return answer(message, Traced(str(folder)))


def _checked(name: str, value: Any) -> Any:
    """The value of a setting that may change. Raises ValueError for another, or another type."""
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


def answer(message: Any, data: Any) -> Reply:
    return Reply(rid=message.rid, ok=True, data=msgspec.to_builtins(data))


def refusal(message: Any, why: str, **data: Any) -> Reply:
    """Why not; `data` as in `Reply`."""
    return Reply(rid=message.rid, ok=False, message=why, data=data)
