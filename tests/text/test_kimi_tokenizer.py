"""Kimi's tokenizer gives the ids that tiktoken gives, which its own program uses."""

import base64
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_jax.text.answer_parser import choose_parser
from sgl_jax.text.tokenizer import Tokenizer

# As published, in one piece; the product builds it of parts.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    """The children's books, I'LL say, are 12345 and 67 pages long: 模型很大, 模型很快!
Größe und Straße; ΑΒΓ αβγ; def f(x):\n    return x  # x's own\n\n\n  ... 模型 model模型 don't DON'T
"""
    * 3
)
NAMED = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
NUM_MERGES = 120


def learn_ranks() -> dict[bytes, int]:
    """Bytes, and the pairs that are most frequent in words of the text, one after another."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(r"\s?\S+", TEXT)]
    for rank in range(256, 256 + NUM_MERGES):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = rank
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if word[i - 1 : i + 1] == [left, right]:
                    word[i - 1 : i + 1] = [left + right]
    return ranks


RANKS = learn_ranks()
START = len(RANKS)
CONFIG = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        **{str(START + i): {"content": name, "special": True} for i, name in enumerate(NAMED)},
        str(START + 11): {"content": "<|tool_call_argument_begin|>", "special": False},
    },
}
TEMPLATE = (
    "{% for m in messages %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "<|im_assistant|>assistant<|im_middle|>{# <|tool_call_argument_begin|> <think> #}"
)


def write_folder(folder: Path, config: dict[str, object] = CONFIG) -> str:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    # Never run.
    (folder / "tokenization_kimi.py").write_text("raise AssertionError\n")
    return str(folder)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("kimi")))


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    special = {f"<|reserved_token_{i}|>": i for i in range(START, START + 256)}
    for number, own in CONFIG["added_tokens_decoder"].items():  # type: ignore[attr-defined]
        del special[f"<|reserved_token_{number}|>"]
        special[own["content"]] = int(number)
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=special)


SPACES = (" ", "\n", "\r\n", "\t")
PIECES = [*TEXT.split(" "), *NAMED, *SPACES, "<|reserved_token_460|>", "9", "É", "ǅ"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
@example(TEXT)
def test_ids_are_tiktokens(kimi: Tokenizer, reference: tiktoken.Encoding, text: str) -> None:
    ids = kimi.encode(text)
    assert ids == reference.encode(text, allowed_special="all")
    assert kimi.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(kimi.token_bytes, ids)) == text.encode()


def test_tokens_have_their_names_and_some_are_text(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == START + 256
    assert (kimi.bos_token_id, kimi.eos_token_id) == (START, START + 1)
    text = "hi<|im_end|><|tool_call_argument_begin|><|reserved_token_600|>"
    ids = kimi.encode(text)
    assert ids[-3:] == [START + 2, START + 11, 600]
    # The readers of calls need their marks.
    assert kimi.decode(ids) == "hi<|tool_call_argument_begin|>"


def test_the_template_is_rendered_and_chooses_the_formats(kimi: Tokenizer) -> None:
    ids = kimi.apply_chat_template([{"role": "user", "content": "model"}])
    text = "<|im_user|>user<|im_middle|>model<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert kimi.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == START + 3
    parser = choose_parser("auto", "auto", kimi.chat_template)
    assert (parser.tool_format, parser.reasoning_format) == ("kimi_k2", "kimi")


def test_a_template_may_be_in_the_settings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**CONFIG, "chat_template": "{{ messages[0].content }}"})
    (tmp_path / "chat_template.jinja").unlink()
    prompt = Tokenizer.load(folder).render_chat([{"role": "user", "content": "hi"}])
    assert prompt == "hi"


def test_an_id_that_is_not_reserved_is_named(tmp_path: Path) -> None:
    tokens = {"7": {"content": "[BOS]"}}
    folder = write_folder(tmp_path, {**CONFIG, "added_tokens_decoder": tokens})
    with pytest.raises(ValueError, match=r"has the id 7, but those after .* are 376 to 631"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("line", ["$$$ 3", "YQ==", "YQ== x"])
def test_damaged_ranks_are_refused(tmp_path: Path, line: str) -> None:
    folder = write_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_text(line + "\n")
    with pytest.raises(ValueError, match="cannot read a tokenizer from"):
        Tokenizer.load(folder)


def test_another_program_is_still_refused(tmp_path: Path) -> None:
    other = {"AutoTokenizer": ["tokenization_other.Tokenizer", None]}
    folder = write_folder(tmp_path, {**CONFIG, "auto_map": other})
    with pytest.raises(ValueError, match="cannot read a tokenizer from"):
        Tokenizer.load(folder)
