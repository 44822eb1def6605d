"""What every variant is asked: held-out questions, and long greedy generations beside them."""

import asyncio
import functools
import random
from typing import NamedTuple

import httpx
from openai import AsyncOpenAI

from benchmarks.demo_model.evaluate import ask_all
from benchmarks.demo_model.tasks import TASKS, Question, held_out_questions, is_right
from sgl_jax.text.tokenizer import Tokenizer
from tests.accuracy.near_ties import differences, generate, greedy
from tests.live.live_server import DEMO

NUM_SHORT_QUESTIONS = 100
NUM_LONG_QUESTIONS = 10  # about 1,060 tokens each
NUM_QUESTIONS = NUM_SHORT_QUESTIONS + NUM_LONG_QUESTIONS
NUM_SOME_QUESTIONS = 22  # the first ones, for default runs: two of them are long
NUM_GENERATIONS = 14
SHORT_TASKS = tuple(task for task in TASKS if task != "recall_long")
# More than a server here runs at once, so that requests wait, and return after a retract to a
# server that has others.
CONCURRENT_QUESTIONS = 12
TIMEOUT_S = 240.0


class Outcome(NamedTuple):
    """What a server answered."""

    replies: list[str]  # to the first questions
    outputs: list[list[int]]  # of the long generations

    @property
    def num_right(self) -> int:
        """Questions answered right."""
        return sum(map(is_right, questions(), self.replies))


@functools.cache
def questions() -> list[Question]:
    """Of all tasks: one long question after each ten short ones."""
    short = held_out_questions(NUM_SHORT_QUESTIONS, seed=3, tasks=SHORT_TASKS)
    long = held_out_questions(NUM_LONG_QUESTIONS, seed=3, tasks=("recall_long",))
    step = NUM_SHORT_QUESTIONS // NUM_LONG_QUESTIONS
    return [
        question
        for i, last in enumerate(long)
        for question in (*short[i * step : (i + 1) * step], last)
    ]


@functools.cache
def generations() -> list[tuple[list[int], int]]:
    """Prompts of 5 to some 200 tokens, and of how many tokens each is to be continued.

    Half are conversations, whose continuations repeat themselves as drafts like it; half are
    random tokens.
    """
    rng = random.Random(5)
    tokenizer = Tokenizer.load(str(DEMO), None)
    tasks = ("recall", "sort", "reverse", "sum")
    made = []
    for i, question in enumerate(held_out_questions(NUM_GENERATIONS, seed=9, tasks=tasks)):
        text = "\n".join(message["content"] for message in question.messages)
        prompt = tokenizer.encode(text)
        if i % 2:
            prompt = [rng.randrange(300, 700) for _ in range(rng.randrange(5, 120))]
        made.append((prompt, rng.randrange(150, 251)))
    return made


def num_output_tokens() -> int:
    """Of all long generations together."""
    return sum(count for _, count in generations())


def run(url: str, num_questions: int = NUM_QUESTIONS) -> Outcome:
    """The first questions and all generations at the same time."""
    return asyncio.run(_run(url, questions()[:num_questions]))


async def _run(url: str, asked: list[Question]) -> Outcome:
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)
    async with openai, client_of(url) as client:

        async def output(prompt: list[int], count: int) -> list[int]:
            body = {"input_ids": prompt, "sampling_params": greedy(count)}
            return list((await generate(client, body))["output_ids"])

        replies, *outputs = await asyncio.gather(
            ask_all(openai, "demo", asked, CONCURRENT_QUESTIONS),
            *(output(prompt, count) for prompt, count in generations()),
        )
    return Outcome(replies, outputs)  # type: ignore[arg-type]


def num_differences(url: str, wanted: Outcome, got: Outcome) -> int:
    """Output tokens of the server at `url` that are not as wanted. Each must be a near tie."""
    return asyncio.run(_num_differences(url, wanted, got))


async def _num_differences(url: str, wanted: Outcome, got: Outcome) -> int:
    async with client_of(url) as client:
        found = [
            await differences(client, prompt, left, right)
            for (prompt, _), left, right in zip(
                generations(), wanted.outputs, got.outputs, strict=True
            )
        ]
    return sum(map(len, found))


def client_of(url: str) -> httpx.AsyncClient:
    """A client of a server, for as many requests at once as one likes."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
