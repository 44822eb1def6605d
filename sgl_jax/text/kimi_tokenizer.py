"""Kimi K2's tokenizer, stored in checkpoints as a tiktoken file and a Python program.

The program is not run. Pattern and reserved tokens are from its `tokenization_kimi.py`
(huggingface.co/moonshotai/Kimi-K2-Instruct).
"""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

_RANKS_FILE = "tiktoken.model"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_PROGRAM = "tokenization_kimi."
_NUM_RESERVED = 256  # ids after the ranks; the settings name some
# A word's letters, in an order of cases; Chinese characters are separate words.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_kimi_tokenizer(folder: Path) -> bool:
    """Return whether the folder's only tokenizer is Kimi's file and program."""
    if (folder / "tokenizer.json").exists() or not (folder / _RANKS_FILE).is_file():
        return False
    programs = _read_config(folder).get("auto_map", {}).get("AutoTokenizer", [])
    return any(str(name).startswith(_PROGRAM) for name in programs)


def load_kimi_tokenizer(folder: Path) -> Any:
    """Return the tokenizer as a `PreTrainedTokenizerFast` of transformers.

    Raises ValueError, KeyError or OSError for invalid files.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):  # type: ignore[misc]
        """Reads a local file without tiktoken, which would copy each file that it reads."""

        load_tiktoken_bpe = staticmethod(_read_ranks)

    config = _read_config(folder)
    backend = Converter(str(folder / _RANKS_FILE), pattern=_PATTERN).converted()
    start = backend.get_vocab_size()
    named = {int(number): own for number, own in config["added_tokens_decoder"].items()}
    outside = [number for number in named if not 0 <= number - start < _NUM_RESERVED]
    if outside:
        raise ValueError(
            f"{_CONFIG_FILE}: added_tokens_decoder has the id {outside[0]}, "
            f"but those after {_RANKS_FILE} are {start} to {start + _NUM_RESERVED - 1}"
        )
    reserved: list[dict[str, Any]] = [
        named.get(number, {"content": f"<|reserved_token_{number}|>"})
        for number in range(start, start + _NUM_RESERVED)
    ]
    backend.add_tokens(
        [
            AddedToken(own["content"], special=own.get("special", True), normalized=False)
            for own in reserved
        ]
    )
    template = folder / _TEMPLATE_FILE
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.read_text(encoding="utf-8")
        if template.is_file()
        else config.get("chat_template"),
        **{name: config[name] for name in _SPECIAL_NAMES if config.get(name)},
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the settings; empty if unreadable, which loading the tokenizer reports."""
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _read_ranks(path: str) -> dict[bytes, int]:
    """Return each token's bytes and rank (its id) from lines of base64 and a number."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
