"""The small files of a model, read and tried before anything large is loaded. No jax here."""

from pathlib import Path

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import CONFIG_FILE, ModelConfig
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.tokenizer_check import load_tokenizer


def open_model_files(args: ServerArgs) -> Tokenizer:
    """The tokenizer that `args` name. Raises ValueError, naming the file, if it cannot be used.

    The config comes first, though the engine reads it again: the tokenizer's library reads it, too,
    and its error about a bad config would name the tokenizer.
    """
    if not Path(args.model_path).is_dir():
        raise ValueError(f"--model-path: there is no folder {args.model_path!r}")
    if (Path(args.model_path) / CONFIG_FILE).is_file():
        ModelConfig.from_path(args.model_path)
    return load_tokenizer(args)
