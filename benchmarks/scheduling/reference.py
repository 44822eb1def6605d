"""A plain first-come, first-served scheduler, simulated: what ours is compared with.

- The head of the queue starts as soon as its prompt, less its cached prefix, and one more token fit
  into the free and evictable pages of its rank, and a row and prompt tokens of the step are left.
- Its rank is the one with the most such pages, unless it is pinned.
- The prompt tokens of a step go to the oldest request first. Requests grow page by page. If a page
  lacks, the youngest request of the rank is retracted and becomes the head of the queue.
- Full pages stay cached until they are evicted, least recently used first.

It knows no priorities, tenants, drafts, windows, recurrent states or tiers, and treats such loads
like others. It has no memory of its own, only counts of pages and keys of cached ones.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from benchmarks.scheduling.traffic import LoadRequest
from sgl_jax.bench.trace.step_time import RankLoad
from sgl_jax.core.engine_sizes import EngineSizes


class Job:
    """A request and its progress."""

    def __init__(self, number: int, request: LoadRequest, page_size: int) -> None:
        self.number, self.request = number, request
        self.prompt_len = len(request.prompt)
        self.num_read = 0  # output tokens whose steps were read
        self.length = self.prompt_len  # tokens, with those of steps in flight
        self.computed = 0  # tokens with KV, with those of steps in flight
        self.held: list[int | None] = []  # key of each of its pages; None: not in the cache
        self.rank: Rank | None = None
        self.num_starts = 0
        self.is_decoding = False
        tokens, width = request.tokens().tobytes(), 4 * page_size
        self.keys: list[int] = []  # of its full pages and all tokens before them
        key = 0
        for start in range(0, len(tokens) - width + 1, width):
            key = hash((key, tokens[start : start + width]))
            self.keys.append(key)

    @property
    def known_len(self) -> int:
        return self.prompt_len + self.num_read


@dataclass
class Rank:
    """The pages and running requests of a rank."""

    num_pages: int
    page_size: int
    free: int = 0
    readers: dict[int, int] = field(default_factory=dict)  # of each cached page
    idle: OrderedDict[int, None] = field(
        default_factory=OrderedDict
    )  # without readers, oldest first
    running: list[Job] = field(default_factory=list)  # oldest first

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def available(self) -> int:
        return self.free + len(self.idle)

    def matched(self, job: Job) -> int:
        """Return the number of leading pages of a waiting job that are cached."""
        most = (job.known_len - 1) // self.page_size
        count = 0
        while count < most and job.keys[count] in self.readers:
            count += 1
        return count

    def start(self, job: Job) -> bool:
        """Give a waiting job its pages; False if they do not fit."""
        matched = self.matched(job)
        was_idle = [key for key in job.keys[:matched] if key in self.idle]
        needed = self.pages_for(job.known_len + 1) - matched
        if needed > self.available - len(was_idle):
            return False
        for key in was_idle:
            del self.idle[key]
        for key in job.keys[:matched]:
            self.readers[key] += 1
        job.held = [*job.keys[:matched]]
        job.length, job.computed = job.known_len, matched * self.page_size
        job.rank, job.is_decoding = self, False
        job.num_starts += 1
        self.grow(job, job.length + 1)
        self.running.append(job)
        return True

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Take the pages that `num_tokens` tokens of the job lack; False if they do not fit."""
        needed = self.pages_for(num_tokens) - len(job.held)
        if needed > self.available:
            return False
        while self.free < needed:
            key, _ = self.idle.popitem(last=False)
            del self.readers[key]
            self.free += 1
        self.free -= max(needed, 0)
        job.held += [None] * needed
        return True

    def publish(self, job: Job) -> None:
        """Put the computed pages of its prompt into the cache, unless equal ones are there."""
        for index in range(min(job.computed, job.prompt_len) // self.page_size):
            key = job.keys[index]
            if job.held[index] is None and key not in self.readers:
                self.readers[key] = 1
                job.held[index] = key

    def release(self, job: Job) -> None:
        """Take back its pages; the full ones stay cached, the last ones are evicted first."""
        num_kept = min(job.computed, job.known_len) // self.page_size
        for index in reversed(range(len(job.held))):
            key = job.held[index]
            if key is not None:
                self.readers[key] -= 1
                if not self.readers[key]:
                    self.idle[key] = None
            elif index < num_kept and job.keys[index] not in self.readers:
                self.readers[job.keys[index]] = 0
                self.idle[job.keys[index]] = None
            else:
                self.free += 1
        job.held, job.rank = [], None
        self.running.remove(job)


@dataclass
class ReferenceStep:
    """A planned step: the load of each rank, the jobs that start, and those that gain a token."""

    loads: list[RankLoad] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    gains: list[tuple[Job, int]] = field(default_factory=list)  # with its number of starts


class Reference:
    """The scheduler, as an engine of `simulation.py`."""

    next_end_s: float | None = None  # nothing is transferred

    def __init__(self, sizes: EngineSizes) -> None:
        pages = sizes.pool_pages[0] - 1
        self.ranks = [Rank(pages, sizes.page_size, pages) for _ in range(sizes.dp_size)]
        self.waiting: deque[Job] = deque()
        self._num_retracts = self._num_recomputed = 0
        self._outputs: list[tuple[int, int, bool]] = []
        self._jobs: dict[int, Job] = {}
        self._num_rows, self._chunk_tokens = sizes.num_rows - 1, sizes.max_chunk_tokens

    def submit(self, number: int, request: LoadRequest) -> None:
        """Queue a request."""
        job = self._jobs[number] = Job(number, request, self.ranks[0].page_size)
        self.waiting.append(job)

    def abort(self, number: int) -> None:
        """End a request."""
        job = self._jobs.pop(number)
        if job.rank is None:
            self.waiting.remove(job)
        else:
            job.rank.release(job)

    def plan(self, now_s: float) -> ReferenceStep | None:
        """Plan a step; None if no request can run."""
        step = ReferenceStep()
        decoding = [self._decode(rank, step) for rank in self.ranks]
        chunks: list[list[tuple[int, int]]] = [[] for _ in self.ranks]
        for rank, own in zip(self.ranks, chunks, strict=True):
            for job in rank.running:
                self._chunk(job, own, step)
        while self.waiting:
            job = self.waiting[0]
            pinned = job.request.dp_rank
            open_ranks = [
                number
                for number, rank in enumerate(self.ranks)
                if pinned in (None, number) and len(rank.running) < self._num_rows
            ]
            if not open_ranks:
                break
            best = max(open_ranks, key=lambda number: self.ranks[number].available)
            if self._num_left(chunks[best]) <= 0 or not self._start(job, self.ranks[best]):
                break
            step.started.append(job.number)
            self._chunk(job, chunks[best], step)
        if not step.gains and not any(chunks):
            return None
        for (num_rows, kv_tokens), own in zip(decoding, chunks, strict=True):
            num_chunked = sum(count for count, _ in own)
            kv_read = sum(end for _, end in own)
            step.loads.append(RankLoad(num_rows, kv_tokens, num_chunked, kv_read, 0))
        return step

    def _start(self, job: Job, rank: Rank) -> bool:
        computed = job.computed  # before it was retracted, if it was
        if not rank.start(job):
            return False
        self._num_recomputed += max(computed - job.computed, 0)
        self.waiting.popleft()
        return True

    def _num_left(self, chunks: list[tuple[int, int]]) -> int:
        return self._chunk_tokens - sum(count for count, _ in chunks)

    def _decode(self, rank: Rank, step: ReferenceStep) -> tuple[int, int]:
        """Add a token to each decoding job, oldest first; return their number and KV tokens."""
        num_rows = kv_tokens = 0
        for job in list(rank.running):
            max_len = job.prompt_len + job.request.limit
            if job.rank is not rank or not job.is_decoding or job.length >= max_len:
                continue
            while job.rank is rank and not rank.grow(job, job.length):
                self._retract(rank)
            if job.rank is rank:
                num_rows, kv_tokens = num_rows + 1, kv_tokens + job.length
                job.computed = job.length
                self._gain(job, step)
        return num_rows, kv_tokens

    def _retract(self, rank: Rank) -> None:
        job = rank.running[-1]
        self._num_retracts += 1
        rank.release(job)
        self.waiting.appendleft(job)

    def _chunk(self, job: Job, chunks: list[tuple[int, int]], step: ReferenceStep) -> None:
        """Compute as much of the job's prompt as the step has tokens left for."""
        count = min(job.length - job.computed, self._num_left(chunks))
        if count <= 0 or job.is_decoding:
            return
        job.computed += count
        assert job.rank is not None
        job.rank.publish(job)
        chunks.append((count, job.computed))
        if job.computed == job.length:
            self._gain(job, step)

    def _gain(self, job: Job, step: ReferenceStep) -> None:
        job.length += 1
        job.is_decoding = True
        step.gains.append((job, job.num_starts))

    def launch(self, step: ReferenceStep, begin_s: float) -> None:
        """Run a step."""

    def read(self, step: ReferenceStep, end_s: float) -> None:
        """Apply the result of a step."""
        for job, num_starts in step.gains:
            if job.rank is None or job.num_starts != num_starts:
                continue
            job.num_read += 1
            is_end = job.known_len == job.request.end_len
            if is_end:
                del self._jobs[job.number]
                job.rank.release(job)
            self._outputs.append((job.number, 1, is_end))

    def outputs(self) -> list[tuple[int, int, bool]]:
        """Return (request, new tokens, whether it has ended) of what was read since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def utilization(self) -> float:
        """The share of pages that running requests hold."""
        return 1 - sum(rank.available for rank in self.ranks) / sum(
            rank.num_pages for rank in self.ranks
        )

    def counts(self) -> dict[str, int]:
        """Return the fields of `Result` that the simulation does not see."""
        return {
            "retracts": self._num_retracts,
            "preemptions": 0,
            "recomputed": self._num_recomputed,
        }
