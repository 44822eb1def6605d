"""Small tokenizers of the two great families, built on the spot."""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from sgl_jax.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
SAMPLE = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve café, 東京, 😀 and 👩‍👩‍👧: many bytes a character.",
    "def main() -> None:\n    print('hello world')\n",
] * 20
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken("<é plain>", normalized=False)])
    return tokenizer


def sentencepiece_like() -> RustTokenizer:
    """Words start with U+2581, unknown characters fall back to byte tokens (as in Llama 2)."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    merges = [("▁", letter) for letter in "abcth"] + [("▁t", "h"), ("▁th", "e")]
    pieces += [left + right for left, right in merges]
    tokenizer = RustTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def save(rust: RustTokenizer, folder: Path) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(rust: RustTokenizer, folder: Path) -> Tokenizer:
    return Tokenizer.load(str(save(rust, folder)))


def save_with_template(folder: Path, template: str, tokens: list[str]) -> Path:
    """Save a tokenizer with more special `tokens`, and this chat template."""
    rust = byte_level()
    rust.add_special_tokens(tokens)
    save(rust, folder)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] += tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
