"""The steps in flight on the device: launches them, reads their results, recovers from failures."""

import logging
import time
from collections import deque

from sgl_jax.core.errors import GroupError
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.engine.loop.decode_steps import DecodeStepChoice
from sgl_jax.engine.loop.offload_transfers import OffloadTransfers
from sgl_jax.engine.loop.request_grammars import step_masks
from sgl_jax.engine.loop.request_stamps import RequestStamps
from sgl_jax.engine.loop.step_log import StepFailures, StepLog
from sgl_jax.executor.first_token import first_token_plan
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.scheduler.events import DecodeSteps, FailAll, PlanStep, ResultRead
from sgl_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Used in the rare case that requests wait, none can run, and no step is in flight.
_STARVED_POLL_S = 0.001


class StepPipeline:
    """The launched steps whose results were not read, oldest first: up to `depth` and one more."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor,
        stamps: RequestStamps,
        transfers: OffloadTransfers | None,
        log: StepLog,
        failures: StepFailures,
        decode_steps: DecodeStepChoice | None,
        *,
        depth: int,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._stamps = stamps
        self._transfers = transfers
        self._log = log
        self._failures = failures
        self._decode_steps = decode_steps
        self._num_steps = 1  # that the scheduler knows of
        self._depth = depth
        self.in_flight: deque[tuple[StepPlan, StepHandle]] = deque()

    def run_next(self) -> bool:
        """Plan and launch one step, and read the oldest result if enough steps are in flight.
        Return whether a step was launched."""
        if self._decode_steps is not None:
            self._choose_steps(self._decode_steps)
        is_resting = self._scheduler.is_resting
        plan: StepPlan | None = None if is_resting else self._scheduler.handle(PlanStep())
        if plan is not None:
            if self._stamps.has_marks or any(rank.admissions for rank in plan.ranks):
                self._stamps.note_launch(plan)
            try:
                handle = self._executor.launch(plan)
            except Exception as error:  # of any type
                self.recover(error)
                return False
            self.in_flight.append((plan, handle))
            if self._transfers is not None:
                self._transfers.launched(plan)
            if plan.is_masked and not self._draw(plan, handle):
                return True
        if self.in_flight and (plan is None or len(self.in_flight) > self._depth):
            self._read_oldest()
        elif plan is None and not self._scheduler.is_resting:
            time.sleep(_STARVED_POLL_S)
        return plan is not None

    def _choose_steps(self, choice: DecodeStepChoice) -> None:
        """Tell the scheduler the decode steps of a launch, once their programs are compiled."""
        num_steps = choice.num_steps
        if num_steps != self._num_steps and self._executor.has_decode_steps:
            self._num_steps = num_steps
            self._scheduler.handle(DecodeSteps(num_steps))

    def _draw(self, plan: StepPlan, handle: StepHandle) -> bool:
        """Sample a masked step after reading all earlier results. Return False after an error."""
        while len(self.in_flight) > 1:
            if not self._read_oldest():
                return False
        masks = step_masks(plan, self._scheduler)
        try:
            self._executor.draw(handle, masks)
        except Exception as error:
            self.recover(error)
            return False
        return True

    def settle(self) -> None:
        """Read the results of all steps in flight, so that none of their tokens is lost."""
        while self.in_flight:
            self._read_oldest()

    def _read_oldest(self) -> bool:
        plan, handle = self.in_flight.popleft()
        try:
            results = self._executor.result(handle)
        except Exception as error:
            self.recover(error)
            return False
        if self._stamps.has_marks:
            self._stamps.note_result(plan.step_id)
        if self._transfers is not None:
            self._transfers.ended(plan)
        if self._failures.num_consecutive:
            self._failures.note_success()
        if self._decode_steps is not None:
            self._decode_steps.note_result(plan, follows=bool(self.in_flight))
        self._scheduler.handle(ResultRead(plan.step_id, results))
        self._log.after_step(plan, self._scheduler)
        return True

    def recover(self, error: Exception) -> None:
        if isinstance(error, GroupError):
            raise error
        logger.exception("a step failed; all requests in flight end with an error")
        self._failures.note_failure()
        self.reset_device()
        self._scheduler.handle(FailAll(f"a step failed on the device: {error}"))

    def probe(self) -> None:
        """Run a step without requests to check whether the device works again. The last step
        failed, so nothing is cached that the probe could overwrite."""
        try:
            self._executor.result(self._executor.launch(first_token_plan(self._executor.sizes)))
        except Exception as error:
            self.recover(error)
            return
        self._failures.note_success()
        self.reset_device()
        self._scheduler.handle(FailAll("the device was reset"))

    def reset_device(self) -> None:
        """Start over with an empty pool. The results of steps in flight are not read."""
        self.in_flight.clear()
        if self._transfers is not None:
            self._transfers.reset()
        self._executor.reset()
