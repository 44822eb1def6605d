"""Host time beside idle sessions, and of taking their memory."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np

from sgl_jax.bench.host.steps import SIZES, VOCAB_SIZE
from sgl_jax.bench.host.timing import Timing, timed_once
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request


class IdleSessions:
    """A rank with `num_idle` idle sessions of three pages each, two of them on the tree."""

    def __init__(self, num_idle: int) -> None:
        sizes = SIZES._replace(
            dp_size=1,
            num_pages=1 + 3 * num_idle + 1000,
            num_rows=num_idle + 50,
            max_context_len=80_000,
            max_step_tokens=16_384 + num_idle + 49,
        )
        self.rank = RankScheduler(0, sizes, SchedulerArgs(session_memory_fraction=0.99))
        self.ids = count()
        self.names = [f"session {number}" for number in range(num_idle)]
        self.fill()

    def fill(self) -> None:
        """Every session that is not idle has a turn of 40 tokens, and is."""
        memory = self.rank.memory
        for number, name in enumerate(self.names):
            if memory.sessions.holds(name):
                continue
            tokens = np.full(40, number, np.int32)
            lease = memory.open_lease(tokens[:-1])
            memory.sessions.bind(name, lease)
            row, length = np.array([lease.row]), np.array([40], np.int32)
            assert memory.grow_rows(row, length), "the load does not fit the sizes"
            memory.commit_rows(row, length)
            release_kv_cache(memory, lease, tokens, insert=True)

    def request(self, num_tokens: int) -> Request:
        """A request that shares nothing with any session."""
        arrival = next(self.ids)
        tokens = [VOCAB_SIZE - 1] * num_tokens
        sampling = SamplingParams(max_new_tokens=1)
        message = GenerateRequest(rid=str(arrival), input_ids=tokens, sampling=sampling)
        return Request(message, arrival, num_tokens + 1)

    def admit(self, request: Request) -> int:
        """The row that it is given."""
        cache = self.rank.memory.cache
        cursor = cache.follow(request.matchable(), request.namespace, tag=0)
        assert self.rank.fits(request, cursor), "the load does not fit the sizes"
        row = self.rank.admit(request, cursor)
        cache.unfollow(cursor)
        self.rank.take_admissions()
        return row


def bench_sessions(repeats: int) -> Iterator[Timing]:
    """What idle sessions cost others, and to take the memory of many for one request."""
    num_idle, num_evicted = 4000, 1000
    for num_beside in (40, num_idle):
        beside = IdleSessions(num_beside)
        seconds: list[float] = []
        for _ in range(repeats):
            row = beside.admit(beside.request(100))
            seconds.append(timed_once(partial(beside.rank.finish, row)))
        yield Timing(f"finish beside {num_beside:,} idle sessions", seconds, 1)
    sessions, seconds = IdleSessions(num_idle), []
    memory = sessions.rank.memory
    for _ in range(min(repeats, 20)):
        num_pages = memory.num_available_pages + 3 * num_evicted
        request = sessions.request(16 * num_pages - 1)
        start = time.thread_time()
        row = sessions.admit(request)
        seconds.append(time.thread_time() - start)
        assert memory.sessions.num_idle == num_idle - num_evicted
        sessions.rank.end(row)
        sessions.fill()
    name = f"evict {num_evicted:,} of {num_idle:,} idle sessions for one request"
    yield Timing(name, seconds, num_evicted)
