"""Converts token ids to text as they are generated, with one object per request.

The pieces of text never hold half a character and are final: joined, they equal the text of all
tokens decoded at once. The cost per token does not grow with the output.
"""

import codecs
from collections.abc import Sequence, Set

from sgl_jax.core.surrogates import REPLACEMENT
from sgl_jax.text.tokenizer import Tokenizer

# UTF-8 needs at most four bytes: if this many tokens in a row end in an incomplete character, the
# bytes are not UTF-8.
_MAX_HELD_TOKENS = 8
# Prompt tokens that decide the text of the first output token (spaces between words).
_PROMPT_CONTEXT_TOKENS = 6
_PROMPT_TAIL_TOKENS = 16  # searched for them


class ByteDetokenizer:
    """An incremental UTF-8 decoder for tokens that stand for fixed bytes.

    Each maximal valid prefix of a broken sequence becomes a U+FFFD, as the Unicode standard
    recommends and Rust does. In a run of byte tokens with a broken byte, SentencePiece's byte
    fallback replaces every byte, but this decoder keeps complete characters.
    """

    def __init__(self, tokenizer: Tokenizer, *, skipped: Set[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self.skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return the new text of `ids`, without an incomplete character at its end."""
        skipped, token_bytes = self.skipped, self._token_bytes
        return self._decoder.decode(b"".join([token_bytes(i) for i in ids if i not in skipped]))

    def flush(self) -> str:
        """Return the remaining text after the last token; incomplete characters become U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes a short window twice, with and without the new tokens, for all other tokenizers.

    A token's text may depend on its left neighbor (a leading space, a run of byte tokens), so the
    window starts with the tokens of the last returned text:

        ids:  ... [context | held] new
        gain = text(context + held + new) - text(context)

    If a tokenizer rewrites a whole run of byte tokens because of one bad byte at its end,
    characters already returned stay.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skipped: Set[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.skipped = skipped
        self._context, self._context_text = self._scene(
            self._with_text(prompt_ids[-_PROMPT_TAIL_TOKENS:])
        )
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._held += self._with_text(ids)
        for num_open in range(min(_MAX_HELD_TOKENS, len(self._held) + 1)):
            whole = self._held[: len(self._held) - num_open]
            text = self._decode(self._context + whole)
            if not text.endswith(REPLACEMENT):
                return self._advance(whole, text)
        return self.flush()

    def flush(self) -> str:
        return self._advance(self._held, self._decode(self._context + self._held))

    def _advance(self, whole: list[int], text: str) -> str:
        gain = text[len(self._context_text) :]
        if gain:
            self._held = self._held[len(whole) :]
            self._context = whole
            self._context_text = self._decode(whole)
        return gain

    def _scene(self, prompt_tail: list[int]) -> tuple[list[int], str]:
        """Return the prompt's last tokens between character boundaries, and their text."""
        for size in range(_PROMPT_CONTEXT_TOKENS, _PROMPT_CONTEXT_TOKENS + 4):
            context = prompt_tail[-size:]
            text = self._decode(context)
            if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                return context, text
        return [], ""

    def _with_text(self, ids: Sequence[int]) -> list[int]:
        """Leave out tokens without text, so that the context never has only such tokens."""
        size = self._tokenizer.vocab_size
        return [i for i in ids if i not in self.skipped and i < size]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


IncrementalDetokenizer = ByteDetokenizer | WindowDetokenizer


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    kept: Set[int] = frozenset(),
) -> IncrementalDetokenizer:
    """Return a detokenizer for `tokenizer` that continues `prompt_ids`.

    The text of `kept` special tokens stays even if special tokens are skipped.
    """
    skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
    if tokenizer.has_fixed_bytes:
        return ByteDetokenizer(tokenizer, skipped=skipped)
    return WindowDetokenizer(tokenizer, prompt_ids, skipped=skipped)
