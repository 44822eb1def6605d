"""Host time of steps before a long queue: does it grow with the number of waiting requests?

One rank has memory for a few requests. Waiting requests continue `NUM_PREFIXES` prefixes in turn,
so a step evicts pages of one prefix to compute another, and each eviction concerns every request
that waits with that prefix. Queues of different lengths take turns in one process. Compare the
ratios of their times.
"""

from collections.abc import Iterator
from functools import cache
from itertools import count

import numpy as np

from benchmarks.host.steps import SIZES, VOCAB_SIZE, StepLoop
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.engine.loop.garbage import collect_if_many, schedule_collection
from sgl_jax.scheduler.scheduler import Scheduler

QUEUE_LENS = (100, 5_000, 20_000)
NUM_PREFIXES = 4
_PREFIX_LEN = 1024
_TAIL_LENS = (50, 100)
_ANSWER_LENS = (4, 20)
_NUM_PAGES = 200  # two prefixes and the tails after them
_TURN_STEPS = 50
_WARM_STEPS = 100


@cache
def _prefixes() -> list[list[int]]:
    rng = np.random.default_rng(0)
    prefixes: list[list[int]] = rng.integers(0, VOCAB_SIZE, (NUM_PREFIXES, _PREFIX_LEN)).tolist()
    return prefixes


class LongQueue:
    """A rank before which `queue_len` requests wait, in the order of `policy`."""

    def __init__(self, queue_len: int, policy: str) -> None:
        sizes = SIZES._replace(
            dp_size=1,
            pool_pages=(_NUM_PAGES,),
            num_rows=17,
            max_step_tokens=512 + 16,
        )
        args = SchedulerArgs(schedule_policy=policy, max_queued_requests=2 * queue_len)
        self._scheduler = Scheduler(sizes, args)
        self._loop = StepLoop(self._scheduler)
        self._queue_len = queue_len
        self._rng = np.random.default_rng(0)
        self._ids = count()
        self.seconds: list[float] = []  # that each step took

    def run(self, num_steps: int) -> None:
        """Take steps; before each, as many requests come as have started."""
        for _ in range(num_steps):
            while self._scheduler.num_waiting < self._queue_len:
                self._scheduler.handle(self._request())
            self.seconds.append(self._loop.turn())
            collect_if_many(False)

    def _request(self) -> GenerateRequest:
        number = next(self._ids)
        tail = self._rng.integers(0, VOCAB_SIZE, self._rng.integers(*_TAIL_LENS)).tolist()
        return GenerateRequest(
            rid=str(number),
            input_ids=[*_prefixes()[number // 8 % NUM_PREFIXES], *tail],
            sampling=SamplingParams(max_new_tokens=int(self._rng.integers(*_ANSWER_LENS))),
        )


def waiting_lines(policy: str, num_steps: int) -> Iterator[str]:
    """Yield lines with the time of a step before queues of `QUEUE_LENS`."""
    queues = [LongQueue(queue_len, policy) for queue_len in QUEUE_LENS]
    schedule_collection()
    for queue in queues:
        queue.run(_WARM_STEPS)
        queue.seconds.clear()
    for _ in range(0, num_steps, _TURN_STEPS):
        for queue in queues:
            queue.run(_TURN_STEPS)
    first = np.percentile(queues[0].seconds, 99)
    for queue, queue_len in zip(queues, QUEUE_LENS, strict=True):
        mean, p99 = np.mean(queue.seconds), np.percentile(queue.seconds, 99)
        name = f"step, {policy}, {queue_len:,} wait on {NUM_PREFIXES} prefixes"
        yield (
            f"{name:<62} us: mean {mean * 1e6:,.1f}, p99 {p99 * 1e6:,.1f}, "
            f"{p99 / first:.2f} of the shortest queue's"
        )
