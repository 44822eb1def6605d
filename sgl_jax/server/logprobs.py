"""Log-probabilities of tokens in the three ways that clients know."""

from collections.abc import Sequence

from sgl_jax.core.messages import TokenLogprobs
from sgl_jax.server.meta_info import NativeLogprob
from sgl_jax.server.openai_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from sgl_jax.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no -inf; OpenAI's answers say this


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The chat API's form: per token, with the bytes of each."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token_id)
        return TopLogprob(_text(data), max(logprob, _LOWEST), list(data))

    content = []
    for entry in entries:
        own = top(entry.token_id, _number(entry.logprob))
        others = [top(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, others))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """The completions API's form; keeps count of the text offset from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token = self._text(entry.token_id)
            written.tokens.append(token)
            written.text_offset.append(self._offset)
            self._offset += len(token)
            if entry.logprob is None:  # the first token of a prompt: nothing predicts it
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
                continue
            logprob = max(entry.logprob, _LOWEST)
            written.token_logprobs.append(logprob)
            # Different tokens may have the same text (halves of characters): the likelier counts.
            tops: dict[str, float] = {}
            for other, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
                tops.setdefault(self._text(other), max(value, _LOWEST))
            tops.setdefault(token, logprob)
            written.top_logprobs.append(tops)
        return written

    def _text(self, token_id: int) -> str:
        return _text(self._tokenizer.token_bytes(token_id))


def native_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs]
) -> list[NativeLogprob]:
    """SGLang's form: `[logprob, token id, text]`; the text only if `tokenizer` is given."""
    return [
        (
            None if entry.logprob is None else max(entry.logprob, _LOWEST),
            entry.token_id,
            _native_text(tokenizer, entry.token_id),
        )
        for entry in entries
    ]


def native_top_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs]
) -> list[list[NativeLogprob] | None]:
    """The most likely tokens at each position, in SGLang's form."""
    return [
        None
        if entry.logprob is None
        else [
            (max(value, _LOWEST), token_id, _native_text(tokenizer, token_id))
            for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        for entry in entries
    ]


def _native_text(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else _text(tokenizer.token_bytes(token_id))


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _number(logprob: float | None) -> float:
    return _LOWEST if logprob is None else logprob
