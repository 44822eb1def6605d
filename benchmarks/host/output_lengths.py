"""The cost of unknown output lengths: tokens computed twice, and idle memory.

    python -m benchmarks.host.output_lengths [--trace shared/traces/conversation.jsonl] [LOAD ...]

Requests with many distributions of lengths pass through the real scheduler, with a fake executor
that ends each after its number of tokens. All wait from the start, no two share a prompt, and the
pages suffice for fewer requests than there are rows. No time is measured: the results depend only
on the code.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.host.steps import StepLoop
from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.bench.trace.reading import TracedRequest, read_trace
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.scheduler.scheduler import Scheduler

PAGE_SIZE = 16
CHUNK_TOKENS = 2048
VOCAB_SIZE = 32_000
STOP_ID = VOCAB_SIZE - 1
_MAX_CONTEXT_LEN = 140_000


class Lengths(NamedTuple):
    prompt: int
    output: int
    limit: int  # the request's `max_new_tokens`


class Load(NamedTuple):
    """Requests, and the rank that serves them."""

    requests: list[Lengths]
    num_pages: int = 1500
    num_rows: int = 32


class Outcome(NamedTuple):
    num_computed: int  # tokens, prompts and outputs
    num_needed: int  # of these
    num_retracts: int
    num_steps: int
    num_generated: int

    def line(self, name: str) -> str:
        return (
            f"{name:<36} {self.num_computed / self.num_needed:>8.3f} {self.num_retracts:>8,} "
            f"{self.num_steps:>8,} {self.num_needed / self.num_steps:>12.2f} "
            f"{self.num_generated / self.num_steps:>12.2f}"
        )


HEADER = (
    f"{'load':<36} {'computed':>8} {'retracts':>8} {'steps':>8} {'needed/step':>12} "
    f"{'output/step':>12}"
)


class KnownEnds(FakeExecutor):
    """A fake executor that ends the request of seed i after `output_lens[i]` tokens."""

    def __init__(self, sizes: EngineSizes, output_lens: list[int]) -> None:
        super().__init__(sizes)
        self.num_computed = 0
        self._output_lens = output_lens
        self._seeds = np.zeros(sizes.num_rows, np.int64)
        self._ends = np.zeros(sizes.num_rows, np.int64)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Make up the step's result."""
        handle = super().launch(plan)
        (part,), (result,) = plan.ranks, self.result(handle)
        for admission in part.admissions:
            self._seeds[admission.row] = admission.seed
            output_len = self._output_lens[admission.seed]
            self._ends[admission.row] = admission.prompt_len + output_len
        self.num_computed += int(part.q_lens.sum())
        num_known = part.kv_starts + part.q_lens + 1
        own = (num_known * 31 + self._seeds[part.rows] * 17) % STOP_ID
        tokens = np.where(num_known >= self._ends[part.rows], STOP_ID, own)
        result.tokens[:, 0] = np.where(part.samples, tokens, -1)
        return handle


def run(load: Load, args: SchedulerArgs) -> Outcome:
    sizes = EngineSizes(
        dp_size=1,
        page_size=PAGE_SIZE,
        pool_pages=(1 + load.num_pages,),
        num_rows=1 + load.num_rows,
        max_context_len=_MAX_CONTEXT_LEN,
        max_step_tokens=CHUNK_TOKENS + load.num_rows,
        max_prompt_logprob_tokens=CHUNK_TOKENS,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(sizes, args)
    executor = KnownEnds(sizes, [request.output for request in load.requests])
    rng = np.random.default_rng(0)
    for i, request in enumerate(load.requests):
        sampling = SamplingParams(
            max_new_tokens=request.limit, seed=i, stop_token_ids=(STOP_ID,), temperature=0.0
        )
        prompt = rng.integers(0, STOP_ID, request.prompt).tolist()
        scheduler.handle(GenerateRequest(rid=str(i), input_ids=prompt, sampling=sampling))
    loop = StepLoop(scheduler, executor)
    while not scheduler.is_idle:
        loop.turn()
    counters = scheduler.counters()
    num_generated = sum(request.output for request in load.requests)
    num_needed = num_generated + sum(request.prompt - 1 for request in load.requests)
    return Outcome(
        executor.num_computed,
        num_needed,
        counters["requests_retracted"],
        counters["steps_planned"],
        num_generated,
    )


def _fixed(output: int, limit: int, count: int = 96, prompt: int = 100) -> Load:
    return Load([Lengths(prompt, output, limit)] * count)


def _drawn(seed: int, count: int, draw: Callable[[np.random.Generator], Lengths]) -> Load:
    rng = np.random.default_rng(seed)
    return Load([draw(rng) for _ in range(count)])


def _two_kinds(rng: np.random.Generator) -> Lengths:
    """Draw lengths: one request in four has a long output; all have the same limit."""
    output = int(rng.integers(5000, 9000)) if rng.random() < 0.25 else int(rng.integers(50, 400))
    return Lengths(100, output, 16_000)


LOADS: dict[str, Callable[[], Load]] = {
    "7,000 of 16,000": lambda: _fixed(7000, 16_000),
    "7,000 of 8,000": lambda: _fixed(7000, 8000),
    "7,000, pages for 13": lambda: _fixed(7000, 16_000)._replace(num_pages=6000),
    "7,000, long prompts": lambda: _fixed(7000, 16_000, prompt=2000),
    "long and short, one limit": lambda: _drawn(1, 300, _two_kinds),
    "200 of 16,000": lambda: _fixed(200, 16_000, count=600)._replace(num_pages=1100, num_rows=256),
    "just the limit, 1,000": lambda: _fixed(1000, 1000, count=300),
    "just the limit, 100 to 3,000": lambda: _drawn(
        2, 300, lambda rng: Lengths(100, n := int(rng.integers(100, 3000)), n)
    ),
    "300, then 7,000": lambda: Load(
        [Lengths(100, 300, 16_000)] * 300 + [Lengths(100, 7000, 16_000)] * 60
    ),
    "7,000, then 300": lambda: Load(
        [Lengths(100, 7000, 16_000)] * 60 + [Lengths(100, 300, 16_000)] * 600
    ),
}


def recorded(trace: list[TracedRequest]) -> dict[str, Callable[[], Load]]:
    exact = [Lengths(r.input_len, r.output_len, r.output_len) for r in trace]
    asked = [request._replace(limit=max(4096, request.output)) for request in exact]
    short = [request._replace(prompt=min(request.prompt, 200)) for request in asked]
    return {
        "recorded, just the limit": lambda: Load(exact, 25_000, 256),
        "recorded, of 4,096": lambda: Load(asked, 25_000, 256),
        "recorded, of 4,096, short prompts": lambda: Load(short, 1500, 256),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.output_lengths", description=__doc__
    )
    parser.add_argument("loads", nargs="*", metavar="LOAD", help="all")
    parser.add_argument("--trace", type=Path, help="recorded traffic, for loads of its lengths")
    parser.add_argument("--num-requests", type=int, default=1000, help="of the trace")
    parser.add_argument("--schedule-conservativeness", type=float, default=1.0)
    options = parser.parse_args()
    loads = dict(LOADS)
    if options.trace is not None:
        loads |= recorded(read_trace(options.trace, options.num_requests))
    args = SchedulerArgs(
        schedule_conservativeness=options.schedule_conservativeness, max_queued_requests=100_000
    )
    print(HEADER)
    for name in options.loads or loads:
        print(run(loads[name](), args).line(name), flush=True)


if __name__ == "__main__":
    main()
