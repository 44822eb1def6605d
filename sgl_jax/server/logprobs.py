"""Log-probabilities of tokens in the three ways that clients know."""

from collections.abc import Sequence
from typing import Any

from sgl_jax.core.messages import GenerateRequest, TokenLogprobs
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
        own = top(entry.token_id, _LOWEST if entry.logprob is None else entry.logprob)
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
    request: GenerateRequest,
    tokenizer: Tokenizer | None,
    outputs: Sequence[TokenLogprobs],
    prompts: Sequence[TokenLogprobs],
) -> dict[str, list[Any]]:
    """The fields of `MetaInfo` that `request` asks for, about tokens of output and prompt.

    In SGLang's form: `[logprob, token id, text]`; the text only if `tokenizer` is given.
    """
    if not request.return_logprob:
        return {}

    def write(token_id: int, logprob: float | None) -> NativeLogprob:
        text = None if tokenizer is None else _text(tokenizer.token_bytes(token_id))
        return (None if logprob is None else max(logprob, _LOWEST), token_id, text)

    def others(entry: TokenLogprobs, ids: list[int], values: list[float]) -> Any:
        pairs = zip(ids, values, strict=True)
        return None if entry.logprob is None else [write(*pair) for pair in pairs]

    parts = {"output": outputs}
    if request.logprob_start_len >= 0:
        parts["input"] = prompts
    named = request.token_ids_logprob
    fields: dict[str, list[Any]] = {}
    for part, entries in parts.items():
        fields[f"{part}_token_logprobs"] = [write(e.token_id, e.logprob) for e in entries]
        if request.top_logprobs_num:
            tops = [others(e, e.top_ids, e.top_logprobs) for e in entries]
            fields[f"{part}_top_logprobs"] = tops
        if named:
            of_named = [others(e, named if e.id_logprobs else [], e.id_logprobs) for e in entries]
            fields[f"{part}_token_ids_logprobs"] = of_named
    return fields


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
