"""Host time of steps under the load of a busy server: requests start and end in every step.

On each of 8 ranks about 256 requests run. 2,048 requests wait, with 40 shared prefixes in 4
namespaces and 4 priorities. 4,000 streaming sessions have had a turn, and take further turns
between other requests. Submitting is timed separately.

Each of `LOADS` has a different limit on the running requests: the prompt tokens of a step (then
memory suffices, and 500 sessions stay idle on each rank), rows, or pages. If rows or pages are the
limit, waiting requests take them from idle sessions, so few sessions keep theirs. Outputs have the
mean length of recorded conversations, so that five or six requests end and start in each step; or
2,000 tokens, so that one does. Under the limit of prompt tokens, so few start only if a step has
few prompt tokens; then each rank continues a prompt in every step.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from benchmarks.host.steps import ROWS_PER_RANK, SIZES, VOCAB_SIZE, StepLoop
from benchmarks.host.timing import timed_once
from sgl_jax.core.messages import GenerateRequest, OpenSession, SessionTurn
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.engine.loop.garbage import collect_if_many, schedule_collection
from sgl_jax.scheduler.scheduler import Scheduler

NUM_WAITING = 2048
NUM_SESSIONS = 4000
NUM_PREFIXES = 40
NUM_NAMESPACES = 4
_PREFIX_LENS = (1200, 1800)
_TAIL_LENS = (100, 400)
_TURN_LENS = (30, 90)
_SHORT_LENS = (4, 6)
_RECORDED_LENS = (100, 586)
_LONG_LENS = (1500, 2500)
_FIRST_TURN_LENS = (60, 140)
_TURN_SHARE = 0.1
_MOST_FILLING_STEPS = 200  # a small load is never full: requests end while new ones start


class Load(NamedTuple):
    """Sizes of a rank, one of which limits how many requests run, and how long answers are."""

    num_rows: int
    num_pages: int
    chunk_size: int  # prompt tokens of a step
    answer_lens: tuple[int, int] = _RECORDED_LENS
    # Start the running requests with prompts of a few tokens, after the shared beginnings are
    # computed: a step has too few prompt tokens for full prompts.
    is_filled: bool = False


LOADS = {
    "limited by prompt tokens": Load(1 + 400 + 500, num_pages=25_000, chunk_size=260),
    "limited by rows": Load(1 + ROWS_PER_RANK, num_pages=25_000, chunk_size=2048),
    "limited by pages": Load(1 + 2 * ROWS_PER_RANK, num_pages=7_000, chunk_size=2048),
    "limited by rows, long answers": Load(1 + ROWS_PER_RANK, 60_000, 2048, _LONG_LENS),
    "limited by prompt tokens, long answers": Load(1 + 400 + 500, 60_000, 30, _LONG_LENS, True),
}


class ServingLoad:
    """Clients that keep `NUM_WAITING` requests waiting, before ranks of the given sizes."""

    def __init__(self, load: Load) -> None:
        sizes = SIZES._replace(
            pool_pages=(load.num_pages,),
            num_rows=load.num_rows,
            max_context_len=5000,
            max_step_tokens=load.chunk_size + load.num_rows - 1,
        )
        args = SchedulerArgs(
            max_queued_requests=2 * NUM_WAITING + NUM_SESSIONS,
            enable_priority_scheduling=True,
        )
        self._answer_lens = _FIRST_TURN_LENS
        self.scheduler = Scheduler(sizes, args)
        self.loop = StepLoop(self.scheduler)
        self._rng = np.random.default_rng(0)
        self._prefixes = [
            self._rng.integers(0, VOCAB_SIZE, length)
            for length in self._rng.integers(*_PREFIX_LENS, NUM_PREFIXES)
        ]
        self._ids = count()
        self._turns: dict[str, str] = {}  # request id -> session of the turn
        self._idle: deque[str] = deque()  # sessions without a turn in flight
        self.num_finished = 0
        self._open_sessions()
        # Those that run first end as those will that come after them: some soon, some late.
        self._answer_lens = (1, load.answer_lens[1])
        if load.is_filled:
            self._fill(load.num_rows)
        else:
            for _ in range(100):
                while self.scheduler.num_waiting < 64:
                    self.scheduler.handle(self._request())
                self.step()
        self._answer_lens = load.answer_lens

    def _fill(self, num_rows: int) -> None:
        """Compute all shared prefixes on every rank, then start requests of short prompts."""
        for number in range(NUM_PREFIXES):
            for dp_rank in range(SIZES.dp_size):
                sampling = SamplingParams(max_new_tokens=1)
                self.scheduler.handle(self._request_for(number, [0], sampling, dp_rank))
        while not self.scheduler.is_idle:
            self.step()
        num_wanted = SIZES.dp_size * min(ROWS_PER_RANK, num_rows - 1)
        for _ in range(_MOST_FILLING_STEPS):
            num_missing = num_wanted - self.scheduler.num_running
            if num_missing <= 0:
                return
            while self.scheduler.num_waiting < min(64, num_missing):
                tokens = self._tokens(_SHORT_LENS)
                message = GenerateRequest(
                    rid=str(next(self._ids)), input_ids=tokens, sampling=self._sampling()
                )
                self.scheduler.handle(message)
            self.step()

    def _open_sessions(self) -> None:
        for number in range(NUM_SESSIONS):
            name = f"session {number}"
            self.scheduler.handle(OpenSession(rid="", session_id=name, streaming=True))
            self.scheduler.handle(self._turn_of(name))
        while not self.scheduler.is_idle:
            self.step()

    def step(self) -> float:
        """Take one step; return the seconds that the scheduler took."""
        seconds = self.loop.turn()
        if self.loop.outputs is not None:
            for output in self.loop.outputs.outputs:
                if output.finish is None:
                    continue
                self.num_finished += 1
                if (session := self._turns.pop(output.rid, None)) is not None:
                    self._idle.append(session)
        return seconds

    def fill_queue(self) -> list[float]:
        """Submit requests until `NUM_WAITING` wait; return the seconds of each submission."""
        seconds = []
        while self.scheduler.num_waiting < NUM_WAITING:
            is_turn = bool(self._idle) and self._rng.random() < _TURN_SHARE
            message = self._turn_of(self._idle.popleft()) if is_turn else self._request()
            seconds.append(timed_once(partial(self.scheduler.handle, message)))
        return seconds

    def _request(self) -> GenerateRequest:
        number = int(self._rng.integers(NUM_PREFIXES))
        return self._request_for(number, self._tokens(_TAIL_LENS), self._sampling())

    def _request_for(
        self, number: int, tail: list[int], sampling: SamplingParams, dp_rank: int | None = None
    ) -> GenerateRequest:
        """Return a request that continues shared prefix `number`."""
        return GenerateRequest(
            rid=str(next(self._ids)),
            input_ids=[*self._prefixes[number].tolist(), *tail],
            sampling=sampling,
            namespace=f"tenant {number % NUM_NAMESPACES}",
            priority=int(self._rng.integers(4)),
            dp_rank=dp_rank,
        )

    def _turn_of(self, session: str) -> GenerateRequest:
        rid = str(next(self._ids))
        self._turns[rid] = session
        return GenerateRequest(
            rid=rid,
            input_ids=self._tokens(_TURN_LENS),
            sampling=self._sampling(),
            session=SessionTurn(id=session),
        )

    def _tokens(self, lens: tuple[int, int]) -> list[int]:
        tokens: list[int] = self._rng.integers(0, VOCAB_SIZE, self._rng.integers(*lens)).tolist()
        return tokens

    def _sampling(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=int(self._rng.integers(*self._answer_lens)))


def serving_lines(name: str, num_steps: int) -> Iterator[str]:
    """Yield lines with the times of a step and of a submission under `LOADS[name]`."""
    load = ServingLoad(LOADS[name])
    schedule_collection()  # as the engine does when it is ready
    num_warm = 300
    steps: list[float] = []
    submits: list[float] = []
    running, idle = [], []
    for number in range(num_warm + num_steps):
        if number == num_warm:
            submits.clear()
            steps.clear()
            load.num_finished = 0
        submits += load.fill_queue()
        steps.append(load.step())
        collect_if_many(False)
        running.append(load.scheduler.num_running)
        idle.append(sum(rank.memory.sessions.num_idle for rank in load.scheduler.ranks))
    load.scheduler.audit()
    yield (
        f"serving, {name}: {np.mean(running[num_warm:]):,.0f} run, "
        f"{load.num_finished / num_steps:.1f} end a step, {NUM_WAITING:,} wait, "
        f"{np.mean(idle[num_warm:]):,.0f} sessions idle"
    )
    yield _spread("  step", steps)
    yield _spread("  submit one request", submits)


def _spread(name: str, seconds: list[float]) -> str:
    mean, p99, most = np.mean(seconds), np.percentile(seconds, 99), np.max(seconds)
    return f"{name:<62} us: mean {mean * 1e6:,.1f}, p99 {p99 * 1e6:,.1f}, max {most * 1e6:,.1f}"
