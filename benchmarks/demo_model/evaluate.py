"""Send the demonstration model's held-out questions to a running server and score its answers.

    python -m benchmarks.demo_model.evaluate --base-url http://127.0.0.1:30000 --num-questions 600

Greedy decoding over ``/v1/chat/completions``. The exit status is 1 when the overall accuracy or
the accuracy of any task is below its threshold. Needs the extra ``bench`` (openai).
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from benchmarks.demo_model.tasks import TASKS, TOOL_TASKS, Question, held_out_questions, is_right
from benchmarks.demo_model.tool import message_text

# Longer than any right answer; a reply that rambles on is wrong anyway.
MAX_ANSWER_TOKENS = 96


class TaskScore(NamedTuple):
    """The numbers of questions of one task, and of right answers."""

    task: str
    num_right: int
    num_asked: int

    @property
    def accuracy(self) -> float:
        """Return the share of right answers, 0 to 1."""
        return self.num_right / self.num_asked


async def ask_all(
    client: AsyncOpenAI, model: str, questions: Sequence[Question], max_concurrency: int
) -> list[str]:
    """Return replies in the questions' order; send at most ``max_concurrency`` at a time."""
    permits = asyncio.Semaphore(max_concurrency)

    async def ask(question: Question) -> str:
        messages: list[Any] = list(question.messages)
        offered: dict[str, Any] = {"tools": list(question.tools)} if question.tools else {}
        async with permits:
            completion = await client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=0,
                max_tokens=MAX_ANSWER_TOKENS,
                **offered,
            )
        return message_text(completion.choices[0].message.model_dump())

    return await asyncio.gather(*(ask(question) for question in questions))


def score(questions: Sequence[Question], replies: Sequence[str]) -> list[TaskScore]:
    """Return one score per task, in the order in which tasks first appear."""
    asked = Counter(question.task for question in questions)
    right = Counter(
        question.task
        for question, reply in zip(questions, replies, strict=True)
        if is_right(question, reply)
    )
    return [TaskScore(task, right[task], count) for task, count in asked.items()]


def format_table(scores: Sequence[TaskScore]) -> str:
    """Return the scores as lines of text, with the overall score last."""
    rows = [*scores, overall(scores)]
    lines = [f"{'task':<12} {'right':>6} {'asked':>6} {'accuracy':>9}"]
    lines += [
        f"{row.task:<12} {row.num_right:>6} {row.num_asked:>6} {row.accuracy:>9.1%}" for row in rows
    ]
    return "\n".join(lines)


def overall(scores: Sequence[TaskScore]) -> TaskScore:
    """Return the sum of all tasks' scores."""
    return TaskScore("overall", sum(s.num_right for s in scores), sum(s.num_asked for s in scores))


def passes(scores: Sequence[TaskScore], min_overall: float, min_task: float) -> bool:
    """Return whether the overall accuracy and each task's reach their thresholds (0 to 1)."""
    return overall(scores).accuracy >= min_overall and all(s.accuracy >= min_task for s in scores)


async def evaluate(args: argparse.Namespace) -> bool:
    """Print the scores and some wrong answers; return true if the thresholds are reached."""
    questions = held_out_questions(args.num_questions, args.seed, tasks=tuple(args.tasks))
    base_url = f"{args.base_url.rstrip('/')}/v1"
    async with AsyncOpenAI(
        base_url=base_url, api_key=args.api_key, timeout=args.timeout_s, max_retries=0
    ) as client:
        model = args.model or (await client.models.list()).data[0].id
        replies = await ask_all(client, model, questions, args.max_concurrency)
    scores = score(questions, replies)
    print(format_table(scores))
    wrong = [(q, r) for q, r in zip(questions, replies, strict=True) if not is_right(q, r)]
    for question, reply in wrong[: args.show_wrong]:
        asked = message_text(question.messages[-1])
        print(f"wrong ({question.task}): {asked!r} -> {reply!r}, expected {question.answer!r}")
    return passes(scores, args.min_overall / 100, args.min_task / 100)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a server on the demonstration tasks.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="without /v1")
    parser.add_argument("--model", default=None, help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--num-questions", type=int, default=300, help="over all tasks")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    all_tasks = (*TASKS, *TOOL_TASKS)
    parser.add_argument("--tasks", nargs="+", choices=all_tasks, default=all_tasks, metavar="TASK")
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each question")
    parser.add_argument("--min-overall", type=float, default=95.0, help="percent")
    parser.add_argument("--min-task", type=float, default=90.0, help="percent, for each task")
    parser.add_argument("--show-wrong", type=int, default=5, help="wrong answers to print")
    args = parser.parse_args(argv)
    if args.num_questions < 1 or args.max_concurrency < 1:
        parser.error("--num-questions and --max-concurrency must be at least 1")
    return args


def main() -> None:
    """Exit with 0 if the thresholds are reached, else with 1."""
    sys.exit(0 if asyncio.run(evaluate(parse_args())) else 1)


if __name__ == "__main__":
    main()
