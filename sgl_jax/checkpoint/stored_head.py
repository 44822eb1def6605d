"""Chooses between the embeddings and a stored head."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.core.embedding_model import embedding_refusal
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.registry import names_of_embeddings

logger = logging.getLogger(__name__)

_BLOCK_NUMBERS = 2**22


def with_stored_head(
    config: ModelConfig, folder: Path, load_format: str, *, is_embedding: bool = False
) -> ModelConfig:
    """Return `config`, untied if the safetensors in `folder` have a head other than the embeddings.

    Some fine-tuned checkpoints have a separate head although config.json still ties it. Compares
    all numbers of both, a block of rows at a time, and stops at the first difference. Conversely,
    an embedding model saved without a head gets the embeddings as its head, which nothing reads;
    `is_embedding` is the setting of that name. Raises CheckpointError if files cannot be read.
    """
    if load_format != "safetensors":
        return config
    embeddings, head = names_of_embeddings(config)
    with TensorFiles(folder) as files:
        stored = files.shapes
        if not config.tie_word_embeddings:
            has_head = not files.is_base_model
            if has_head or embedding_refusal(folder, is_embedding=is_embedding):
                return config
            return replace(config, tie_word_embeddings=True)
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
