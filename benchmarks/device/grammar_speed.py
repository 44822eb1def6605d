"""What a schema costs while tokens are generated: `python -m benchmarks.device.grammar_speed`.

One engine serves the same prompts with and without a JSON schema, in blocks of the order A B B A,
so that a machine whose speed drifts spoils the ratio least. Both generate as many tokens: the
schema is of an array longer than that.

    python -m benchmarks.device.grammar_speed [--model-path DIR] [--batch-size 8] [--rounds 8]

What a schema costs does not grow with the model: the smaller the model, the more of its step it is.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import DEMO_MODEL
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

_ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "name", "ok"],
    "additionalProperties": False,
}
_SCHEMA = json.dumps({"type": "array", "items": _ITEM, "minItems": 10_000})


def serve_block(engine: Engine, num_requests: int, output_len: int, schema: str | None) -> float:
    """Output tokens per second of one block of requests that are submitted at once."""
    prompts = [[5 + number, 6, 7, 8] for number in range(num_requests)]
    sampling = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_new_tokens=output_len,
            ignore_eos=True,
            json_schema=schema,
        )
        for number in range(num_requests)
    ]
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, progress=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(answer.output_ids) for answer in answers)
    if num_tokens != num_requests * output_len:
        raise RuntimeError(f"{num_tokens} tokens, not {num_requests} times {output_len}")
    return num_tokens / seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Print both speeds, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--load-format", default="auto", help="dummy: a folder without weights")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8, help="of four blocks each (8)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    load = (options.batch_size, options.output_len)
    speeds: dict[str | None, list[float]] = {None: [], _SCHEMA: []}
    with Engine(
        str(options.model_path),
        load_format=options.load_format,
        max_running_requests=options.batch_size,
        decode_log_interval=0,
        warmup="none",
    ) as engine:
        for schema in speeds:
            serve_block(engine, *load, schema)  # compiles, and is not counted
        for _ in range(options.rounds):
            for schema in (None, _SCHEMA, _SCHEMA, None):
                speeds[schema].append(serve_block(engine, *load, schema))
    # Of each round the time that both blocks of a kind took together.
    free, held = (1 / np.array(each).reshape(-1, 2) for each in speeds.values())
    ratio = float(np.median(free.sum(axis=1) / held.sum(axis=1)))
    print(
        f"{load[0]} requests at once, {load[1]} tokens out, {options.rounds} rounds A B B A: "
        f"{statistics.median(speeds[None]):,.0f} output tokens/s, "
        f"{statistics.median(speeds[_SCHEMA]):,.0f} by a schema, ratio {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
