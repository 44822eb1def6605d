"""Replaces the weights of a running engine, and releases the devices' memory for a while.

New weights come from a folder, or as tensors in messages.
Both ways end alike: launched steps are read, requests give up the KV of the old weights, and the
next step reads the new weights.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from sgl_jax.checkpoint.array_tensors import read_safetensors
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.core import calls
from sgl_jax.core.engine_messages import Reply, WeightsChanged, answer, refusal
from sgl_jax.core.messages import AbortRequest
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.weight_messages import (
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensor,
    UpdateWeightVersion,
)
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.loop.step_pipeline import StepPipeline
from sgl_jax.engine.watchdog import Watchdog
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.weights import WeightsError, WeightUpdate
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.models.config_fields import ModelConfigError
from sgl_jax.scheduler.events import NewWeights, Pause, Resume, TakeOutputs
from sgl_jax.scheduler.scheduler import Scheduler

_UpdateMessage = UpdateWeightsFromDisk | UpdateWeightsFromTensor

_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class UpdatedEngine(Protocol):
    """The parts of `EngineCore` that `WeightUpdates` uses."""

    args: ServerArgs
    executor: ModelExecutor
    scheduler: Scheduler
    steps: StepPipeline
    watchdog: Watchdog
    channel: Channel

    def give_up_store_writes(self) -> None: ...

    def change_info(self, **facts: Any) -> None: ...


class _Staging(NamedTuple):
    """A message whose tensors are being taken on the thread."""

    message: UpdateWeightsFromTensor
    update: WeightUpdate
    ended: Future[set[str]]


class WeightUpdates:
    """At most one update by tensors at a time, and updates from folders.

    Attributes:
        stagings: the messages whose tensors are taken on a thread, oldest first.
        is_blocking: weights or pools are missing: no step may run.
        ends_pause: steps run again after that: generation was not paused before or meanwhile.
    """

    def __init__(self, core: UpdatedEngine) -> None:
        self._core = core
        self._update: WeightUpdate | None = None
        self._version = ""
        self.stagings: list[_Staging] = []
        # One thread: tensors of an update are taken one message after another.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.is_blocking = False
        self.ends_pause = False
        self._has_no_pools = False

    def close(self) -> None:
        """Wait for the message that is being handled, and drop the messages after it."""
        self._pool.shutdown(cancel_futures=True)

    def from_disk(self, message: UpdateWeightsFromDisk) -> Reply:
        """Load other weights between two steps. Requests continue, even if loading fails."""
        path, core = message.model_path, self._core
        try:
            core.executor.check_model(path)
        except ModelConfigError as error:
            return refusal(message, str(error), code="other_model", param="model_path")
        except (OSError, ValueError) as error:  # not a valid path
            return refusal(message, str(error), code="weights_refused", param="model_path")
        self._settle()
        give_up_kv = None if message.keep_cache else self._give_up_kv
        num_running = core.scheduler.num_running
        try:
            with core.watchdog.patience():
                core.executor.update_weights(path, give_up_kv)
        except WeightsError as error:
            return refusal(message, str(error), code="weights_refused", param="model_path")
        version = path if message.weight_version is None else message.weight_version
        self._after_change(message, version, model_path=path)
        return self._updated(message, f"the weights in {path!r}", num_running)

    def from_tensors(self, message: UpdateWeightsFromTensor) -> Reply | None:
        """Take tensors. In mode staged a thread takes them while steps run, and the reply comes
        later."""
        core = self._core
        if core.args.num_hosts > 1:
            text = "weights from tensors need an engine on one host; use /update_weights_from_disk"
            return refusal(message, text, code="weights_refused")
        is_chunked = message.mode == "chunked"
        update = self._update
        if (
            update is None
            or message.is_first
            or update.is_chunked != is_chunked
            or message.weight_version != self._version
        ):
            update = core.executor.weights.begin_update(is_chunked=is_chunked)
            self._update, self._version = update, message.weight_version
        if not is_chunked:
            ended = self._pool.submit(_take, update, message)
            self.stagings.append(_Staging(message, update, ended))
            return None
        self._block()
        ended = Future[set[str]]()
        try:
            with core.watchdog.patience():
                ended.set_result(_take(update, message))
        except Exception as raised:
            ended.set_exception(raised)
        return self._taken(_Staging(message, update, ended))

    def answer_ended(self, defect_text: str) -> None:
        """Reply to the messages whose tensors were taken, and switch to weights that are complete.
        Called between two steps.

        If the switch finds a defect of the memory, its message is refused with `defect_text` and
        `MemoryDefectError` is raised. If the new weights are not served then, sending the message
        again switches to them.
        """
        while self.stagings and self.stagings[0].ended.done():
            staging = self.stagings.pop(0)
            try:
                reply = self._taken(staging)
            except MemoryDefectError:
                self._core.channel.send(refusal(staging.message, defect_text, status_code=500))
                raise
            self._core.channel.send(reply)

    def _taken(self, staging: _Staging) -> Reply:
        """Reply to a message whose tensors were taken, perhaps after the switch."""
        message, update, ended = staging
        error = ended.exception()
        if update is not self._update:
            error = CheckpointError("the update has ended: another began, or a tensor was refused")
        if error is not None:
            if update is self._update:
                self._update = None
            return self._refused(message, error)
        missing = ended.result()
        if missing or message.is_last is False:
            text = f"{len(missing)} tensors are missing"
            return answer(message, calls.WeightsUpdated(True, text, 0, len(missing)))
        self._settle()
        num_running = self._core.scheduler.num_running
        self._core.executor.weights.finish_update(update)
        self._update = None
        self._after_change(message, message.weight_version)
        return self._updated(message, f"the weights {message.weight_version!r}", num_running)

    def _settle(self) -> None:
        """Read the results of launched steps, and send the tokens of the old weights."""
        scheduler = self._core.scheduler
        self._core.steps.settle()
        if scheduler.has_outputs:
            self._core.channel.send(scheduler.handle(TakeOutputs()))

    def _refused(self, message: UpdateWeightsFromTensor, error: BaseException) -> Reply:
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text:
            text = f"the devices have no room for a second set of weights; use chunked: {text}"
        self._unblock()
        awaited = ["an update is complete"] if self._core.executor.weights.is_mixed else []
        awaited += ["kv_cache is resumed"] if self._has_no_pools else []
        if awaited:
            text += f"; generation stays paused until {' and '.join(awaited)}"
        return refusal(message, text, code="weights_refused", param="tensors")

    def _updated(self, message: _UpdateMessage, what: str, num_running: int) -> Reply:
        num_running = 0 if message.abort_all_requests else num_running
        return answer(message, calls.WeightsUpdated(True, f"serving {what}", num_running))

    def relabel(self, message: UpdateWeightVersion) -> Reply:
        """Give the served weights another label, for tokens after this call."""
        if self._core.executor.weights.is_mixed:
            text = "some weights were deleted: complete an update, then set the label"
            return refusal(message, text, code="weights_refused", param="new_version")
        self._settle()
        self._abort_if_asked(message, "the label of the weights was changed")
        version = message.new_version
        self._core.channel.send(WeightsChanged(version=version, is_label=True))
        self._core.change_info(weight_version=version)
        text = f"the weights are now {version!r}"
        return answer(message, calls.VersionUpdated(True, text, version))

    def _abort_if_asked(self, message: _UpdateMessage | UpdateWeightVersion, why: str) -> None:
        if message.abort_all_requests:
            self._core.scheduler.handle(AbortRequest(abort_all=True, message=why))

    def release(self, message: ReleaseMemory) -> Reply:
        """Delete weights or pools; no step runs until both are there again."""
        core = self._core
        if core.args.num_hosts > 1:
            text = "memory is released by engines on one host only"
            return refusal(message, text, code="not_supported")
        tags = set(message.tags or _TAGS)
        if tags.isdisjoint(_TAGS):
            return answer(message, calls.Done())
        self._block()
        self._give_up_kv()
        if "weights" in tags:
            core.executor.weights.release()
        if "kv_cache" in tags and not self._has_no_pools:
            self._has_no_pools = True
            core.executor.release_pools()
        return answer(message, calls.Done())

    def resume(self, message: ResumeMemory) -> Reply:
        if "kv_cache" in (message.tags or _TAGS) and self._has_no_pools:
            self._core.executor.reset()
            self._has_no_pools = False
        self._unblock()
        return answer(message, calls.Done())

    def _block(self) -> None:
        """Run no step until weights and pools are complete."""
        if self.is_blocking:
            return
        scheduler = self._core.scheduler
        self._core.steps.settle()
        self.is_blocking, self.ends_pause = True, not scheduler.is_paused
        scheduler.handle(Pause("in_place"))
        self._core.change_info(is_paused=True)

    def _after_change(self, message: _UpdateMessage, version: str, **facts: Any) -> None:
        """End, retract or mark the requests of the old weights, and continue with the new."""
        core = self._core
        self._abort_if_asked(message, "the weights were updated")
        kept: list[str] = []
        try:
            kept = self._give_up_kv(keeps_running=message.keep_cache)
        finally:  # after a defect of the memory, too: the weights are new
            core.executor.renew_store_keys(keeps_kv=bool(kept))
            core.channel.send(WeightsChanged(version=version, kept_rids=kept))
            core.change_info(weight_version=version, **facts)
            self._unblock()

    def _unblock(self) -> None:
        """Run steps again, unless weights or pools are missing or generation was paused."""
        is_ready = not (self._core.executor.weights.is_mixed or self._has_no_pools)
        if not self.is_blocking or not is_ready:
            return
        self.is_blocking = False
        if self.ends_pause:
            self.ends_pause = False
            self._core.scheduler.handle(Resume())
            self._core.change_info(is_paused=False)

    def _give_up_kv(self, *, keeps_running: bool = False) -> list[str]:
        """Keep requests from using KV of the old weights, except if `keeps_running` those that
        decode; return their rids."""
        self._core.give_up_store_writes()
        kept: list[str] = self._core.scheduler.handle(NewWeights(keeps_running))
        return kept


def _take(update: WeightUpdate, message: UpdateWeightsFromTensor) -> set[str]:
    """Take a message's tensors. Return the names that are then missing, before the thread takes the
    next message. Raises CheckpointError."""
    tensors = message.tensors
    update.add(read_safetensors(tensors) if isinstance(tensors, bytes) else tensors)
    if message.is_last:
        update.check_complete()
    return update.missing
