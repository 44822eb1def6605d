"""What the host costs: scheduling a step, matching prefixes, moving pages, evicting, checking.

No device and no jax: a fake executor answers at once, so that all time measured is the host's.
Times are processor time of this thread, which other work on the machine does not blur. It never
decides whether a time is good enough.

    python -m sgl_jax.bench.host [--quick]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.mem_cache.ledger import check_balance
from sgl_jax.mem_cache.page_allocator import PageAllocator
from sgl_jax.mem_cache.radix_cache import RadixCache
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.mem_cache.tree_component import LeaseOffer
from sgl_jax.scheduler.config import SchedulerConfig
from sgl_jax.scheduler.fake_executor import FakeExecutor
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.scheduler import Scheduler

DP_SIZE = 8
ROWS_PER_RANK = 256
CONTEXT_LEN = 1000
VOCAB_SIZE = 32_000
_ROW = 1


class Timing(NamedTuple):
    """One line of the table: `num_ops` operations took `seconds`, one sample for each repeat."""

    name: str
    seconds: list[float]
    num_ops: int

    @property
    def us_per_call(self) -> float:
        """Median microseconds of one timed call."""
        return median(self.seconds) * 1e6

    @property
    def ops_per_s(self) -> float:
        """Operations per second at the median."""
        return self.num_ops / median(self.seconds)

    def line(self) -> str:
        """The line of the table."""
        slowest = max(self.seconds) * 1e6
        return (
            f"{self.name:<62} {self.us_per_call:>11,.1f} {slowest:>11,.1f} {self.ops_per_s:>13,.0f}"
        )


HEADER = f"{'':<62} {'us, median':>11} {'us, worst':>11} {'operations/s':>13}"


def timed(name: str, call: Callable[[], object], *, repeats: int, num_ops: int = 1) -> Timing:
    """Time `call` `repeats` times, once more before that to warm up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return Timing(name, seconds, num_ops)


# -- the scheduler's step -------------------------------------------------------------------------


def decoding_scheduler(
    page_size: int, dp_size: int = DP_SIZE
) -> tuple[Scheduler, Callable[[], None]]:
    """A scheduler with every row of every rank decoding at about `CONTEXT_LEN` tokens, and one
    turn of its loop: plan, commit the step before, take the outputs."""
    tokens_per_row = 2 * CONTEXT_LEN
    sizes = EngineSizes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=1 + ROWS_PER_RANK * tokens_per_row // page_size,
        num_rows=ROWS_PER_RANK + 1,
        max_context_len=tokens_per_row,
        max_step_tokens=16_384 + ROWS_PER_RANK,
        max_prompt_logprob_tokens=1024,
        vocab_size=VOCAB_SIZE,
    )
    config = SchedulerConfig(chunked_prefill_size=16_384, schedule_policy="fcfs")
    scheduler = Scheduler(sizes, config)
    rng = np.random.default_rng(0)
    for i in range(dp_size * ROWS_PER_RANK):
        prompt = rng.integers(0, VOCAB_SIZE, CONTEXT_LEN - 100).tolist()
        sampling = SamplingParams(max_new_tokens=CONTEXT_LEN)
        scheduler.submit(GenerateRequest(rid=str(i), input_ids=prompt, sampling=sampling))
    turn = _loop_of(scheduler)
    for _ in range(100):
        turn()
    assert scheduler.num_running == dp_size * ROWS_PER_RANK, "the load does not fit the sizes"
    assert scheduler.num_waiting == 0
    return scheduler, turn


def _loop_of(scheduler: Scheduler) -> Callable[[], None]:
    executor = FakeExecutor(scheduler.sizes)
    before: tuple[StepPlan, StepHandle] | None = None

    def turn() -> None:
        nonlocal before
        plan = scheduler.plan()
        assert plan is not None
        launched = (plan, executor.launch(plan))
        if before is not None:
            done, handle = before
            scheduler.commit(done, executor.result(handle))
        scheduler.take_outputs()
        before = launched

    return turn


def bench_steps(page_size: int, repeats: int) -> Iterator[Timing]:
    """Host time of a decode step, and of proving its books."""
    scheduler, turn = decoding_scheduler(page_size)
    load = f"{DP_SIZE} ranks x {ROWS_PER_RANK} rows, page {page_size}"
    num_tokens = DP_SIZE * ROWS_PER_RANK
    yield timed(f"decode step, {load}", turn, repeats=repeats, num_ops=num_tokens)
    yield timed(f"check_balance of all ranks, {load}", scheduler.check_balance, repeats=repeats)
    yield timed(f"audit of all ranks, {load}", scheduler.audit, repeats=5)


