"""Streamed text equals the text of all tokens decoded at once, and never shows half a character."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.core.surrogates import REPLACEMENT
from sgl_jax.text.detokenizer import WindowDetokenizer, make_detokenizer
from sgl_jax.text.tokenizer import Tokenizer

TEXTS = st.text(alphabet="abt the,.é東😀\n ", max_size=40)
CUTS = st.lists(st.integers(0, 60), max_size=12)


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[start:end] for start, end in pairwise(edges)]


def stream(
    tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], *, skip: bool
) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.push(piece) for piece in pieces] + [detokenizer.flush()]


@given(data=st.data(), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_a_byte_level_tokenizer_stream_as_decoded_at_once(
    byte_level_tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    limit = byte_level_tokenizer.vocab_size + 10  # beyond it too: models pad their vocabulary
    ids = data.draw(st.lists(st.integers(0, limit), max_size=60))
    streamed = stream(byte_level_tokenizer, [], pieces_of(ids, cuts), skip=skip)
    assert "".join(streamed) == byte_level_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=200, deadline=None)
def test_byte_level_text_never_shows_half_a_character(
    byte_level_tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = byte_level_tokenizer.encode(text)
    streamed = stream(byte_level_tokenizer, [], pieces_of(ids, cuts), skip=True)
    assert not any(REPLACEMENT in piece for piece in streamed)


@given(
    prompt=TEXTS,
    text=TEXTS,
    cuts=CUTS,
    one_by_one=st.booleans(),
    specials=st.booleans(),
    in_windows=st.booleans(),  # as for tokenizers whose tokens have no bytes of their own
)
@settings(max_examples=600, deadline=None)
def test_sentencepiece_text_streams_as_decoded_at_once(
    sentencepiece_tokenizer: Tokenizer,
    prompt: str,
    text: str,
    cuts: list[int],
    one_by_one: bool,
    specials: bool,
    in_windows: bool,
) -> None:
    tokenizer = sentencepiece_tokenizer
    prompt_ids = tokenizer.encode(prompt + "end")
    ids = tokenizer.encode(text)
    if specials:  # in the middle of a sentence, where a leading space could get lost
        marks = sorted(tokenizer.special_ids)[:2]
        ids = [token for pair in ids for token in (pair, *marks) if pair % 3 == 0 or token == pair]
    pieces = [[i] for i in ids] if one_by_one else pieces_of(ids, cuts)
    if in_windows:
        windows = WindowDetokenizer(tokenizer, prompt_ids, skipped=tokenizer.special_ids)
        streamed = [windows.push(piece) for piece in pieces] + [windows.flush()]
    else:
        streamed = stream(tokenizer, prompt_ids, pieces, skip=True)
    assert not any(REPLACEMENT in piece for piece in streamed)
    before = tokenizer.decode(prompt_ids)
    assert before + "".join(streamed) == tokenizer.decode(prompt_ids + ids)


def test_a_long_piece_that_ends_in_half_a_character_holds_only_that_half(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    ids = sentencepiece_tokenizer.encode("a long enough sentence, then 😀")
    detokenizer = make_detokenizer(sentencepiece_tokenizer, [], skip_special_tokens=True)
    assert detokenizer.push(ids[:-1]) == " a long enough sentence, then "
    assert detokenizer.push(ids[-1:]) == "😀"


def test_bytes_that_are_no_text_do_not_pile_up(sentencepiece_tokenizer: Tokenizer) -> None:
    bad_byte = sentencepiece_tokenizer.encode("😀")[-1]
    detokenizer = WindowDetokenizer(
        sentencepiece_tokenizer, [], skipped=sentencepiece_tokenizer.special_ids
    )
    streamed = "".join(detokenizer.push([bad_byte]) for _ in range(50)) + detokenizer.flush()
    assert streamed == REPLACEMENT * 50


@pytest.mark.parametrize("kind", ["byte_level_tokenizer", "sentencepiece_tokenizer"])
def test_a_character_that_never_completes_appears_at_the_end(
    request: pytest.FixtureRequest, kind: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("ab 🜁")[:-1]
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=True)
    streamed = "".join(detokenizer.push([i]) for i in ids)
    assert streamed.lstrip() == "ab "
    assert set(detokenizer.flush()) == {REPLACEMENT}
