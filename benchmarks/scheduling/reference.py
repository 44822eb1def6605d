"""A simulated plain first-come, first-served scheduler, with which ours is compared.

The head of the queue starts once its tokens and one more, less its cached pages, fit into the free
and evictable pages of its rank, and a row and prompt tokens of the step are left. Its rank is the
one with the most such pages, unless it is pinned. Prompt tokens go to the oldest request first. If
no page is left, the youngest request of the rank is retracted and becomes the head of the queue.
Full pages stay cached until evicted, least recently used first. It counts pages and has no memory,
and it treats all requests alike: no priorities, tenants, drafts, windows, states or tiers.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import takewhile

from benchmarks.scheduling.simulation import Engine, Output
from benchmarks.scheduling.traffic import LoadRequest
from sgl_jax.bench.trace.step_time import RankLoad
from sgl_jax.core.engine_sizes import EngineSizes

Held = list[int | None]  # the key of each page; None: it is not in the cache


class Job:
    """A request and its progress; lengths include the tokens of steps in flight."""

    def __init__(self, number: int, request: LoadRequest, page_size: int) -> None:
        self.number, self.request = number, request
        self.known_len = self.length = len(request.prompt)  # the former without steps in flight
        self.computed = 0  # tokens with KV
        self.held: Held = []  # its pages; a new list after each start
        self.rank: Rank | None = None  # None: it waits
        self.is_decoding = False
        self.keys = request.page_keys(page_size)


@dataclass
class Rank:
    page_size: int
    num_free: int
    readers: dict[int, int] = field(default_factory=dict)  # of each cached page
    unread: OrderedDict[int, None] = field(default_factory=OrderedDict)  # next to be evicted first
    running: list[Job] = field(default_factory=list)  # oldest first

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.unread)

    def start(self, job: Job) -> bool:
        """Give a waiting job its pages; False if they do not fit."""
        most = (job.known_len - 1) // self.page_size
        matched = list(takewhile(self.readers.__contains__, job.keys[:most]))
        num_unread = sum(key in self.unread for key in matched)
        num_lacking = -(-(job.known_len + 1) // self.page_size) - len(matched)
        if num_lacking > self.num_available - num_unread:
            return False
        for key in matched:
            self.readers[key] += 1
            self.unread.pop(key, None)
        job.held, job.computed = [*matched], len(matched) * self.page_size
        job.length, job.rank, job.is_decoding = job.known_len, self, False
        self.running.append(job)
        return self.grow(job, job.length + 1)

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Take the pages that `num_tokens` tokens of the job lack; False if they do not fit."""
        num_lacking = -(-num_tokens // self.page_size) - len(job.held)
        if num_lacking > self.num_available:
            return False
        while self.num_free < num_lacking:
            del self.readers[self.unread.popitem(last=False)[0]]
            self.num_free += 1
        self.num_free -= max(num_lacking, 0)
        job.held += [None] * num_lacking
        return True

    def publish(self, job: Job) -> None:
        """Put the job's computed pages into the cache, unless equal pages are there."""
        for index in range(min(job.computed, job.known_len) // self.page_size):
            if job.held[index] is None and job.keys[index] not in self.readers:
                job.held[index] = job.keys[index]
                self.readers[job.keys[index]] = 1

    def release(self, job: Job) -> None:
        """Free the job's pages; full pages stay cached, and its last pages are evicted first."""
        self.publish(job)
        self.num_free += job.held.count(None)
        for key in [key for key in reversed(job.held) if key is not None]:
            self.readers[key] -= 1
            if not self.readers[key]:
                self.unread[key] = None
        job.rank = None
        self.running.remove(job)


@dataclass
class ReferenceStep:
    """The load of each rank, the jobs that start, and those that gain a token."""

    loads: list[RankLoad] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    gains: list[tuple[Job, Held]] = field(default_factory=list)  # with its list of pages


class Reference(Engine[ReferenceStep]):
    def __init__(self, sizes: EngineSizes) -> None:
        self._sizes, num_pages = sizes, sizes.pool_pages[0] - 1
        self.ranks = [Rank(sizes.page_size, num_pages) for _ in range(sizes.dp_size)]
        self.waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}
        self._num_retracts = self._num_recomputed = 0

    def submit(self, number: int, request: LoadRequest) -> None:
        self._jobs[number] = Job(number, request, self._sizes.page_size)
        self.waiting.append(self._jobs[number])

    def abort(self, number: int) -> None:
        job = self._jobs.pop(number)
        if job.rank is None:
            self.waiting.remove(job)
        else:
            job.rank.release(job)

    def plan(self, now_s: float) -> ReferenceStep | None:
        step = ReferenceStep(loads=[RankLoad(0, 0, 0, 0, 0)] * len(self.ranks))
        for number, rank in enumerate(self.ranks):
            self._decode(rank, number, step)
            for job in rank.running:
                self._add_chunk(job, number, step)
        while self.waiting and (dp_rank := self._start(self.waiting[0], step)) is not None:
            job = self.waiting.popleft()
            step.started.append(job.number)
            self._add_chunk(job, dp_rank, step)
        return step if any(load.tokens for load in step.loads) else None

    def _start(self, job: Job, step: ReferenceStep) -> int | None:
        """Start the head of the queue; return its rank, or None if it does not fit."""
        pinned, computed = job.request.dp_rank, job.computed
        numbers = range(len(self.ranks)) if pinned is None else [pinned]
        has_row = [n for n in numbers if len(self.ranks[n].running) < self._sizes.num_rows - 1]
        best = max(has_row, key=lambda n: self.ranks[n].num_available, default=None)
        if best is None or step.loads[best].prefill_tokens >= self._sizes.max_chunk_tokens:
            return None
        is_started = self.ranks[best].start(job)
        self._num_recomputed += max(computed - job.computed, 0)
        return best if is_started else None

    def _decode(self, rank: Rank, number: int, step: ReferenceStep) -> None:
        """Add a token to each decoding job of a rank, oldest first."""
        num_rows = kv_tokens = 0
        for job in list(rank.running):
            if job.rank is None or not job.is_decoding or job.length >= job.request.max_len:
                continue
            while job.rank is rank and not rank.grow(job, job.length):
                self.waiting.appendleft(rank.running[-1])
                rank.release(rank.running[-1])
                self._num_retracts += 1
            if job.rank is rank:
                num_rows, kv_tokens, job.computed = num_rows + 1, kv_tokens + job.length, job.length
                job.length += 1
                step.gains.append((job, job.held))
        step.loads[number] = RankLoad(num_rows, kv_tokens, 0, 0, 0)

    def _add_chunk(self, job: Job, number: int, step: ReferenceStep) -> None:
        """Compute as much of a job's prompt as the step has tokens left for."""
        num_rows, kv_tokens, num_chunked, num_read, _ = step.loads[number]
        count = min(job.length - job.computed, self._sizes.max_chunk_tokens - num_chunked)
        if count <= 0 or job.is_decoding:
            return
        job.computed += count
        self.ranks[number].publish(job)
        num_chunked, num_read = num_chunked + count, num_read + job.computed
        step.loads[number] = RankLoad(num_rows, kv_tokens, num_chunked, num_read, 0)
        if job.computed == job.length:
            job.length, job.is_decoding = job.length + 1, True
            step.gains.append((job, job.held))

    def read(self, step: ReferenceStep, end_s: float) -> list[Output]:
        outputs = []
        for job, held in step.gains:
            if job.rank is None or job.held is not held:
                continue  # it was aborted or retracted, or has ended
            job.known_len += 1
            is_end = job.known_len == job.request.end_len
            if is_end:
                del self._jobs[job.number]
                job.rank.release(job)
            outputs.append(Output(job.number, 1, is_end))
        return outputs

    @property
    def utilization(self) -> float:
        num_pages = self._sizes.dp_size * (self._sizes.pool_pages[0] - 1)
        return 1 - sum(rank.num_available for rank in self.ranks) / num_pages

    def counts(self) -> dict[str, int]:
        return {"retracts": self._num_retracts, "recomputed": self._num_recomputed}