def busy_check_line(dp_size: int, page_size: int, repeats: int) -> str:
    """What `--check-memory busy` adds to a decode step: with and without, in turns, in one run."""
    scheduler, turn = decoding_scheduler(page_size, dp_size)

    def checked_turn() -> None:
        turn()
        scheduler.check_balance()

    bare: list[float] = []
    checked: list[float] = []
    for _ in range(repeats):
        bare += timed_once(turn)
        checked += timed_once(checked_turn)
    share = median(checked) / median(bare) - 1
    name = f"busy check share of a step, {dp_size} x {ROWS_PER_RANK} rows, page {page_size}"
    with_us, without_us = median(checked) * 1e6, median(bare) * 1e6
    return f"{name:<62} {share:>11.1%} ({with_us:,.1f} us, {without_us:,.1f} without)"


# -- the queue ------------------------------------------------------------------------------------


def bench_full_queue(repeats: int) -> Iterator[Timing]:
    """Steps that decode and admit while 2,000 requests wait, longest cached prefix first."""
    num_waiting = 2000
    sizes = EngineSizes(
        dp_size=DP_SIZE,
        page_size=16,
        num_pages=40_000,
        num_rows=ROWS_PER_RANK + 1,
        max_context_len=4000,
        max_step_tokens=2048 + ROWS_PER_RANK,
        max_prompt_logprob_tokens=1024,
        vocab_size=VOCAB_SIZE,
    )
    config = SchedulerConfig(chunked_prefill_size=2048, max_queued_requests=2 * num_waiting)
    scheduler = Scheduler(sizes, config)
    rng = np.random.default_rng(0)
    stems = rng.integers(0, VOCAB_SIZE, (20, 1500))
    ids = count()

    def fill_queue() -> None:
        while scheduler.num_waiting < num_waiting:
            tail = rng.integers(0, VOCAB_SIZE, 500)
            prompt = np.concatenate([stems[rng.integers(20)], tail]).tolist()
            sampling = SamplingParams(max_new_tokens=30)
            scheduler.submit(
                GenerateRequest(rid=str(next(ids)), input_ids=prompt, sampling=sampling)
            )

    turn = _loop_of(scheduler)
    seconds: list[float] = []
    for _ in range(20 + repeats):
        fill_queue()
        seconds += timed_once(turn)
    name = f"step that admits, {DP_SIZE} ranks, {num_waiting:,} waiting, 2,000 tokens each"
    yield Timing(name, seconds[20:], 1)


# -- the tree -------------------------------------------------------------------------------------


