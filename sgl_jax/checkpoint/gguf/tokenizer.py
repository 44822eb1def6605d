"""The tokenizer of a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE ("gpt2") has its merges in the file. SentencePiece's BPE ("llama") has a score for
each token instead: the two tokens that make the one with the highest score are merged first.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as splits
from tokenizers.processors import TemplateProcessing

from sgl_jax.checkpoint.gguf.header import GgufError, Header

_SPACE = "\u2581"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of tokens
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES_ONLY = splits.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = splits.ByteLevel(add_prefix_space=False, use_regex=True)


class _Rule(NamedTuple):
    """How text is prepared for byte-level BPE."""

    split: Any
    normalizer: Any = None
    ignores_merges: bool = False  # a word that is a token is that token
    adds_bos: bool = False


def _words(digits: str) -> Any:
    pattern = f"{_CONTRACTIONS_AND_WORDS}|{digits}|{_REST}"
    return splits.Sequence([splits.Split(Regex(pattern), "isolated"), _BYTES_ONLY])


_LLAMA3 = _Rule(_words(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True)
# By tokenizer.ggml.pre.
_RULES: Mapping[str, _Rule] = {
    "default": _Rule(_GPT2),
    "gpt-2": _Rule(_GPT2),
    "smollm": _Rule(splits.Sequence([splits.Digits(individual_digits=True), _GPT2])),
    "qwen2": _Rule(_words(r"\p{N}"), normalizers.NFC()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
}


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write both files. Raise GgufError if the file lacks them or the kind is not supported."""
    tokens = header.texts("tokenizer.ggml.tokens")
    types = [int(kind) for kind in header.numbers("tokenizer.ggml.token_type", len(tokens))]
    if len(set(tokens)) < len(tokens):
        raise GgufError(f"the vocabulary in {str(header.path)!r} has a token twice")
    kind = header.required("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise GgufError(
            f"{str(header.path)!r} has a tokenizer of the kind {kind!r}; supported: gpt2, llama"
        )
    special = _special_tokens(header, tokens)
    make = _byte_level if kind == "gpt2" else _sentence_pieces
    tokenizer, adds_bos = make(header, tokens, types, special)
    # SentencePiece finds runs of spaces after it has replaced them, as do `normalized` tokens.
    added = [
        AddedToken(token, special=own == _CONTROL, normalized=" " in token)
        for token, own in zip(tokens, types, strict=True)
        if own in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    first, last = (
        [special[name]]
        if header.metadata.get(f"tokenizer.ggml.add_{name}_token", default) and name in special
        else []
        for name, default in (("bos", adds_bos), ("eos", False))
    )
    if first or last:
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokens.index(token)) for token in {*first, *last}],
        )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {f"{name}_token": token for name, token in special.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(first),
        "add_eos_token": bool(last),
    }
    if "tokenizer.chat_template" in header.metadata:
        settings["chat_template"] = header.metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _special_tokens(header: Header, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {}
    for name, long_name in names.items():
        key = f"tokenizer.ggml.{long_name}_token_id"
        number = header.metadata.get(key)
        if number is not None and not 0 <= number < len(tokens):
            raise GgufError(f"{key} in {str(header.path)!r} is not a token: {number}")
        if number is not None:
            special[name] = tokens[number]
    return special


def _byte_level(
    header: Header, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _RULES:
        known = ", ".join(_RULES)
        raise GgufError(
            f"{str(header.path)!r} splits text by the rule {name!r}; supported: {known}"
        )
    rule = _RULES[name]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for merge in header.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise GgufError(
                f"a merge in {str(header.path)!r} is not of two tokens to one: {merge!r}"
            )
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=rule.ignores_merges))
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer
    tokenizer.pre_tokenizer = rule.split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _sentence_pieces(
    header: Header, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    scores = header.numbers("tokenizer.ggml.scores", len(tokens))
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(tokens, types, scores),
            unk_token=special.get("unk"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every way to make a normal token of two, best first, as transformers sorts them."""
    score_of = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == _NORMAL
    }
    found = [
        (-score, -cut, token)
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    found.sort(key=lambda own: own[:2])  # stable: equal ones stay in the vocabulary's order
    return [(token[:cut], token[cut:]) for _, negative, token in found for cut in [-negative]]
