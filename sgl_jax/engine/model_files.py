"""Reads a model's small files before anything large is loaded. Must not import jax."""

from pathlib import Path

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import CONFIG_FILE, ModelConfig
from sgl_jax.models.served import served_config
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.tokenizer_check import load_tokenizer


def open_model_files(args: ServerArgs) -> Tokenizer:
    """Load the tokenizer of `args`. Raises ValueError, with the file's name, if it is unusable."""
    if not Path(args.model_path).is_dir():
        raise ValueError(f"--model-path: there is no folder {args.model_path!r}")
    # The tokenizer's library also reads config.json, and would blame the tokenizer for a bad file.
    if (Path(args.model_path) / CONFIG_FILE).is_file():
        served_config(ModelConfig.from_path(args.model_path), args)
    return load_tokenizer(args)
