"""Two ways to serve the same load, in turn: `python -m benchmarks.device.compare`.

    python -m benchmarks.device.compare schema [--batch-size 8] [--output-len 128]
    python -m benchmarks.device.compare windows [--window 128] [--prompt-len 512]

`schema`: one engine, without and with a JSON schema of an array longer than the output. Its cost
does not grow with the model: the smaller the model, the greater its share of a step.

`windows`: two engines of one model with random weights, without windows and with a sliding window
on every second layer. The model's `config.json` must have `layer_types` and `sliding_window`.

A block is a batch of requests, from submission to the last token. Blocks come in the order A B B A,
in one process, so that a drift of the machine's speed affects the ratio least.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import DEMO_MODEL
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

# Serves a block and returns its output tokens per second. The argument, two integers, seeds it.
Serve = Callable[[tuple[int, int]], float]

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


class Speeds(NamedTuple):
    """Output tokens per second of each block, in the order served."""

    a: list[float]
    b: list[float]

    @property
    def ratio(self) -> float:
        """Return B over A: the median over rounds, by the time of both blocks of a round."""
        a_times, b_times = (1 / np.array(each).reshape(-1, 2) for each in self)
        return float(np.median(a_times.sum(axis=1) / b_times.sum(axis=1)))


def measure(ways: tuple[Serve, Serve], rounds: int) -> Speeds:
    """Serve `rounds` times A B B A, after a block of each that compiles and is not counted."""
    speeds = Speeds([], [])
    for serve in ways:
        serve((0, 0))
    for number in range(1, 1 + rounds):
        for which in (0, 1, 1, 0):
            # Both get the same blocks, and the two blocks of a round differ.
            speeds[which].append(ways[which]((number, len(speeds[which]) % 2)))
    return speeds


def serve_block(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> float:
    """Return the output tokens per second of a block.

    Raises RuntimeError if an answer is shorter than its `max_new_tokens`.
    """
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, progress=False)
    seconds = time.perf_counter() - start
    reached = [len(answer.output_ids) for answer in answers]
    limits = [each.max_new_tokens for each in sampling]
    if reached != limits:
        raise RuntimeError(f"answers of {reached} tokens, not {limits}")
    return sum(reached) / seconds


@contextmanager
def with_schema(options: argparse.Namespace) -> Iterator[tuple[Serve, Serve]]:
    """Yield functions that serve without and with a schema, on one engine."""
    with Engine(
        str(options.model_path),
        load_format=options.load_format,
        max_running_requests=options.batch_size,
        decode_log_interval=0,
        warmup="none",
    ) as engine:

        def serve(schema: str | None) -> float:
            numbers = range(options.batch_size)
            sampling = [
                SamplingParams(
                    temperature=1.0,
                    seed=number,
                    max_new_tokens=options.output_len,
                    ignore_eos=True,
                    json_schema=schema,
                )
                for number in numbers
            ]
            return serve_block(engine, [[5 + number, 6, 7, 8] for number in numbers], sampling)

        yield lambda _: serve(None), lambda _: serve(_SCHEMA)


@contextmanager
def with_windows(options: argparse.Namespace) -> Iterator[tuple[Serve, Serve]]:
    """Yield functions that serve without and with windows, on two engines.

    Prompts are random and in no cache.
    """
    # The second engine compiles its programs while the first is ready, which is expected here.
    logging.getLogger("sgl_jax.executor.compile_watch").setLevel(logging.CRITICAL)
    context_len = 2 * (options.prompt_len + options.output_len)

    def serving(engine: Engine) -> Serve:
        shape = (options.batch_size, options.prompt_len)
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=options.output_len, ignore_eos=True
        )

        def serve(seed: tuple[int, int]) -> float:
            rng = np.random.default_rng(seed)
            prompts = rng.integers(0, engine.info["vocab_size"], shape).tolist()
            return serve_block(engine, prompts, [sampling] * options.batch_size)

        return serve

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windows")))
        full, windows = (
            stack.enter_context(
                Engine(
                    str(path),
                    load_format="dummy",
                    context_length=context_len,
                    max_running_requests=options.batch_size,
                    max_total_tokens=2 * options.batch_size * context_len,
                    decode_log_interval=0,
                    warmup="all",
                )
            )
            for path in write_models(options.model_path, options.window, folder)
        )
        yield serving(full), serving(windows)


def write_models(model_path: Path, window: int, folder: Path) -> tuple[Path, Path]:
    """Write the model's config without windows, and with one on every second layer.

    Args:
        model_path: a model whose config has `layer_types`.
        window: window size in tokens, including the query's; the first layer has a window.
        folder: existing folder, in which a folder for each model is created.
    """
    config = json.loads((model_path / "config.json").read_text())
    full = ["full_attention"] * config["num_hidden_layers"]
    mixed = list(full)
    mixed[::2] = ["sliding_attention"] * len(full[::2])
    changes: dict[str, dict[str, Any]] = {
        "full": {"layer_types": full, "sliding_window": None, "use_sliding_window": False},
        "windows": {"layer_types": mixed, "sliding_window": window, "use_sliding_window": True},
    }
    for name, changed in changes.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | changed))
    return folder / "full", folder / "windows"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Two ways to serve the same load, in turn.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    schema = kinds.add_parser("schema", help="without and with a JSON schema")
    schema.add_argument("--load-format", default="auto", help="dummy: a folder without weights")
    schema.set_defaults(ways=with_schema, batch_size=8)
    windows = kinds.add_parser("windows", help="without and with a sliding window")
    windows.add_argument("--window", type=int, default=128, help="tokens (128)")
    windows.add_argument("--prompt-len", type=int, default=512)
    windows.set_defaults(ways=with_windows, batch_size=16)
    for kind in (schema, windows):
        kind.add_argument("--model-path", type=Path, default=DEMO_MODEL)
        kind.add_argument("--batch-size", type=int, default=kind.get_default("batch_size"))
        kind.add_argument("--output-len", type=int, default=128)
        kind.add_argument("--rounds", type=int, default=8, help="of four blocks each (8)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the speed of both ways, and their ratio."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    with options.ways(options) as ways:
        speeds = measure(ways, options.rounds)
    print(
        f"{options.batch_size} requests at once, {options.output_len} tokens out, "
        f"{options.rounds} rounds A B B A: {statistics.median(speeds.a):,.0f} output tokens/s "
        f"without, {statistics.median(speeds.b):,.0f} with {options.kind}, "
        f"ratio {speeds.ratio:.3f}"
    )


if __name__ == "__main__":
    main()
