"""The effect of narrower numbers, in weights or in the KV cache, on a demonstration model.

    python -m benchmarks.demo_model.precision [--model-path models/demo] [--num-questions 800]

Sends held-out questions of the demonstration tasks to an engine with each format of weights
(`--quantization`) and each kind of cache, in float32 otherwise. Compares with float32: the greedy
answers, and the log-probabilities of all tokens of the questions and of their right answers.
Prompts are computed in chunks of 128 tokens, so that most tokens read a cache.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from benchmarks.demo_model.model_folder import plain_messages
from benchmarks.demo_model.tasks import TASKS, TOOL_TASKS, held_out_questions, is_right
from sgl_jax.core.step_plan import Float32Array
from sgl_jax.engine.offline import Engine
from sgl_jax.models.quantization import AT_LOAD

CHUNK = 128
ANSWER_LEN = 96  # longer than any right answer


class Answers(NamedTuple):
    """An engine's answers to all questions."""

    num_right: int
    output_ids: list[list[int]]
    question_logprobs: Float32Array  # [tokens of all questions but their first]
    answer_logprobs: Float32Array  # [tokens of all right answers]


def ask(
    model_path: str, num_questions: int, seed: int, tasks: Sequence[str] = TASKS, **formats: Any
) -> Answers:
    """Ask an engine with formats `quantization`, `kv_cache_dtype` and `kv_cache_scales`."""
    questions = held_out_questions(num_questions, seed=seed, tasks=tuple(tasks))
    with Engine(
        model_path,
        dtype="float32",
        context_length=2048,
        chunked_prefill_size=CHUNK,
        max_running_requests=8,
        max_total_tokens=16384,
        page_size=32,
        warmup="none",
        **formats,
    ) as engine:
        tokenizer = engine.tokenizer
        prompts = [
            tokenizer.apply_chat_template(plain_messages(q.messages, q.tools)) for q in questions
        ]
        greedy = {"temperature": 0, "max_new_tokens": ANSWER_LEN}
        found = engine.generate(input_ids=prompts, sampling_params=greedy, progress=False)
        wanted = [
            prompt + tokenizer.encode(f"{question.answer}<|im_end|>", add_special_tokens=False)
            for prompt, question in zip(prompts, questions, strict=True)
        ]
        judged = engine.generate(
            input_ids=wanted,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            progress=False,
        )
    of_questions, of_answers = [], []
    for one, prompt in zip(judged, prompts, strict=True):
        logprobs = [token.logprob for token in one.prompt_logprobs]
        of_questions += logprobs[1 : len(prompt)]
        of_answers += logprobs[len(prompt) :]
    return Answers(
        sum(is_right(q, one.text) for q, one in zip(questions, found, strict=True)),
        [one.output_ids for one in found],
        np.array(of_questions, np.float32),
        np.array(of_answers, np.float32),
    )


def report(name: str, found: Answers, exact: Answers) -> str:
    """Return a line of the table.

    It has the share of right answers, the perplexity of the answers' and of the questions' tokens,
    mean and 99th percentile of the change of the questions' log-probabilities from `exact`, and the
    number of output tokens that differ.
    """
    change = np.abs(found.question_logprobs - exact.question_logprobs)
    pairs = [
        pair
        for ours, theirs in zip(found.output_ids, exact.output_ids, strict=True)
        for pair in zip_longest(ours, theirs)
    ]
    differing = sum(ours != theirs for ours, theirs in pairs)
    right = found.num_right / len(found.output_ids)
    of_answers, of_questions = (
        np.exp(-own.mean()) for own in (found.answer_logprobs, found.question_logprobs)
    )
    return (
        f"{name:26} {right:>6.1%} {of_answers:>9.4f} {of_questions:>9.4f} {change.mean():>11.4f} "
        f"{np.quantile(change, 0.99):>10.4f} {differing:>7} of {len(pairs)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask with each format, compare and print; return the exit code."""
    parser = argparse.ArgumentParser(description="The effect of narrower weights and KV caches.")
    parser.add_argument("--model-path", default="models/demo")
    parser.add_argument("--kv-cache-scales", help="also try fp8_e4m3 with these scales")
    parser.add_argument("--num-questions", type=int, default=800)
    parser.add_argument("--seed", type=int, default=1, help="of the questions (1)")
    all_tasks = (*TASKS, *TOOL_TASKS)
    parser.add_argument("--tasks", nargs="+", choices=all_tasks, default=all_tasks, metavar="TASK")
    options = parser.parse_args(argv)
    formats: dict[str, dict[str, str]] = {
        "float32": {},
        **{f"{scheme} weights": {"quantization": scheme} for scheme in AT_LOAD},
        **{f"{kind} cache": {"kv_cache_dtype": kind} for kind in ("bfloat16", "fp8_e4m3")},
    }
    if options.kv_cache_scales:
        scales = {"kv_cache_scales": options.kv_cache_scales}
        formats["fp8_e4m3 cache, scaled"] = formats["fp8_e4m3 cache"] | scales
    print(f"{'':26} {'':>6} {'perplexity of':^19} {'change of logp':^22} {'output tokens':>13}")
    print(
        f"{'numbers':26} {'right':>6} {'answers':>9} {'questions':>9} {'mean':>11} "
        f"{'99 % below':>10} differing"
    )
    exact: Answers | None = None
    for name, own in formats.items():
        found = ask(options.model_path, options.num_questions, options.seed, options.tasks, **own)
        exact = exact or found
        print(report(name, found, exact), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
