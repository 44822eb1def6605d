"""Processor time of an update from arrays, over a bare copy: `python -m benchmarks.host.updates`.

The model has 163 million parameters in float32 (Qwen3's form, 18 layers of 768). A trainer's
matrices have the order of the engine's, inputs first; the matrices of a checkpoint have outputs
first. The copies are `jax.device_put` of the same arrays: as they are, and in the engine's order.
All alternate, and the least time of each counts: other programs on the machine slow the memory.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from sgl_jax import Engine

LAYERS, HEAD_DIM, NUM_ROUNDS = 18, 128, 10
DEMO = Path(__file__).parents[2] / "models" / "demo"
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "layer_types": ["full_attention"] * LAYERS,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "tokenizer_path": str(DEMO),
    "context_length": 512,
    "max_total_tokens": 4096,
    "dtype": "float32",
    "device": "cpu",
    "warmup": "none",
    "log_level": "error",
}


def as_trainer(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor of a checkpoint as tunix holds it."""
    *_, module, _ = name.split(".")
    layer = f"layers.{name.split('.')[2]}." if ".layers." in name else ""
    if module in ("embed_tokens", "norm"):
        return {"norm": "final_norm.w"}.get(module, "embedder.input_embedding"), tensor
    if module.endswith("norm"):
        return f"{layer}{'' if 'layer' in module else 'attn.'}{module}.w", tensor
    by_input = np.ascontiguousarray(tensor.T)
    if module == "o_proj":
        return f"{layer}attn.o_proj.w", by_input.reshape(-1, HEAD_DIM, len(tensor))
    if module in ("q_proj", "k_proj", "v_proj"):
        return f"{layer}attn.{module}.w", by_input.reshape(len(by_input), -1, HEAD_DIM)
    return (f"{layer}mlp.{module}.kernel" if layer else "lm_head.w"), by_input


def processor_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def copy(arrays: list[Any]) -> None:
    """Copy arrays to the device as they are."""
    jax.block_until_ready([jax.device_put(own, may_alias=False) for own in arrays])


def in_engines_order(arrays: list[np.ndarray]) -> None:
    """Copy matrices of a checkpoint to the device with their inputs first."""
    jax.block_until_ready([jax.device_put(own.T) for own in arrays])


class Measured(NamedTuple):
    """Least processor seconds of a copy of all arrays, and of an update in each mode."""

    copy: float
    staged: float
    chunked: float


def measure(num_rounds: int) -> Iterator[tuple[str, Measured]]:
    """Yield, for each order of matrices, its name and the least of twice as many rounds."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((DEMO / "config.json").read_text()) | SHAPE
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with Engine(folder, **SETTINGS) as engine:
            checkpoint = {
                name: rng.standard_normal(shape, np.float32)
                for name, shape in engine.weight_shapes.items()
            }
            trainer = {
                name: jax.device_put(own)
                for name, own in (as_trainer(*each) for each in checkpoint.items())
            }
            update = partial(engine.update_weights, version="")
            put = partial(in_engines_order, list(checkpoint.values()))
            for order, weights, bare in (
                ("a trainer's", trainer, partial(copy, list(trainer.values()))),
                ("a checkpoint's", checkpoint, put),
            ):
                calls: list[Callable[[], object]] = [
                    bare,
                    partial(update, weights, mode="staged"),
                    partial(update, weights, mode="chunked"),
                ]
                seconds: list[list[float]] = [[] for _ in calls]
                for _ in range(num_rounds):
                    for turn in (0, 1, 2, 2, 1, 0):
                        seconds[turn].append(processor_seconds(calls[turn]))
                yield order, Measured(*map(min, seconds))


def main() -> None:
    for order, measured in measure(NUM_ROUNDS):
        print(f"{order} order: copy {measured.copy:.3f} s", end="")
        for mode, own in ("staged", measured.staged), ("chunked", measured.chunked):
            print(f", {mode} {own:.3f} s ({own / measured.copy:.2f} times)", end="")
        print()


if __name__ == "__main__":
    main()
