"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

import json
import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.text.tokenizer import Tokenizer
from tests.checkpoint.gguf.gguf_files import write_gguf
from tests.live.live_server import DEMO
from tests.support.packaged_models import PACKAGES, SMOLLM2, packaged_file

ALPHABET = "ab cde  0123é東🙂👩‍👩‍👧.,'s<|>_\u2581\u00a0\u2003\t\n\r\u0301مЖ\x00\x7f"
CONTROL, BYTE, USER_DEFINED = 3, 6, 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def texts(*special):
    """Some hundred strings: of words, spaces, digits, other scripts and special tokens."""
    rng = random.Random(3)
    pieces = [*ALPHABET, *ALPHABET, "the ", "Anna", "    ", *special]
    made = ["".join(rng.choices(pieces, k=rng.randrange(40))) for _ in range(300)]
    return [*made, "", " ", "It's 1,234 o'clock.\n\n\n  So: x+=1\r\n"]


def tokenizer_of(file):
    return Tokenizer.load(model_folder(str(file)))


def test_byte_level_bpe_has_the_ids_of_the_original(tmp_path):
    original = json.loads((DEMO / "tokenizer.json").read_text())
    model = original["model"]
    added = {token["content"] for token in original["added_tokens"]}
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    facts = {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [CONTROL if token in added else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": vocab.index(settings["eos_token"]),
        "tokenizer.chat_template": settings.get("chat_template", "{{ messages[0].content }}"),
    }
    found = tokenizer_of(write_gguf("qwen3", tmp_path / "m.gguf", facts=facts))
    wanted = Tokenizer.load(str(DEMO))
    for text in texts(*added):
        ids = wanted.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == wanted.decode(ids)
    assert found.special_tokens == wanted.special_tokens
    assert found.eos_token_id == wanted.eos_token_id
    assert found.chat_template == facts["tokenizer.chat_template"]
    assert found.has_fixed_bytes


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("default", ["It", "'s", " 2025", "!!", "\n\n", " ok", "  ", " x"]),
        ("smollm", ["It", "'s", " ", "2", "0", "2", "5", "!!", "\n\n", " ok", "  ", " x"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "5", "!!\n\n", " ok", "  ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "202", "5", "!!\n\n", " ok", "  ", " x"]),
    ],
)
def test_each_rule_splits_text_into_its_pieces(tmp_path, rule, pieces):
    facts = {"tokenizer.ggml.pre": rule}
    folder = model_folder(str(write_gguf("qwen3", tmp_path / "m.gguf", facts=facts)))
    split = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    found = [piece for piece, _ in split.pre_tokenize_str("It's 2025!!\n\n ok   x")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in found] == pieces


@pytest.mark.parametrize(
    ("facts", "ids"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, [248, 2, 0]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [2, 0]),
        ({"tokenizer.ggml.add_bos_token": True}, [248, 2, 0]),
        ({"tokenizer.ggml.add_eos_token": True}, [2, 0, 249]),
        ({}, [2, 0]),
    ],
)
def test_text_begins_and_ends_as_the_file_says(tmp_path, facts, ids):
    facts = {"tokenizer.ggml.token_type": [*[1] * 248, CONTROL, CONTROL], **facts}
    tokenizer = tokenizer_of(write_gguf("qwen3", tmp_path / "m.gguf", facts=facts))
    assert tokenizer.encode("aba") == ids
    assert tokenizer.encode("aba", add_special_tokens=False) == [2, 0]


class Pieces:
    """A vocabulary with scores, and SentencePiece's BPE as its paper has it: the reference."""

    def __init__(self, rng):
        self.special = ["<pad>", "<eos>", "<bos>", "<unk>"]
        self.defined = ["  ", "   ", "<table>"]
        self.bytes = [f"<0x{byte:02X}>" for byte in range(256)]
        letters = sorted(set("abcde\u2581012é"))
        pieces = dict.fromkeys(letters)
        while len(pieces) < 60:
            pieces["".join(rng.choices(list(pieces), k=2))[:6]] = None
        self.scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
        # Letters are made of nothing, so their scores are the lowest.
        self.scores |= dict.fromkeys(letters, -1000.0)
        self.tokens = [*self.special, *self.defined, *self.bytes, *self.scores]

    def facts(self, **changes):
        kinds = [CONTROL] * 4 + [USER_DEFINED] * 3 + [BYTE] * 256 + [1] * len(self.scores)
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": None,
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.scores": [self.scores.get(token, -1000.0) for token in self.tokens],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_space_prefix": False,
            **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
        }

    def encode(self, text):
        """Merge the pair that makes the piece with the best score, the first of equals, again and
        again."""
        symbols = list(text.replace(" ", "\u2581"))
        while True:
            joined = [left + right for left, right in pairwise(symbols)]
            best = max(map(self._score, joined), default=None)
            if best is None or best == float("-inf"):
                break
            at = next(i for i, piece in enumerate(joined) if self._score(piece) == best)
            symbols[at : at + 2] = [joined[at]]
        return [number for symbol in symbols for number in self._ids(symbol)]

    def _score(self, piece):
        return self.scores.get(piece, float("-inf"))

    def _ids(self, symbol):
        if symbol in self.scores:
            return [self.tokens.index(symbol)]
        return [self.tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]


def test_sentence_pieces_are_merged_by_score(tmp_path):
    rng = random.Random(11)
    pieces = Pieces(rng)
    tokenizer = tokenizer_of(write_gguf("qwen3", tmp_path / "m.gguf", facts=pieces.facts()))
    for _ in range(300):
        text = "".join(rng.choices("abcde012é東🙂", k=rng.randrange(30)))
        text = " ".join(filter(None, (text[:9], text[9:14], text[14:])))  # single spaces
        assert tokenizer.encode(text) == [2, *pieces.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.has_fixed_bytes


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("é  é", ["é", "  ", "é"]),
        ("é   é", ["é", "   ", "é"]),
        ("é \u2581é", ["é", "  ", "é"]),
        ("é<table>é", ["é", "<table>", "é"]),
        ("é<eos>", ["é", "<eos>"]),
    ],
)
def test_tokens_that_a_user_defined_come_before_merges(tmp_path, text, tokens):
    pieces = Pieces(random.Random(11))
    tokenizer = tokenizer_of(write_gguf("qwen3", tmp_path / "m.gguf", facts=pieces.facts()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [pieces.tokens[number] for number in ids] == tokens


def test_a_space_before_the_text_is_put_and_taken_away(tmp_path):
    pieces = Pieces(random.Random(11))
    facts = pieces.facts(add_space_prefix=True)
    tokenizer = tokenizer_of(write_gguf("qwen3", tmp_path / "m.gguf", facts=facts))
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert ids == pieces.encode(" ab")
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_real_files_have_the_ids_that_transformers_reads_from_them(package):
    pytest.importorskip("torch", reason="transformers reads GGUF files with torch")
    file = packaged_file(package)
    found = tokenizer_of(file)
    wanted = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if package == SMOLLM2:  # transformers leaves out that each digit is a word
        wanted.backend_tokenizer.pre_tokenizer = found_split(file)
    for text in texts("<|im_start|>", "<eos>", "<end_of_turn>", "<table>"):
        assert found.encode(text) == wanted(text)["input_ids"]


def found_split(file):
    folder = model_folder(str(file))
    return AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
