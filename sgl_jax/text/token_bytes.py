"""The bytes of a token, by the decoder of its tokenizer.

There is a rule for each kind of tokenizer with tokens that stand for fixed bytes in any context:

- byte-level BPE, and tiktoken files converted to it: a character for each byte;
- SentencePiece, with or without byte fallback: U+2581 is a space, and with byte fallback `<0xNN>`
  is that byte.

A decoder may remove the first space of a text. It stays here, since the prompt precedes the text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
# Returns a token's bytes, or b"" for an id outside the vocabulary.
TokenBytes = Callable[[int], bytes]


def token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """Return the function from a token id to bytes; None if bytes depend on neighboring tokens."""
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(tokenizer.id_to_token)
    if _are_pieces(steps):
        return _pieces(tokenizer.id_to_token, has_bytes="ByteFallback" in kinds)
    return None


def _are_pieces(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether these are the decoders of a SentencePiece model."""
    is_fused, has_spaces = False, False
    for step in steps:
        match step:
            case {"type": "Metaspace", "replacement": "\u2581"}:
                has_spaces = True
            case {"type": "Replace"} if step == _REPLACE:
                has_spaces = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "stop": 0} if is_fused:
                pass  # strips the whole text
            case {"type": "ByteFallback"}:
                pass
            case _:
                return False
    return has_spaces


def _byte_level(token_of: Callable[[int], str | None]) -> TokenBytes:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of_char = {char: byte for byte, char in bytes_to_unicode().items()}

    def read(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        try:
            return bytes([byte_of_char[char] for char in token])
        except KeyError:  # an added token is plain text, not written in the byte alphabet
            return token.encode()

    return read


def _pieces(token_of: Callable[[int], str | None], *, has_bytes: bool) -> TokenBytes:
    def read(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        byte = _BYTE.fullmatch(token) if has_bytes else None
        return token.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])

    return read
