"""The engine loop: messages in, steps on the device, outputs out.

`EngineCore` owns one scheduler and one executor. The HTTP server runs it in a separate process, the
offline `Engine` in a thread, with the same code.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sgl_jax.core.calls import WithReply
from sgl_jax.core.engine_messages import EndRequested, EngineInfo, OutputBatch, refusal
from sgl_jax.core.messages import (
    CALL_OF,
    AbortRequest,
    CancelCall,
    FrontMessage,
    GenerateRequest,
    Shutdown,
    StopRequest,
)
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.loop.controls import NOT_AWAITED, Controls
from sgl_jax.engine.loop.decode_steps import DecodeStepChoice
from sgl_jax.engine.loop.kv_events import KVEventsConfig, open_kv_events
from sgl_jax.engine.loop.memory_audit import BackgroundAudit, DefectRecord
from sgl_jax.engine.loop.offload_transfers import OffloadTransfers
from sgl_jax.engine.loop.request_grammars import RequestGrammars
from sgl_jax.engine.loop.request_stamps import RequestStamps
from sgl_jax.engine.loop.saved_cache import CacheSaver
from sgl_jax.engine.loop.step_log import StepFailures, StepLog
from sgl_jax.engine.loop.step_pipeline import StepPipeline
from sgl_jax.engine.watchdog import Watchdog, exit_process
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.grammar.compiler import GrammarCompiler
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.multihost.group_executor import GroupExecutor
from sgl_jax.scheduler import events
from sgl_jax.scheduler.record.event_log import EventWriter
from sgl_jax.scheduler.record.recorder import RecordedScheduler
from sgl_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.2
_MOVING_POLL_S = 0.005  # used while prefixes are loaded or stored, or grammars are compiled
_MAX_VALUES_BYTES = 64 << 20  # of several requests, in one message
_NOT_COMPILED = "structured output cannot be served: its programs could not be compiled: "
_REBUILT = (
    "the engine found the records of its memory wrong and started afresh; "
    "requests in flight were lost and may be sent again"
)


class EngineCore:
    """Builds the executor, compiles its programs, and runs a scheduler on it.

    `info` holds the facts needed by a frontend: sizes, model path, end-of-sequence ids, dtype. Its
    changes are sent to the frontend. The scheduler's state changes only by `scheduler.handle`, and
    a recording repeats its events.
    """

    def __init__(
        self,
        args: ServerArgs,
        progress: Progress | None = None,
        executor: ModelExecutor | None = None,
    ) -> None:
        """Load the model, or use `executor`, which stays open afterwards.

        `progress` gets the phases of the start, and of long work afterwards.
        """
        self.args = args
        self._has_values = args.reports_token_values  # of tokens, in outputs
        self._progress = progress or Progress()
        # First, so that a failure is reported before the model is loaded.
        kv_events = KVEventsConfig.read(args.kv_events_config)
        self._recording = EventWriter.create(args.record_events) if args.record_events else None
        self._closes_executor = executor is None
        if executor is None:
            kind = GroupExecutor if args.num_hosts > 1 else ModelExecutor
            executor = kind(args, self._progress)
        self.executor = executor
        self.executor.warm_up()
        sizes = self.executor.sizes
        self.info: dict[str, Any] = {
            **self.executor.info,
            "max_request_tokens": sizes.max_request_tokens,
            "max_running_requests": sizes.dp_size * (sizes.num_rows - 1),
            "is_paused": False,
            "weight_version": args.weight_version,
            "failed_steps": 0,  # in a row
        }
        compiler = GrammarCompiler(
            args.tokenizer_folder,
            sizes.vocab_size,
            sizes.eos_token_ids,
            opens_objects=args.open_json_objects,
        )
        if self._recording is None:
            self.scheduler = Scheduler(sizes, args)
        else:
            self.scheduler = RecordedScheduler(sizes, args, self._recording.write)
        self._grammars = RequestGrammars(
            self.scheduler,
            compiler,
            args.max_queued_requests,
            has_shares=args.share_part < 1,
        )
        memories = [rank.memory for rank in self.scheduler.ranks]
        self._kv_events = open_kv_events(kv_events, memories)
        self._stamps = RequestStamps(self.scheduler.ranks, has_marks=args.enable_trace)
        self._transfers: OffloadTransfers | None = None
        if sizes.host_blocks:
            timeout_s = args.store_timeout_s
            self._transfers = OffloadTransfers(self.scheduler, self.executor, timeout_s)
        self._saver: CacheSaver | None = None
        if args.restore_cache is not None and self._transfers is not None:
            assert self.executor.store is not None, "checked by `ServerArgs`"
            self._saver = CacheSaver(args, self.executor.store, self.scheduler, self._transfers)
            self._saver.restore()
        self._log = StepLog(args.decode_log_interval)
        self._failures = StepFailures(
            args.max_step_failures, lambda count: self.change_info(failed_steps=count)
        )
        most_steps = sizes.max_decode_steps
        self.steps = StepPipeline(
            self.scheduler,
            self.executor,
            self._stamps,
            self._transfers,
            self._log,
            self._failures,
            DecodeStepChoice(args.num_decode_steps, most_steps) if most_steps > 1 else None,
            depth=0 if args.disable_overlap_schedule else 1,
        )
        self._defects = DefectRecord(args.memory_dump_dir)
        self._controls = Controls(self, self._saver)
        self._is_shutting_down = False
        self._is_audited = True
        self._has_slices = args.check_memory in ("background", "busy")
        self._background_audit = BackgroundAudit(self.scheduler.audit_slices, time.monotonic())
        self._is_compiling = self.executor.start_background()
        if self._is_compiling:
            self.scheduler.handle(events.AwaitPrograms())

    def run(
        self,
        channel: Channel,
        on_stall: Callable[[], None] = exit_process,
        *,
        close: bool = True,
        after_turn: Callable[[bool], object] | None = None,
    ) -> None:
        """Serve until a `Shutdown` message. Raises errors from which the engine cannot recover.

        Args:
            on_stall: called from another thread if a step takes longer than the watchdog allows.
            close: free the device's memory afterwards.
            after_turn: called after each turn of the loop, with True if the turn had nothing to do.
        """
        self.channel = channel
        if isinstance(self.executor, GroupExecutor):
            self.executor.on_leaving(lambda rank: channel.send(EndRequested(host=rank)))
        self.watchdog = Watchdog(channel.send, self._progress, self.args.watchdog_timeout, on_stall)
        with self.watchdog:
            while not self._is_shutting_down:
                is_resting = self.scheduler.is_resting and not self.steps.in_flight
                self.watchdog.feed()
                may_wait = is_resting and not self.scheduler.needs_tick(time.monotonic())
                is_moving = may_wait and self._is_moving()
                poll_s = 0.0
                if may_wait:
                    poll_s = _MOVING_POLL_S if is_moving else _IDLE_POLL_S
                messages = channel.poll(poll_s)
                is_idle = may_wait and not is_moving and not messages
                now_s = time.monotonic()
                # Messages must see the current time. Without messages, tick only if needed, since
                # each tick is recorded.
                if messages or self.scheduler.needs_tick(now_s):
                    self._tick(now_s)
                cancelled = {each.call for each in messages if isinstance(each, CancelCall)}
                for message in messages:
                    if isinstance(message, WithReply) and message.rid in cancelled:
                        channel.send(refusal(message, NOT_AWAITED))
                    else:
                        self._handle(message)
                try:
                    if is_idle:
                        self._audit()
                        may_probe = not self._controls.updates.is_blocking
                        if may_probe and self._failures.is_probe_due and self.scheduler.is_idle:
                            self.steps.probe()
                    elif self._has_slices and now_s >= self._background_audit.due_s:
                        self._background_audit.run_if_due(now_s)
                    if self._is_compiling:
                        self._look_for_programs()
                    if self._grammars.queue.ended or self._grammars.ended:
                        self._grammars.hand_out()
                    if self._transfers is not None:
                        self._transfer(self._transfers.move)
                    if self._controls.flushes.calls:
                        self._controls.flushes.answer_all(channel.send, _REBUILT)
                    if self._controls.updates.stagings:
                        self._controls.updates.answer_ended(_REBUILT)
                    if self._saver is not None:
                        self._saver.save_if_due(now_s)
                    if self.steps.run_next():
                        self._is_audited = False
                except MemoryDefectError as error:
                    self._answer_defect(error)
                if self.scheduler.has_outputs:
                    batch: OutputBatch = self.scheduler.handle(events.TakeOutputs())
                    has_stamps = self._stamps.starts or self._stamps.marks
                    batch = self._stamps.add_to(batch) if has_stamps else batch
                    parts = batch.parts(_MAX_VALUES_BYTES) if self._has_values else (batch,)
                    for part in parts:
                        channel.send(part)
                if self._failures.num_consecutive:
                    self._failures.check()  # after the replies to the last step's requests
                if self._kv_events is not None:
                    self._kv_events.publish()
                if after_turn is not None:
                    after_turn(is_idle)
        self._abort_all()
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if close:
                self._close()

    def _close(self) -> None:
        try:
            self._controls.updates.close()
            self._grammars.queue.close()
            if self._kv_events is not None:
                self._kv_events.close()
            if self._recording is not None:
                self._recording.close()
        finally:
            if self._closes_executor:
                self.executor.close()

    def _is_moving(self) -> bool:
        """Return whether background work may end soon while no step can be planned."""
        is_restoring = self._saver is not None and self.scheduler.offload.is_restoring
        is_busy = bool(self._controls.updates.stagings) or self._grammars.is_busy
        return is_restoring or bool(self._controls.flushes.calls) or is_busy

    def _look_for_programs(self) -> None:
        end = self.executor.background_end()
        if end is None:
            return
        self._is_compiling = False
        if end:
            logger.error("%s%s", _NOT_COMPILED, end)
        self.scheduler.handle(events.ProgramsReady(_NOT_COMPILED + end if end else ""))

    # -- steps ------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        """Set the scheduler's time. Mark the memory for audit if that ends requests or sessions."""
        before = self.scheduler.num_sessions, self.scheduler.num_running
        try:
            self.scheduler.handle(events.Tick(now_s))
        except MemoryDefectError as error:
            self._answer_defect(error)
        if (self.scheduler.num_sessions, self.scheduler.num_running) != before:
            self._is_audited = False

    def _transfer(self, run: Callable[[], None]) -> None:
        try:
            run()
        except MemoryDefectError:
            raise
        except Exception as error:  # of any type
            self.steps.recover(error)

    def _answer_defect(self, error: MemoryDefectError) -> None:
        memories = [rank.memory for rank in self.scheduler.ranks]
        context = {"state": self.state(), "steps_in_flight": len(self.steps.in_flight)}
        where = self._defects.record(error, memories, context)
        if self.args.memory_error_action == "crash":
            raise type(error)(f"{error}; {where}") from error
        # Steps in flight still use the old pages, so the device gets a new pool.
        self.steps.reset_device()
        self.scheduler.handle(events.Rebuild(_REBUILT))
        self._is_audited = False

    def change_info(self, **facts: Any) -> None:
        self.info = self.info | facts
        self.channel.send(EngineInfo(info=self.info))

    def _audit(self) -> None:
        """Verify by a full walk, while idle, that no page has leaked since the last audit."""
        if self.args.check_memory == "off":
            return
        if not self._is_audited:
            self.scheduler.audit()
            self._is_audited = True
        self._background_audit.proved(time.monotonic())

    # -- messages ---------------------------------------------------------------------------

    def _handle(self, message: FrontMessage) -> None:
        """Handle a message, and send the reply to it if there is one."""
        call = CALL_OF[type(message)]
        if isinstance(message, AbortRequest | StopRequest):
            handle: Any = self.scheduler.handle
        elif isinstance(message, GenerateRequest | Shutdown):
            handle = getattr(self, call.handler)
        else:
            handle = self._controls.handle
        if not call.is_read:
            self._is_audited = False
        started_s = time.thread_time()
        try:
            reply = handle(message)
        except MemoryDefectError as error:
            self._answer_defect(error)
            is_asked = call.answer is not None
            reply = refusal(message, _REBUILT, status_code=500) if is_asked else None
        if reply is not None and call.is_read:
            cost_s = time.thread_time() - started_s
            reply = msgspec.structs.replace(reply, cost_s=cost_s)
        if reply is not None:
            self.channel.send(reply)

    def submit(self, message: GenerateRequest) -> None:
        self.scheduler.handle(message)
        self._grammars.begin(message)

    def shut_down(self, message: Shutdown) -> None:
        self._is_shutting_down = True

    def _abort_all(self) -> None:
        """Abort all requests at the end, which releases all leases, and audit the memory."""
        self.steps.in_flight.clear()
        try:
            shut_down = AbortRequest(abort_all=True, message="the engine was shut down")
            self.scheduler.handle(shut_down)
            while self.scheduler.is_aborting:
                self.scheduler.handle(events.Tick(time.monotonic()))
            self._audit()
        except MemoryDefectError as error:
            self._answer_defect(error)
        finally:
            if self.scheduler.has_outputs:
                self.channel.send(self.scheduler.handle(events.TakeOutputs()))

    def give_up_store_writes(self) -> None:
        """Give up pending writes of prefixes to the store."""
        if self._transfers is not None:
            self._transfer(self._transfers.give_up_puts)

    def state(self) -> dict[str, Any]:
        """Return `Scheduler.rank_states`, and counters since the start."""
        scheduler = self.scheduler
        counters = {
            **scheduler.counters(),
            **self._log.counters(),
            "memory_errors": self._defects.num_defects,
            "step_failures": self._failures.num_failed,
            "grammars_compiled": self._grammars.queue.num_compiled,
            "memory_walks": self._background_audit.num_walks,
            **self.executor.compile_counts(),
        }
        hosts = self.executor.host_reports() if isinstance(self.executor, GroupExecutor) else []
        return {
            "ranks": scheduler.rank_states(),
            "num_waiting": scheduler.num_waiting,
            "num_waiting_retracted": scheduler.num_waiting_retracted,
            "waiting_for": scheduler.count_waiting(),
            "num_sessions": scheduler.num_sessions,
            "memory_audit_age_s": self._background_audit.age_s(time.monotonic()),
            "tenants": {name: each._asdict() for name, each in scheduler.tenants().items()},
            "counters": counters,
            "hosts": msgspec.to_builtins(hosts),
        }
