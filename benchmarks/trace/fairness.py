"""Tokens served to ten tenants that overload an engine, one with ten times its share.

usage: python -m benchmarks.trace.fairness RECORDING [--seconds 600]

Requests of recorded traffic go through the real scheduler on a logical clock, with a fake executor.
They arrive at twice the recorded rate, about three times as fast as the engine serves them. Each
conversation belongs to one tenant, and the first tenant has ten times as many conversations as each
other tenant. The load runs with --fair-share off and with tokens. Jain's index is of the weighted
tokens served to each tenant (computed prompt tokens count once, output tokens twice): 1 if all were
served alike, 0.1 if one was served everything.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sgl_jax.bench.trace.fake_executor import DistinctAnswers
from sgl_jax.bench.trace.reading import VOCAB_SIZE, TracedRequest, prompt_tokens, read_trace
from sgl_jax.bench.trace.step_time import LinearStepTime, step_loads
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import StepHandle, StepPlan
from sgl_jax.scheduler.events import PlanStep, ResultRead, TakeOutputs
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.scheduler.tenants import OUTPUT_WEIGHT, PROMPT_WEIGHT

NUM_TENANTS = 10
SHARE = 10  # conversations of the first tenant for each of another one
IDLE_S = 0.01
SPEED = 2.0  # of arrivals
STEP_TIME = LinearStepTime(5.0, 40.0, 50.0, 10.0)
SIZES = EngineSizes(
    dp_size=1,
    page_size=64,
    pool_pages=(8192,),
    num_rows=33,
    max_context_len=131_072,
    max_step_tokens=4096 + 32,
    max_prompt_logprob_tokens=128,
    vocab_size=VOCAB_SIZE,
)


class Outcome(NamedTuple):
    jain: float
    tokens_per_s: float  # prompt and output tokens of all tenants
    hit_rate: float
    served: list[int]  # weighted tokens by tenant


def tenant_of(request: TracedRequest) -> Tenant:
    """Return the tenant of a request's conversation."""
    # The first block is a system prompt that all have in common.
    conversation = request.block_ids[min(1, len(request.block_ids) - 1)]
    number = conversation % (SHARE + NUM_TENANTS - 1)
    return Tenant(name=str(max(number - SHARE + 1, 0)))


def run(requests: Sequence[TracedRequest], fair_share: str, seconds: float) -> Outcome:
    """Serve for `seconds` seconds of the logical clock, at most until the last arrival."""
    args = SchedulerArgs(fair_share=fair_share, max_queued_requests=len(requests))
    scheduler, executor = Scheduler(SIZES, args), DistinctAnswers(SIZES)
    arriving = deque(enumerate(requests))
    unread: deque[tuple[StepPlan, StepHandle]] = deque()
    now_s = 0.0
    while now_s < seconds and arriving:
        while arriving and arriving[0][1].arrival_ms <= 1e3 * SPEED * now_s:
            number, request = arriving.popleft()
            sampling = SamplingParams(max_new_tokens=request.output_len, ignore_eos=True)
            scheduler.handle(
                GenerateRequest(
                    rid=str(number),
                    input_ids=prompt_tokens(request).tolist(),
                    sampling=sampling,
                    tenant=tenant_of(request),
                )
            )
        plan = scheduler.handle(PlanStep())
        now_s += IDLE_S if plan is None else STEP_TIME.seconds(step_loads(plan))
        if plan is not None:
            unread.append((plan, executor.launch(plan)))
        if unread and (plan is None or len(unread) > 1):
            done, handle = unread.popleft()
            scheduler.handle(ResultRead(done.step_id, executor.result(handle)))
        scheduler.handle(TakeOutputs())
    counts = [scheduler.tenants()[str(tenant)] for tenant in range(NUM_TENANTS)]
    served = [
        PROMPT_WEIGHT * (count.prompt_tokens - count.cached_tokens)
        + OUTPUT_WEIGHT * count.generated_tokens
        for count in counts
    ]
    tokens = sum(count.prompt_tokens + count.generated_tokens for count in counts)
    cached = sum(count.cached_tokens for count in counts)
    shares = np.array(served, float)
    return Outcome(
        jain=float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())),
        tokens_per_s=tokens / now_s,
        hit_rate=cached / sum(count.prompt_tokens for count in counts),
        served=served,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recording", type=Path, help="recorded traffic, JSON lines")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the logical clock")
    words = parser.parse_args()
    requests = read_trace(words.recording)
    off, tokens = (run(requests, share, words.seconds) for share in ("off", "tokens"))
    for name, outcome in (("off", off), ("tokens", tokens)):
        parts = " ".join(f"{part / 1e3:.0f}k" for part in outcome.served)
        print(
            f"--fair-share {name}: Jain's index {outcome.jain:.3f}, {outcome.tokens_per_s:.0f} "
            f"tokens/s, hit rate {outcome.hit_rate:.3f}, served {parts}"
        )
    print(
        f"tokens against off: throughput {tokens.tokens_per_s / off.tokens_per_s:.3f}, hit rate "
        f"{tokens.hit_rate / off.hit_rate:.3f}"
    )


if __name__ == "__main__":
    main()
