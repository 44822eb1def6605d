r"""Tokens per decode step with drafts. Drafts must not change any answer.

    python -m benchmarks.demo_model.speculation --num-questions 40
    python -m benchmarks.demo_model.speculation --model-path models/demo_hybrid \
        --speculative-algorithm MTP --num-draft-tokens 3 --answer-tokens 200
    python -m benchmarks.demo_model.speculation --speculative-algorithm EAGLE3 \
        --speculative-draft-model-path models/demo_eagle3

Runs a demonstration model's questions twice, with and without drafts. Questions run one at a time,
and each step's result is read before the next step, so that every decode step serves one request. A
first run of a single token measures the prefill separately. Exits with 1 if any output differs or
if all tasks together yield fewer tokens per decode step than required. The speed-up covers the
whole answer with its prefill; on a CPU, verifying n-gram drafts costs about as much time as it
saves.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from benchmarks import DEMO_MODEL
from benchmarks.demo_model.tasks import held_out_questions
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

TASKS = ("recall", "recall_long", "sort", "reverse")
_TO_THE_END = SamplingParams(temperature=0.0, max_new_tokens=48)
_FIRST_TOKEN = SamplingParams(temperature=0.0, max_new_tokens=1)


class Run(NamedTuple):
    """Results of one task's questions on one engine."""

    outputs: list[list[int]]
    num_decode_steps: int
    num_drafted: int
    num_accepted: int
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Return tokens per decode step; the first token of each output comes from its prefill."""
        return sum(len(output) - 1 for output in self.outputs) / self.num_decode_steps


class Comparison(NamedTuple):
    """One line of the table."""

    task: str
    plain: Run
    drafting: Run

    @property
    def is_identical(self) -> bool:
        return self.plain.outputs == self.drafting.outputs

    @property
    def ratio(self) -> float:
        """Return tokens per decode step, with drafts over without."""
        return self.drafting.tokens_per_step / self.plain.tokens_per_step

    def line(self) -> str:
        drafting = self.drafting
        accepted = drafting.num_accepted / max(drafting.num_drafted, 1)
        return (
            f"{self.task:<12} {len(drafting.outputs):>9} {self.plain.tokens_per_step:>7.2f} "
            f"{drafting.tokens_per_step:>7.2f} {self.ratio:>6.2f} {accepted:>9.0%} "
            f"{self.plain.seconds / drafting.seconds:>8.2f} "
            f"{'yes' if self.is_identical else 'NO':>10}"
        )


HEADER = (
    f"{'task':<12} {'questions':>9} {'plain':>7} {'drafts':>7} {'ratio':>6} {'accepted':>9} "
    f"{'speed-up':>8} {'identical':>10}"
)


def compare(
    num_questions: int,
    *,
    seed: int = 0,
    algorithm: str = "NGRAM",
    num_draft_tokens: int = 4,
    draft_model_path: str | None = None,
    answer_tokens: int | None = None,
    **settings: Any,
) -> list[Comparison]:
    """Run `num_questions` of each task with and without drafts.

    Args:
        answer_tokens: the length of each answer; None: an answer ends with its end token.
        settings: settings of both engines, except how steps overlap; default: the dense model.
    """
    settings = {"model_path": str(DEMO_MODEL), "warmup": "all"} | settings
    drafts = {
        "speculative_algorithm": algorithm,
        "speculative_num_draft_tokens": num_draft_tokens,
        "speculative_draft_model_path": draft_model_path,
    }
    sampling = _TO_THE_END
    if answer_tokens is not None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=answer_tokens, ignore_eos=True)
    plain = _run_all(num_questions, seed, sampling, settings)
    drafting = _run_all(num_questions, seed, sampling, settings | drafts)
    return [Comparison(task, plain[task], drafting[task]) for task in TASKS]


def together(comparisons: Sequence[Comparison]) -> Comparison:
    """Return all tasks as one comparison, "overall"."""
    plain = _sum([comparison.plain for comparison in comparisons])
    return Comparison("overall", plain, _sum([comparison.drafting for comparison in comparisons]))


def _sum(runs: Sequence[Run]) -> Run:
    return Run._make(reduce(add, column) for column in zip(*runs, strict=True))


def _run_all(
    num_questions: int, seed: int, sampling: SamplingParams, settings: dict[str, Any]
) -> dict[str, Run]:
    """Run every task; return the runs by task."""
    with Engine(
        max_running_requests=1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        **settings,
    ) as engine:
        runs = {}
        for task in TASKS:
            questions = held_out_questions(num_questions, seed, tasks=(task,))
            prompts = [engine.tokenizer.apply_chat_template(q.messages) for q in questions]
            runs[task] = _run(engine, prompts, sampling)
        return runs


def _run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> Run:
    before = engine.server_info()["counters"]
    engine.generate(input_ids=prompts, sampling_params=_FIRST_TOKEN, progress=False)
    prefilled = engine.server_info()["counters"]
    start = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params=sampling, progress=False)
    seconds = time.perf_counter() - start
    after = engine.server_info()["counters"]

    def gained(name: str) -> int:
        return int(after[name] - prefilled[name])

    return Run(
        outputs=[result.output_ids for result in results],
        num_decode_steps=gained("steps") - int(prefilled["steps"] - before["steps"]),
        num_drafted=gained("drafted_tokens"),
        num_accepted=gained("accepted_draft_tokens"),
        seconds=seconds,
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens per decode step with drafts.")
    parser.add_argument("--num-questions", type=int, default=25, help="of each task")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--model-path", default=str(DEMO_MODEL), help="a demonstration model's")
    parser.add_argument("--speculative-algorithm", default="NGRAM", help="NGRAM, MTP or EAGLE3")
    parser.add_argument("--speculative-draft-model-path", help="of EAGLE3")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="per step")
    parser.add_argument("--answer-tokens", type=int, help="of each answer; default: to its end")
    parser.add_argument("--min-ratio", type=float, default=1.5, help="over all tasks")
    args = parser.parse_args(argv)
    if args.num_questions < 1:
        parser.error("--num-questions must be at least 1")
    return args


def main() -> None:
    """Print the table; exit with 0 if drafts changed nothing and paid."""
    args = parse_args()
    comparisons = compare(
        args.num_questions,
        seed=args.seed,
        algorithm=args.speculative_algorithm,
        num_draft_tokens=args.num_draft_tokens,
        draft_model_path=args.speculative_draft_model_path,
        answer_tokens=args.answer_tokens,
        model_path=args.model_path,
    )
    overall = together(comparisons)
    print("\n".join([HEADER, *(comparison.line() for comparison in [*comparisons, overall])]))
    sys.exit(0 if overall.is_identical and overall.ratio >= args.min_ratio else 1)


if __name__ == "__main__":
    main()
