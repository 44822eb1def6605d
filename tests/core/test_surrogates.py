"""Halves of surrogate pairs become U+FFFD, and nothing else changes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.core import surrogates
from sgl_jax.core.surrogates import replace_in_json, replace_in_text

_PIECES = ("\ud83d", "\ude00", "\udfff", "\\", '"', "u", "ud83d", "\n", "a", "é", "😀")


def whole(text: str) -> str:
    """Pairs as one character, as a decoder of UTF-16 reads the text."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.lists(st.sampled_from(_PIECES), max_size=9).map("".join), st.integers(1, 40))
def test_json_is_read_as_a_decoder_of_utf16_reads_it(text: str, slice_bytes: int) -> None:
    data = json.dumps({"key": text}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surrogates, "_SLICE_BYTES", slice_bytes)
        replaced, num_replaced = replace_in_json(data)
    assert msgspec.json.decode(replaced) == {"key": whole(text)}
    assert num_replaced == whole(text).count("\ufffd")
    if num_replaced:
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(data)
    else:
        assert replaced == data


def test_halves_that_are_encoded_as_characters_are_replaced() -> None:
    data: Any = '{"key": "a\ud83d\ude00b"}'.encode("utf-8", "surrogatepass")
    replaced, num_replaced = replace_in_json(data)
    assert (msgspec.json.decode(replaced), num_replaced) == ({"key": "a\ufffd\ufffdb"}, 2)


def test_text_keeps_whole_characters() -> None:
    assert replace_in_text("a\ud83d 😀\ude00") == "a\ufffd 😀\ufffd"


def test_the_number_of_replacements_is_bounded() -> None:
    data = b'"' + rb"\ud83d" * (2**17 + 1) + b'"'
    replaced, num_replaced = replace_in_json(data)
    assert num_replaced == 2**17
    assert replaced.endswith(rb'\ud83d"')
