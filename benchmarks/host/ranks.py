"""Host time of steps by the number of ranks: steps that start requests, and decode steps.

`NUM_WAITING` requests wait, without a shared prefix. First the ranks fill up, so that many requests
start in a step. Then a few requests end and start in each step. Last, a request decodes in each row
and none waits.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from benchmarks.host.steps import SIZES, VOCAB_SIZE, StepLoop
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.engine.loop.garbage import collect_if_many, schedule_collection
from sgl_jax.scheduler.scheduler import Scheduler

NUM_WAITING = 2048
# Ranks, and rows of each.
SHAPES = ((8, 64), (128, 64))
_PROMPT_LENS = (100, 400)
_ANSWER_LENS = (100, 586)
_LONG_ANSWER = 1000
_WARM_STEPS = 20
_FILLING_STEPS = 60
_PAGES_PER_ROW = 100


class RanksLoad:
    """Clients that keep `NUM_WAITING` requests waiting before `dp_size` ranks."""

    def __init__(self, dp_size: int, num_rows: int) -> None:
        sizes = SIZES._replace(
            dp_size=dp_size,
            num_rows=1 + num_rows,
            pool_pages=(num_rows * _PAGES_PER_ROW,),
            max_step_tokens=2048 + num_rows,
        )
        args = SchedulerArgs(max_queued_requests=2 * NUM_WAITING)
        self.scheduler = Scheduler(sizes, args)
        self.loop = StepLoop(self.scheduler)
        self._rng = np.random.default_rng(0)
        self._ids = count()

    def run(self, num_steps: int, shortest_answer: int) -> list[float]:
        """Take steps before a full queue; return the seconds of those that start a request."""
        seconds = []
        for _ in range(num_steps):
            while self.scheduler.num_waiting < NUM_WAITING:
                self.scheduler.handle(self._request(shortest_answer))
            took = self.loop.turn()
            if self.scheduler.num_waiting < NUM_WAITING:
                seconds.append(took)
            collect_if_many(False)
        return seconds

    def decode(self, num_steps: int) -> list[float]:
        """Let one request run in each row, and return the seconds of steps in which all decode."""
        sizes = self.scheduler.sizes
        for _ in range(sizes.dp_size * (sizes.num_rows - 1)):
            self.scheduler.handle(self._request(_LONG_ANSWER - 1, _LONG_ANSWER))
        while self.scheduler.num_waiting:
            self.loop.turn()
        for _ in range(_WARM_STEPS):
            self.loop.turn()
        return [self.loop.turn() for _ in range(num_steps)]

    def _request(self, shortest_answer: int, beyond: int = _ANSWER_LENS[1]) -> GenerateRequest:
        length = self._rng.integers(*_PROMPT_LENS)
        answer_len = int(self._rng.integers(shortest_answer, beyond))
        return GenerateRequest(
            rid=str(next(self._ids)),
            input_ids=self._rng.integers(0, VOCAB_SIZE, length).tolist(),
            sampling=SamplingParams(max_new_tokens=answer_len),
        )


def ranks_lines(dp_size: int, num_rows: int, num_steps: int) -> Iterator[str]:
    """Yield lines with the times of steps of `dp_size` ranks with `num_rows` rows each."""
    load = RanksLoad(dp_size, num_rows)
    schedule_collection()
    for name, seconds in (
        # Some of those that start first end soon, some late.
        ("ranks fill up", load.run(_FILLING_STEPS, 1)),
        ("few start and end", load.run(num_steps, _ANSWER_LENS[0])),
        ("all decode", RanksLoad(dp_size, num_rows).decode(num_steps)),
    ):
        mean, most = np.mean(seconds) * 1e3, np.max(seconds) * 1e3
        shape = f"step, {dp_size} ranks x {num_rows} rows, {name}"
        yield f"{shape:<62} ms: mean {mean:.2f}, max {most:.2f}"
