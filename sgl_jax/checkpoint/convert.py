"""Convert a Hugging Face folder to an orbax checkpoint that any mesh can read.

    python -m sgl_jax.checkpoint.convert --model-path HF_DIR --output DIR

HF_DIR may be a GGUF file.

Loads the whole model into this process's memory. Copies configs and tokenizer files.
"""

import argparse
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.checkpoint.kv_scales import KV_SCALES_FILE, stored_kv_scales, write_kv_scales
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.orbax_format import save_orbax
from sgl_jax.checkpoint.stored_head import with_stored_head
from sgl_jax.checkpoint.tensor_files import INDEX_FILE
from sgl_jax.layers.mesh_axes import DATA_AXIS, TENSOR_AXIS
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import CONFIG_FILE, ModelConfig
from sgl_jax.models.config_fields import read_json
from sgl_jax.models.placement import place_model
from sgl_jax.models.quantization import AT_LOAD

_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*_Pooling/*.json")


def convert(
    model_path: Path,
    output: Path,
    dtype: str,
    quantization: str = "none",
    *,
    has_draft_layer: bool = False,
) -> None:
    """Write `output`, a new folder, from the safetensors or the GGUF file at `model_path`.

    Quantized matrices are unchanged; with `quantization` (int8, fp8, int4) floats are quantized,
    and the folder is served with the same `--quantization`. With `has_draft_layer`, the folder is
    only for `--speculative-algorithm MTP`.

    Raises:
        CheckpointError: `output` exists, or `model_path` has no weights that fit its config.
        ModelConfigError: this package does not support the model's config.json.
    """
    if output.exists():
        raise CheckpointError(f"{str(output)!r} exists already")
    model_path = Path(model_folder(str(model_path)))
    given = ModelConfig.from_path(model_path)
    load_format = "gguf" if detect_format(model_path) == "gguf" else "safetensors"
    stored = with_stored_head(given, model_path, load_format)
    config = stored.quantized(quantization)
    if has_draft_layer:
        config = config.drafting()
    devices = np.array(jax.devices("cpu")[:1]).reshape(1, 1)
    mesh = Mesh(devices, (DATA_AXIS, TENSOR_AXIS))
    placed = place_model(config, mesh, BuildOptions(jnp.dtype(dtype)))
    params = load_params(placed, model_path, load_format)
    has_kv_scales = config.quantization is not None and config.quantization.has_kv_scales
    kv_scales = stored_kv_scales(model_path, config) if has_kv_scales else None
    output.mkdir(parents=True)
    for pattern in _SIDE_FILES:
        for file in sorted(model_path.glob(pattern)):
            if file.name != INDEX_FILE:
                copy = output / file.relative_to(model_path)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    if stored != given:
        tied = {"tie_word_embeddings": stored.tie_word_embeddings}
        raw = read_json(model_path / CONFIG_FILE) | tied
        (output / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")
    if kv_scales is not None:
        write_kv_scales(output / KV_SCALES_FILE, kv_scales, config)
    save_orbax(output, params)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgl_jax.checkpoint.convert")
    parser.add_argument(
        "--model-path", type=Path, required=True, help="Hugging Face folder or GGUF file"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--quantization",
        default="none",
        choices=("none", *AT_LOAD),
        help="quantize matrices; serve the folder with the same flag",
    )
    parser.add_argument(
        "--draft-layer",
        action="store_true",
        help="add the model's draft layer; serve the folder with --speculative-algorithm MTP",
    )
    args = parser.parse_args()
    settings = args.dtype, args.quantization
    try:
        convert(args.model_path, args.output, *settings, has_draft_layer=args.draft_layer)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
