r"""Two servers under one load, in turn: `python -m benchmarks.serving.two_servers`.

    python -m benchmarks.serving.two_servers --second-checkout DIR
    python -m benchmarks.serving.two_servers --second-flags="--quantization int8"
    python -m benchmarks.serving.two_servers --second-checkout DIR --num-tools 4 --tasks call sum
    python -m benchmarks.serving.two_servers --model-path models/demo_hybrid --num-streams 1 \
        --tasks recall recall_long sort reverse --output-len 200 \
        --second-flags="--speculative-algorithm MTP --speculative-num-draft-tokens 3"

The first server runs this checkout. The second runs another one, or this one with more flags. Both
stay up for the whole run and serve in the order first, second, second, first. Adjacent blocks of
the two servers have the same prompts.
"""

import argparse
import asyncio
import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo_model.tasks import TASKS, TOOL_TASKS, held_out_questions
from benchmarks.demo_model.tool import GET_WEATHER
from benchmarks.serving.rounds import Load, Prompts, add_options, load_of, print_rounds, server
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.text.tokenizer_check import load_tokenizer

_CHECKOUT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Print tokens per second of both servers, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--flags", default="", help="of both servers, as one string")
    parser.add_argument("--second-flags", default="", help="of the second alone")
    parser.add_argument("--second-checkout", type=Path, default=_CHECKOUT)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=(*TASKS, *TOOL_TASKS),
        help="questions of these, of any length; default: random tokens",
    )
    parser.add_argument(
        "--num-tools",
        type=int,
        help="send the questions as chats, with this number of tools, to /v1/chat/completions; "
        "default: token ids to /generate",
    )
    options = parser.parse_args(argv)
    load = load_of(options)
    blocks = _prompts(load, options.model_path, options.tasks, options.num_tools)
    model = ("--model-path", str(options.model_path.resolve()), "--decode-log-interval", "0")
    flags = (*model, *shlex.split(options.flags))
    with (
        server(flags, _CHECKOUT) as first,
        server(
            (*flags, *shlex.split(options.second_flags)), options.second_checkout.resolve()
        ) as second,
    ):

        def serve(port: int, prompts: Prompts) -> float:
            return asyncio.run(load.serve(port, prompts))

        def times() -> tuple[float, float]:
            some, others = next(blocks), next(blocks)
            first_s, second_s = serve(first, some), serve(second, some) + serve(second, others)
            return first_s + serve(first, others), second_s

        times()  # warms caches
        print_rounds(load, ("first", "second"), times, options.rounds)


def _prompts(
    load: Load, model_path: Path, tasks: Sequence[str] | None, num_tools: int | None
) -> Iterator[Prompts]:
    """Yield the prompts of each block, all different."""
    if tasks is None and num_tools is None:
        rng = np.random.default_rng(0)
        vocab_size = json.loads((model_path / "config.json").read_text())["vocab_size"]
        while True:
            yield load.random_prompts(rng, vocab_size)
    tokenizer = load_tokenizer(ServerArgs(model_path=str(model_path)))
    for seed in count():
        number = load.num_streams * load.num_requests
        questions = held_out_questions(number, seed, tasks=tuple(tasks or TASKS))
        prompts: list[Any] = [
            tokenizer.apply_chat_template(question.messages)
            if num_tools is None
            else {"model": "default", "messages": question.messages, "tools": _tools(num_tools)}
            for question in questions
        ]
        yield [prompts[i : i + load.num_requests] for i in range(0, number, load.num_requests)]


def _tools(number: int) -> list[Any]:
    """Return `number` tools that the model may call: the weather tool, and renamed copies."""
    functions = [GET_WEATHER["function"] | {"name": f"get_weather_{i}"} for i in range(1, number)]
    others = [{"type": "function", "function": each} for each in functions]
    return [GET_WEATHER, *others][:number]


if __name__ == "__main__":
    main()
