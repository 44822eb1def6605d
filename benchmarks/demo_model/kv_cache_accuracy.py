"""The effect of a narrower KV cache: `python -m benchmarks.demo_model.kv_cache_accuracy`.

    python -m benchmarks.demo_model.kv_cache_accuracy [--kv-cache-scales FILE] [--num-questions 60]

Asks held-out questions of the demonstration tasks with each kind of cache, in float32 otherwise,
and compares with a float32 cache: the log-probabilities of the prompts' tokens, and the greedy
answers' tokens. Prompts are computed in chunks of 128 tokens, so that most tokens read a cache.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from benchmarks.demo_model.tasks import held_out_questions
from sgl_jax.core.step_plan import Float32Array
from sgl_jax.engine.offline import Engine

CHUNK = 128
ANSWER_LEN = 24


class Answers(NamedTuple):
    """An engine's answers to all questions."""

    prompt_logprobs: Float32Array  # [tokens of all prompts that have one]
    output_ids: list[list[int]]


def ask(model_path: str, num_questions: int, seed: int, **cache: Any) -> Answers:
    """Ask an engine with such a cache: `kv_cache_dtype`, `kv_cache_scales`."""
    questions = held_out_questions(num_questions, seed=seed)
    with Engine(
        model_path,
        dtype="float32",
        context_length=2048,
        chunked_prefill_size=CHUNK,
        max_running_requests=4,
        max_total_tokens=8192,
        page_size=32,
        warmup="none",
        **cache,
    ) as engine:
        prompts = [engine.tokenizer.apply_chat_template(q.messages) for q in questions]
        found = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": ANSWER_LEN},
            return_logprob=True,
            logprob_start_len=0,
        )
    logprobs = [token.logprob for one in found for token in one.prompt_logprobs[1:]]
    return Answers(np.array(logprobs, np.float32), [one.output_ids for one in found])


def report(name: str, found: Answers, exact: Answers) -> str:
    """A line of the table: mean log-probability of the prompts' tokens, mean and 99th percentile
    of its difference from `exact`, and how many output tokens differ."""
    change = np.abs(found.prompt_logprobs - exact.prompt_logprobs)
    pairs = [
        pair
        for ours, theirs in zip(found.output_ids, exact.output_ids, strict=True)
        for pair in zip_longest(ours, theirs)
    ]
    differing = sum(ours != theirs for ours, theirs in pairs)
    return (
        f"{name:22} {found.prompt_logprobs.mean():9.4f} {change.mean():12.4f} "
        f"{np.quantile(change, 0.99):11.4f} {differing:>9} of {len(pairs)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print; returns the exit code."""
    parser = argparse.ArgumentParser(description="What a narrower KV cache changes.")
    parser.add_argument("--model-path", default="models/demo")
    parser.add_argument("--kv-cache-scales", help="also try fp8_e4m3 with these scales")
    parser.add_argument("--num-questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the questions (1)")
    options = parser.parse_args(argv)
    kinds: dict[str, dict[str, str]] = {
        kind: {"kv_cache_dtype": kind} for kind in ("float32", "bfloat16", "fp8_e4m3")
    }
    if options.kv_cache_scales:
        scales = {"kv_cache_scales": options.kv_cache_scales}
        kinds["fp8_e4m3, with scales"] = kinds["fp8_e4m3"] | scales
    print(f"{'cache':22} {'mean logp':>9} {'mean change':>12} {'99 % below':>11} tokens differing")
    exact: Answers | None = None
    for name, cache in kinds.items():
        found = ask(options.model_path, options.num_questions, options.seed, **cache)
        exact = exact or found
        print(report(name, found, exact), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