class LoadedTree:
    """A radix cache with `num_entries` prompts of 2,000 tokens in families that share half."""

    def __init__(self, page_size: int, num_entries: int) -> None:
        self.page_size = page_size
        self.prompt_len = 2000 // page_size * page_size
        self.allocator = PageAllocator(2 + (num_entries + 2000) * self.prompt_len // page_size)
        self.cache = RadixCache(self.allocator, page_size)
        self.rng = np.random.default_rng(0)
        self.stems = self.rng.integers(0, VOCAB_SIZE, (100, self.prompt_len // 2), np.int32)
        for _ in range(num_entries):
            self.insert(self.prompt())

    def prompt(self) -> np.ndarray:
        """A prompt that shares its first half with others."""
        stem = self.stems[self.rng.integers(len(self.stems))]
        tail = self.rng.integers(0, VOCAB_SIZE, self.prompt_len - len(stem), np.int32)
        return np.concatenate([stem, tail])

    def insert(self, tokens: np.ndarray) -> None:
        """Match, take pages for the rest, insert, unlock: what one request costs the tree."""
        match = self.cache.match_prefix(tokens[:-1])
        own = self.allocator.alloc(len(tokens) // self.page_size - len(match.pages), _ROW)
        offer = LeaseOffer(_ROW, match.length, np.concatenate([match.pages, own]))
        kept = self.cache.accept(tokens, offer)
        for node in (match.node, kept.node if kept else None):
            if node is not None:
                self.cache.unlock(node)


def bench_tree(page_size: int, repeats: int) -> Iterator[Timing]:
    """Peek, and match plus insert, of 2,000-token prompts in a tree of thousands."""
    tree = LoadedTree(page_size, num_entries=4000)
    prompts = iter([tree.prompt() for _ in range(2 * repeats + 2)])
    where = f"2,000 tokens, tree of 4,000 entries, page {page_size}"
    yield timed(f"peek, {where}", lambda: tree.cache.peek(next(prompts)), repeats=repeats)
    yield timed(f"match + insert, {where}", lambda: tree.insert(next(prompts)), repeats=repeats)


def bench_eviction(edge_pages: int, repeats: int) -> Iterator[Timing]:
    """Evicting 1,000 of 100,000 pages that lie in edges of `edge_pages`."""
    num_pages, num_evicted = 100_000, 1000
    allocator = PageAllocator(num_pages + 1)
    cache = RadixCache(allocator, 1)
    for first in range(0, num_pages, edge_pages):
        tokens = np.full(edge_pages, first, np.int32)
        kept = cache.accept(tokens, LeaseOffer(_ROW, 0, allocator.alloc(edge_pages, _ROW)))
        assert kept is not None
        assert kept.node is not None
        cache.unlock(kept.node)
    name = f"evict {num_evicted:,} of {num_pages:,} pages, edges of {edge_pages}"
    repeats = min(repeats, num_pages // num_evicted // 2)
    yield timed(name, lambda: cache.evict(num_evicted), repeats=repeats, num_ops=num_evicted)


# -- pages ----------------------------------------------------------------------------------------


def bench_allocator(repeats: int) -> Iterator[Timing]:
    """Taking and giving back pages of a pool of 65,536."""
    allocator = PageAllocator(65_537)
    for num_pages in (1, ROWS_PER_RANK, 65_536):
        held: list[np.ndarray] = []
        owners = np.full(num_pages, _ROW, np.int32)

        def alloc(owners: np.ndarray = owners, held: list[np.ndarray] = held) -> None:
            held.append(allocator.alloc_each(owners))

        def free(held: list[np.ndarray] = held) -> None:
            allocator.free(held.pop(), _ROW)

        taken, given = [], []
        for _ in range(repeats):
            taken += timed_once(alloc)
            given += timed_once(free)
        yield Timing(f"alloc {num_pages:,} of 65,536 pages", taken, num_pages)
        yield Timing(f"free {num_pages:,} of 65,536 pages", given, num_pages)


def timed_once(call: Callable[[], object]) -> list[float]:
    """Seconds that one call took, as a list of one."""
    start = time.thread_time()
    call()
    return [time.thread_time() - start]


def bench_balance(repeats: int) -> Iterator[Timing]:
    """Proving the counts of one rank whose rows are all held."""
    sizes = EngineSizes(1, 16, 20_000, ROWS_PER_RANK + 1, 2000, 4096, 1024, VOCAB_SIZE)
    memory = RankMemory(0, sizes)
    rows = []
    for token in range(ROWS_PER_RANK):
        rows.append(memory.open_lease(np.full(10, token, np.int32)).row)
    fits = memory.grow_rows(np.array(rows, np.int32), np.full(len(rows), CONTEXT_LEN, np.int32))
    assert fits, "the load does not fit the sizes"
    name = f"check_balance of one rank, {ROWS_PER_RANK} rows held"
    yield timed(name, lambda: check_balance(memory), repeats=repeats)


# -- sessions -------------------------------------------------------------------------------------


class IdleSessions:
    """A rank with `num_idle` idle sessions of three pages each, two of them on the tree."""

    def __init__(self, num_idle: int) -> None:
        sizes = EngineSizes(
            dp_size=1,
            page_size=16,
            num_pages=1 + 3 * num_idle + 1000,
            num_rows=num_idle + 50,
            max_context_len=80_000,
            max_step_tokens=16_384,
            max_prompt_logprob_tokens=1024,
            vocab_size=VOCAB_SIZE,
        )
        config = SchedulerConfig(chunked_prefill_size=16_384, session_memory_fraction=0.99)
        self.rank = RankScheduler(0, sizes, config)
        self.ids = count()
        self.names = [f"session {number}" for number in range(num_idle)]
        self.fill()

    def fill(self) -> None:
        """Every session that is not idle has a turn of 40 tokens, and is."""
        memory = self.rank.memory
        for number, name in enumerate(self.names):
            if memory.cache.holds(name):
                continue
            tokens = np.full(40, number, np.int32)
            lease = memory.open_lease(tokens[:-1])
            memory.cache.bind(name, lease)
            row, length = np.array([lease.row], np.int32), np.array([40], np.int32)
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
            seconds += timed_once(partial(beside.rank.finish, row))
        yield Timing(f"finish beside {num_beside:,} idle sessions", seconds, 1)
    sessions, seconds = IdleSessions(num_idle), []
    memory = sessions.rank.memory
    for _ in range(min(repeats, 20)):
        num_pages = memory.num_available_pages + 3 * num_evicted
        request = sessions.request(16 * num_pages - 1)
        start = time.thread_time()
        row = sessions.admit(request)
        seconds.append(time.thread_time() - start)
        assert memory.cache.num_idle == num_idle - num_evicted
        sessions.rank.end(row)
        sessions.fill()
    name = f"evict {num_evicted:,} of {num_idle:,} idle sessions for one request"
    yield Timing(name, seconds, num_evicted)


def all_timings(repeats: int) -> Iterator[Timing]:
    """Every line of the table, each measured when it is asked for."""
    for page_size in (16, 1):
        yield from bench_steps(page_size, repeats)
    yield from bench_full_queue(min(repeats, 100))
    for page_size in (16, 1):
        yield from bench_tree(page_size, repeats)
    yield from bench_eviction(1, repeats)
    yield from bench_eviction(1000, repeats)
    yield from bench_allocator(repeats)
    yield from bench_balance(repeats)
    yield from bench_sessions(repeats)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m sgl_jax.bench.host", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 repeats of each instead of 200")
    repeats = 10 if parser.parse_args().quick else 200
    print(HEADER)
    for timing in all_timings(repeats):
        print(timing.line(), flush=True)
    for dp_size in (1, DP_SIZE):
        print(busy_check_line(dp_size, 16, repeats), flush=True)


if __name__ == "__main__":
    main()
