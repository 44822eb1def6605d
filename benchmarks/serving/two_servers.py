"""Two servers under one load, in turn: `python -m benchmarks.serving.two_servers`.

    python -m benchmarks.serving.two_servers --second-checkout DIR
    python -m benchmarks.serving.two_servers --second-flags="--quantization int8"

The first server runs this checkout. The second runs another one, or this one with more flags. Both
stay up for the whole run and serve in the order first, second, second, first.
"""

import argparse
import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.serving.rounds import add_options, load_of, print_rounds, server

_CHECKOUT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Print tokens per second of both servers, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--flags", default="", help="of both servers, as one string")
    parser.add_argument("--second-flags", default="", help="of the second alone")
    parser.add_argument("--second-checkout", type=Path, default=_CHECKOUT)
    options = parser.parse_args(argv)
    load = load_of(options)
    vocab_size = json.loads((options.model_path / "config.json").read_text())["vocab_size"]
    model = ("--model-path", str(options.model_path.resolve()), "--decode-log-interval", "0")
    flags = (*model, *shlex.split(options.flags))
    rng = np.random.default_rng(0)
    with (
        server(flags, _CHECKOUT) as first,
        server(
            (*flags, *shlex.split(options.second_flags)), options.second_checkout.resolve()
        ) as second,
    ):

        def serve(port: int) -> float:
            return asyncio.run(load.serve(port, load.random_prompts(rng, vocab_size)))

        def times() -> tuple[float, float]:
            first_s, second_s = serve(first), serve(second) + serve(second)
            return first_s + serve(first), second_s

        serve(first), serve(second)  # warms caches
        print_rounds(load, ("first", "second"), times, options.rounds)


if __name__ == "__main__":
    main()
