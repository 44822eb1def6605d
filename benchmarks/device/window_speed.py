"""What windows cost a served model: `python -m benchmarks.device.window_speed`.

Serves the same load with two engines in one process, of one model with random weights: without
windows, and with a sliding window on every second layer. Blocks are served in the order A B B A, so
that a machine whose speed drifts spoils the ratio least; a block is a batch of new prompts, from
submission to the last token.

    python -m benchmarks.device.window_speed [--window 128] [--prompt-len 512] [--rounds 8]

Any model whose `config.json` knows `layer_types` and `sliding_window` will do.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import DEMO_MODEL
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine


class Load(NamedTuple):
    """One block: requests that are submitted at once."""

    num_requests: int
    prompt_len: int  # tokens
    output_len: int  # tokens


class Speeds(NamedTuple):
    """Output tokens per second of each block, in the order served."""

    full: list[float]
    windows: list[float]

    @property
    def ratio(self) -> float:
        """With windows over without: the median over rounds of A B B A."""
        full, windows = np.array(self.full), np.array(self.windows)
        # Of each round the time that both blocks of a model took together.
        of_rounds = (1 / full).reshape(-1, 2).sum(axis=1) / (1 / windows).reshape(-1, 2).sum(axis=1)
        return float(np.median(of_rounds))


def write_models(model_path: Path, window: int, folder: Path) -> tuple[Path, Path]:
    """The model's config without windows, and with one on every second layer from the first on.

    Args:
        model_path: a model whose config knows `layer_types`.
        window: tokens, the query's own among them.
        folder: an existing one, which gets a folder for each model.
    """
    config = json.loads((model_path / "config.json").read_text())
    kinds = ["full_attention"] * config["num_hidden_layers"]
    variants: dict[str, dict[str, Any]] = {}
    variants["full"] = {"layer_types": list(kinds), "sliding_window": None}
    kinds[::2] = ["sliding_attention"] * len(kinds[::2])
    variants["windows"] = {"layer_types": kinds, "sliding_window": window}
    for name, changes in variants.items():
        (folder / name).mkdir()
        changes["use_sliding_window"] = changes["sliding_window"] is not None
        (folder / name / "config.json").write_text(json.dumps(config | changes))
    return folder / "full", folder / "windows"


def serve_block(engine: Engine, load: Load, rng: np.random.Generator) -> float:
    """Output tokens per second of one block of prompts that no cache has."""
    vocab_size = engine.info["vocab_size"]
    prompts = rng.integers(0, vocab_size, (load.num_requests, load.prompt_len)).tolist()
    sampling = SamplingParams(temperature=0.0, max_new_tokens=load.output_len, ignore_eos=True)
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, progress=False)
    seconds = time.perf_counter() - start
    return sum(len(answer.output_ids) for answer in answers) / seconds


def measure(models: tuple[Path, Path], load: Load, rounds: int, **settings: Any) -> Speeds:
    """Serve `rounds` times A B B A, after a block of each that is not counted."""
    context_len = 2 * (load.prompt_len + load.output_len)
    engines = [
        Engine(
            str(path),
            load_format="dummy",
            context_length=context_len,
            max_running_requests=load.num_requests,
            max_total_tokens=2 * load.num_requests * context_len,
            decode_log_interval=0,
            **settings,
        )
        for path in models
    ]
    speeds: tuple[list[float], list[float]] = ([], [])
    try:
        for engine in engines:
            serve_block(engine, load, np.random.default_rng(0))
        for number in range(rounds):
            for which in (0, 1, 1, 0):
                # Both are asked the same; each twice, so the blocks of a round differ.
                rng = np.random.default_rng((1 + number, len(speeds[which]) % 2))
                speeds[which].append(serve_block(engines[which], load, rng))
    finally:
        for engine in engines:
            engine.shutdown()
    return Speeds(*speeds)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the speed of each block's model, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--window", type=int, default=128, help="tokens (128)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8, help="of four blocks each (8)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    # The second engine compiles its programs while the first is ready, which is no defect here.
    logging.getLogger("sgl_jax.executor.compile_watch").setLevel(logging.CRITICAL)
    load = Load(options.batch_size, options.prompt_len, options.output_len)
    with tempfile.TemporaryDirectory(prefix="window_speed") as folder:
        models = write_models(options.model_path, options.window, Path(folder))
        speeds = measure(models, load, options.rounds)
    print(
        f"{load.num_requests} requests at once, {load.prompt_len} tokens in, {load.output_len} "
        f"out, window {options.window:,} on every second layer, {options.rounds} rounds A B B A: "
        f"{statistics.median(speeds.full):,.0f} output tokens/s without windows, "
        f"{statistics.median(speeds.windows):,.0f} with, ratio {speeds.ratio:.3f}"
    )


if __name__ == "__main__":
    main()
