"""Tokenizers for the tests of this room."""

from pathlib import Path

import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, load, save, sentencepiece_like


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(str(byte_level_folder))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(sentencepiece_like(), tmp_path_factory.mktemp("pieces"))
