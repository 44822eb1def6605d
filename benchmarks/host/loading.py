"""Memory and time of loading: `python -m benchmarks.host.loading [--chips N]`.

Writes a checkpoint of random bfloat16 weights (Qwen3's form, 28 layers of 1,024) to a temporary
folder, and loads it as stored and quantized, each in a separate process. The memory beyond the
arrays already on their devices is sampled each millisecond. A CPU's devices use the host's memory,
so the memory beyond their arrays is what the host needs for loading.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 28, 16, 8, 128, 32768
QUANTIZATIONS = ("none", "int8", "fp8", "int4", "w8a8_int8")
MIB = 2**20


def write_checkpoint(folder: Path) -> None:
    """Write a Qwen3 of random weights to `folder`."""
    import ml_dtypes
    from safetensors.numpy import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    matrices = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    vectors = {
        "self_attn.q_norm": HEAD_DIM,
        "self_attn.k_norm": HEAD_DIM,
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
    }
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": draw(*own) for name, own in matrices.items()}
        tensors |= {f"{prefix}{name}.weight": draw(own) for name, own in vectors.items()}
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, quantization: str, chips: int) -> None:
    """Load, and print seconds, the most memory beyond the loaded arrays, and the largest array."""
    import jax
    from jax.sharding import Mesh

    from sgl_jax.checkpoint.loading import load_params
    from sgl_jax.core.server_args import ServerArgs
    from sgl_jax.executor.engine_config import EngineConfig
    from sgl_jax.models.config import ModelConfig
    from sgl_jax.models.placement import place_model

    config = ModelConfig.from_path(folder).quantized(quantization)
    mesh = Mesh(np.array(jax.devices()[:chips]).reshape(1, chips), ("data", "tensor"))
    args = ServerArgs(tp_size=chips, dtype="bfloat16")
    options = EngineConfig.resolve(args, config, "cpu").build_options
    placed = place_model(config, mesh, options._replace(separates_layers=False))
    before, stop, beyond = _anonymous_bytes(), threading.Event(), [0]

    def sample() -> None:
        while not stop.wait(0.001):
            held = sum(own.nbytes for own in jax.live_arrays())
            beyond[0] = max(beyond[0], _anonymous_bytes() - before - held)

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    params = load_params(placed, folder, "safetensors")
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    stop.set()
    sampler.join()
    arrays = jax.tree.leaves(params)
    largest = max(own.nbytes for own in arrays)
    total = sum(own.nbytes for own in arrays)
    numbers = seconds, beyond[0] / MIB, largest / MIB, total / MIB
    print(quantization, *(f"{number:.1f}" for number in numbers))


def _anonymous_bytes() -> int:
    """Return the bytes of this process's memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.load:
        load(Path(options.load[0]), options.load[1], options.chips)
        return
    flags = f"--xla_force_host_platform_device_count={options.chips}"
    print("quantization, seconds, MiB beyond loaded arrays, MiB of the largest, MiB of all")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        for quantization in QUANTIZATIONS:
            words = "--chips", str(options.chips), "--load", folder, quantization
            subprocess.run(
                [sys.executable, "-m", "benchmarks.host.loading", *words],
                env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                check=True,
            )


if __name__ == "__main__":
    main()
