r"""Replace lone halves of surrogate pairs, which UTF-8 cannot encode, with U+FFFD.

A program that cuts text between the two halves of a character above U+FFFF sends a lone half, as an
escape in JSON (`\ud83d`) or encoded as if it were a character.
"""

import re
from collections.abc import Iterator

REPLACEMENT = "\ufffd"
# After `\\` is removed, each backslash begins an escape.
_ESCAPED_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u[dD]...))"
)
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_HALF = re.compile("[\ud800-\udfff]")
# Other threads can run between two slices.
_SLICE_BYTES = 2**20
_PAIR_BYTES = 12
_MAX_REPLACED = 2**17


def replace_in_json(data: bytes | bytearray) -> tuple[bytearray, int]:
    """Return JSON with at most `_MAX_REPLACED` lone halves replaced, and their number. The length
    does not change."""
    changed, num_replaced = bytearray(data), 0
    for half, replacement, searched in (
        (_ESCAPED_HALF, rb"\ufffd", data.replace(rb"\\", b"\0\0")),
        (_ENCODED_HALF, REPLACEMENT.encode(), data),
    ):
        for found in _found(half, searched):
            if num_replaced == _MAX_REPLACED:
                break
            changed[found.start() : found.end()] = replacement
            num_replaced += 1
    return changed, num_replaced


def _found(half: re.Pattern[bytes], data: bytes | bytearray) -> Iterator[re.Match[bytes]]:
    for start in range(0, len(data), _SLICE_BYTES):
        end = start + _SLICE_BYTES
        for found in half.finditer(data, start, end + _PAIR_BYTES):
            if found.start() < end:
                yield found


def replace_in_json_text(text: str) -> str:
    """Return JSON text, or the beginning of one, with each lone half replaced."""
    replaced, _ = replace_in_json(replace_in_text(text).encode())
    return replaced.decode()


def replace_in_text(text: str) -> str:
    return _HALF.sub(REPLACEMENT, text)
