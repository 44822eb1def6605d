"""The bytes that a token stands for, by the decoder of its tokenizer.

One rule for each kind of tokenizer whose tokens stand for fixed bytes in any context:

- byte-level BPE, and tiktoken files converted to it: a character for each byte;
- SentencePiece, with byte fallback or without: U+2581 is a space, and with byte fallback `<0xNN>`
  is that byte.

A decoder may take the first space off a text, which a prompt has done: here it stays.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}


def token_reader(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """Return the function from a token of the vocabulary to its bytes.

    None if a token's text depends on its neighbours.

    Args:
        decoder: as in `tokenizer.json`.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _byte_level()
    if not steps or not _are_pieces(steps):
        return None
    return _piece_with_bytes if any(step["type"] == "ByteFallback" for step in steps) else _piece


def _are_pieces(steps: Sequence[Mapping[str, Any]]) -> bool:
    """True for the decoders of SentencePiece's models."""
    is_fused, has_spaces = False, False
    for step in steps:
        kind = step.get("type")
        if kind == "Metaspace":
            has_spaces = step.get("replacement") == _SPACE
        elif kind == "Replace":
            has_spaces = dict(step) == _REPLACE
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip":  # of the whole text
            if not is_fused or step.get("stop") or step.get("content") != " ":
                return False
        elif kind != "ByteFallback":
            return False
        if kind in ("Metaspace", "Replace") and not has_spaces:
            return False
    return has_spaces


def _byte_level() -> Callable[[str], bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of_char = {char: byte for byte, char in bytes_to_unicode().items()}

    def read(token: str) -> bytes:
        try:
            return bytes(byte_of_char[char] for char in token)
        except KeyError:  # an added token is plain text, not written in the byte alphabet
            return token.encode()

    return read


def _piece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _piece_with_bytes(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return _piece(token) if byte is None else bytes.fromhex(byte[1])
