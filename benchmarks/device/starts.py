"""Time until an engine is ready, without a cache of programs: `python -m benchmarks.device.starts`.

Each start is a new process with random weights of a Llama of 135M parameters. Starts with
`--warmup staged` and `--warmup all` alternate as staged, all, all, staged.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.core.server_args import ServerArgs

# SmolLM2-135M.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_ORDER = ("staged", "all", "all", "staged")


def start(folder: str, warmup: str) -> list[float]:
    """Return the seconds from the first import until an engine is ready, and until its last program
    is compiled."""
    begin_s = time.perf_counter()
    from sgl_jax.executor.model_executor import ModelExecutor  # imports jax

    args = ServerArgs(
        model_path=folder,
        load_format="dummy",
        warmup=warmup,
        compilation_cache_dir="none",
        max_total_tokens=16_384,
    )
    executor = ModelExecutor(args)
    executor.warm_up()
    seconds = [time.perf_counter() - begin_s]
    executor.start_background()
    while not executor._stages.is_done:
        time.sleep(0.1)
    executor.close()
    return [*seconds, time.perf_counter() - begin_s]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the seconds of each start, and the ratio of the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="default: a Llama of 135M parameters")
    parser.add_argument("--one", choices=_ORDER, help="start once, in this process; print JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG))
        model = options.model_path or folder
        if options.one:
            print(json.dumps(start(model, options.one)))
            return
        ready = dict.fromkeys(_ORDER, 0.0)
        for warmup in _ORDER:
            command = [sys.executable, "-m", "benchmarks.device.starts", "--model-path", model]
            run = subprocess.run([*command, "--one", warmup], check=True, stdout=subprocess.PIPE)
            seconds, end = json.loads(run.stdout)
            ready[warmup] += seconds
            print(f"{warmup:8} ready after {seconds:5.1f} s, all compiled after {end:5.1f}")
    print(f"ready, staged over all: {ready['staged'] / ready['all']:.2f}")


if __name__ == "__main__":
    main()
