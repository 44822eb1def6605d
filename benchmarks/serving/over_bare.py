"""The whole server's speed over the bare programs': `python -m benchmarks.serving.over_bare`.

A server in a separate process serves a few streams over HTTP, each of which sends its next request
when its last one has ended. The same compiled programs compute the same tokens, launched one after
another with nothing between them: the prompts in as few steps as hold them, then a decode step of
all streams for each token. Blocks come in the order served, bare, bare, served.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.device.__main__ import decode_plan
from benchmarks.device.bare_steps import time_bare_steps
from benchmarks.serving.rounds import Load, parse_options, print_rounds, server
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.executor.model_executor import ModelExecutor


def bare_seconds(load: Load, executor: ModelExecutor) -> float:
    """Return seconds of the bare programs for the same tokens, one request per stream at once."""
    sizes = executor.sizes
    at_once = max(1, min(sizes.max_chunk_tokens // load.prompt_len, load.num_streams))
    prefill = prefill_plan(sizes, at_once, load.prompt_len)
    middle = load.prompt_len + load.output_len // 2
    decode = decode_plan(sizes, load.num_streams, middle)
    return load.num_requests * (
        time_bare_steps(executor, prefill, -(-load.num_streams // at_once))
        + time_bare_steps(executor, decode, load.output_len - 1)
    )


def prefill_plan(sizes: EngineSizes, num_prompts: int, prompt_len: int) -> StepPlan:
    """Return a step of whole prompts from their first tokens on."""
    plan = decode_plan(sizes, num_prompts, prompt_len)
    (rank,) = plan.ranks
    rank = rank._replace(
        kv_starts=np.zeros_like(rank.rows),
        q_lens=np.full_like(rank.rows, prompt_len),
        num_decode=0,
    )
    return replace(plan, ranks=(rank,))


def main(argv: Sequence[str] | None = None) -> None:
    """Print tokens per second both ways, and their ratio."""
    load, model_path, num_rounds = parse_options(__doc__, argv)
    rng = np.random.default_rng(0)
    args = ServerArgs(model_path=str(model_path), warmup="none", decode_log_interval=0)
    executor = ModelExecutor(args)
    flags = ("--model-path", args.model_path, "--decode-log-interval", "0")
    with server(flags) as port:

        def serve() -> float:
            prompts = load.random_prompts(rng, executor.sizes.vocab_size)
            return asyncio.run(load.serve(port, prompts))

        def times() -> tuple[float, float]:
            served_s = serve()
            bare_s = bare_seconds(load, executor) + bare_seconds(load, executor)
            return bare_s, served_s + serve()

        serve(), bare_seconds(load, executor)  # warms caches
        print_rounds(load, ("bare", "served"), times, num_rounds)


if __name__ == "__main__":
    main()
