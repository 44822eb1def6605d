"""Chooses between the embeddings and a stored head if config.json ties them."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.registry import names_of_embeddings

logger = logging.getLogger(__name__)

_BLOCK_NUMBERS = 2**22


def with_stored_head(config: ModelConfig, folder: Path, load_format: str) -> ModelConfig:
    """Return `config`, untied if the safetensors in `folder` have a head other than the embeddings.

    Some fine-tuned checkpoints have a separate head although config.json still ties it. Compares
    all numbers of both, a block of rows at a time, and stops at the first difference. Raises
    CheckpointError if files cannot be read.
    """
    if not config.tie_word_embeddings or load_format != "safetensors":
        return config
    embeddings, head = names_of_embeddings(config)
    with TensorFiles(folder) as files:
        stored = files.shapes
        if not {embeddings, head} <= stored.keys() or _are_equal(files, embeddings, head):
            return config
    logger.warning(
        "config.json of %r sets tie_word_embeddings, but %s differs from %s: the stored head is "
        "used",
        *(str(folder), head, embeddings),
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(files: TensorFiles, first: str, second: str) -> bool:
    shape = files.shapes[first]
    if files.shapes[second] != shape:
        return False
    size = max(_BLOCK_NUMBERS // max(shape[-1], 1), 1)
    starts = range(0, shape[0], size)
    blocks = ((slice(start, min(start + size, shape[0])),) for start in starts)
    return all(
        np.array_equal(
            files.read(first, block).astype(np.float32),
            files.read(second, block).astype(np.float32),
        )
        for block in blocks
    )
