"""Every token stands for its bytes: joined, they are what the tokenizer decodes, in any order."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.core.surrogates import REPLACEMENT
from sgl_jax.text.detokenizer import make_detokenizer
from sgl_jax.text.tokenizer import Tokenizer, token_bytes
from tests.support.long import long
from tests.support.packaged_models import PACKAGES, packaged_file
from tests.support.tokenizers import byte_level, load, sentencepiece_like
from tests.text.test_kimi_tokenizer import write_folder

BATCH = 500  # sequences decoded at a time
CHARACTERS = "é東😀🜁 at\n,"


def without_fallback() -> RustTokenizer:
    """SentencePiece without byte tokens, as T5 has it."""
    pieces = ["<unk>", "▁", "▁the", "the", "a▁b", "é", "東", "<0x41>", "<extra>"]
    tokenizer = RustTokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    return tokenizer


MAKERS: dict[str, Callable[[], RustTokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": sentencepiece_like,
    "without_fallback": without_fallback,
}


@pytest.fixture(
    scope="module", params=[*MAKERS, "tiktoken", *(long(package)[0] for package in PACKAGES)]
)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    kind: str = request.param
    if kind in PACKAGES:
        return Tokenizer.load(model_folder(str(packaged_file(kind))))
    folder = tmp_path_factory.mktemp("tokenizer")
    if kind == "tiktoken":
        return Tokenizer.load(write_folder(folder))
    return load(MAKERS[kind](), folder)


def sequences(tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    """Random ids, and among them the tokens of whole characters."""
    draw = random.Random(63)
    words = [tokenizer.encode(character) for character in CHARACTERS]
    limit = tokenizer.vocab_size + 4  # beyond the vocabulary too: models pad theirs
    for _ in range(count):
        ids: list[int] = []
        for _ in range(draw.randrange(12)):
            is_word = draw.random() < 0.5
            ids += draw.choice(words) if is_word else [draw.randrange(limit)]
        yield ids


def decoder_steps(tokenizer: Tokenizer) -> list[str]:
    decoder = json.loads(tokenizer._backend.decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]


def decoded(tokenizer: Tokenizer, kinds: list[str], ids: list[int]) -> str:
    """The text of `ids` by their bytes, written as a decoder of these steps would."""
    ids = [i for i in ids if tokenizer._backend.id_to_token(i) is not None]
    pieces = [tokenizer.token_bytes(i) for i in ids]
    if "Metaspace" in kinds:
        pieces[:1] = [piece.replace(b" ", b"") for piece in pieces[:1]]
    if "ByteFallback" not in kinds:
        text = b"".join(pieces).decode(errors="replace")
    else:
        # A run of byte tokens that is not UTF-8 has a U+FFFD for every byte of it.
        flags = [tokenizer._backend.id_to_token(i).startswith("<0x") for i in ids]
        text = ""
        for is_byte, run in groupby(zip(flags, pieces, strict=True), key=lambda pair: pair[0]):
            data = b"".join(piece for _, piece in run)
            try:
                text += data.decode()
            except UnicodeDecodeError:
                assert is_byte
                text += REPLACEMENT * len(data)
    return text.removeprefix(" ") if "Strip" in kinds else text


@pytest.mark.parametrize("count", [2_000, *long(100_000)])
def test_joined_bytes_are_the_decoded_bytes(tokenizer: Tokenizer, count: int) -> None:
    drawn, kinds = list(sequences(tokenizer, count)), decoder_steps(tokenizer)
    for start in range(0, count, BATCH):
        batch = drawn[start : start + BATCH]
        texts = tokenizer._backend.decode_batch(batch, skip_special_tokens=False)
        for ids, text in zip(batch, texts, strict=True):
            assert decoded(tokenizer, kinds, ids) == text
    assert tokenizer.has_fixed_bytes


def test_streamed_text_is_the_joined_bytes_without_special_tokens(tokenizer: Tokenizer) -> None:
    for ids in sequences(tokenizer, 500):
        detokenizer = make_detokenizer(tokenizer, ids[:2], skip_special_tokens=True)
        streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
        shown = [i for i in ids if i not in tokenizer.special_ids]
        data = b"".join(map(tokenizer.token_bytes, shown))
        assert streamed == data.decode(errors="replace")


def test_grammars_read_the_same_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    if isinstance(tokenizer._backend.decoder, decoders.Metaspace):
        pytest.skip("llguidance reads no vocabulary of this kind")
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    grammar = LLTokenizer(str(tmp_path / "tokenizer.json"))
    for i in range(tokenizer.vocab_size):
        # With the byte 0xFF, which no text has, llguidance marks special tokens.
        assert grammar.decode_bytes([i]) == tokenizer.token_bytes(i).replace(b"\xff", b"")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),  # each token
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(replacement="_"),
    ],
)
def test_tokens_of_other_decoders_have_no_bytes_of_their_own(
    decoder: decoders.Decoder | None,
) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoder
    assert token_bytes(tokenizer) is None
