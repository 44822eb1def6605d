"""Events of a streamed `/generate`, written piece by piece: nothing sent is encoded twice.

By default each event repeats the answer so far, as SGLang's do: the encoded pieces of text, ids and
log-probabilities are kept and appended to, so an event costs the copying of bytes. An incremental
stream keeps nothing: each event has what is new, and the prompt's log-probabilities come once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.logprobs import native_logprobs
from sgl_jax.server.meta_info import describe
from sgl_jax.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class StreamedAnswer:
    """The events of one request, as bytes."""

    def __init__(
        self,
        stream: RequestStream,
        logprob_tokenizer: Tokenizer | None,
        *,
        index: int | None,
        shows_prompt_ids: bool,
        is_incremental: bool,
    ) -> None:
        """
        Args:
            logprob_tokenizer: writes the texts of tokens beside their log-probabilities, if any.
            index: of the request among those of a list; None is not shown.
        """
        self._stream = stream
        self._tokenizer = logprob_tokenizer
        self._is_incremental = is_incremental
        tail: dict[str, Any] = {} if index is None else {"index": index}
        if shows_prompt_ids:
            tail["prompt_token_ids"] = stream.request.input_ids
        self._tail = b"," + _encode(tail)[1:] if tail else b"}"
        self._num_tokens = 0
        self._text = bytearray()  # inside the quotes
        self._ids = bytearray()  # inside the brackets, as are the lists of log-probabilities
        self._logprobs: dict[str, bytearray] = {}
        for name in native_logprobs(stream.request, None, (), ()):
            self._logprobs[name] = bytearray()

    def event(self, chunk: Chunk) -> bytes:
        """The event that `chunk` is the news of."""
        self._num_tokens += len(chunk.token_ids)
        self._text += _encode(chunk.text)[1:-1]
        _append(self._ids, chunk.token_ids)
        meta = _encode(describe(self._stream, self._num_tokens, chunk.finish))
        parts: list[bytes | bytearray] = [b'data: {"text":"', self._text, b'","output_ids":[']
        parts += [self._ids, b'],"meta_info":', meta[:-1], *self._add_logprobs(chunk)]
        parts += [b"}", self._tail, b"\n\n"]
        data = b"".join(parts)
        if self._is_incremental:
            self._forget_sent()
        return data

    def _add_logprobs(self, chunk: Chunk) -> Iterator[bytes | bytearray]:
        """All that are to be told with `chunk`, as further fields of `meta_info`."""
        if not self._logprobs:
            return
        gained = native_logprobs(
            self._stream.request, self._tokenizer, chunk.logprobs, chunk.prompt_logprobs
        )
        for name, written in self._logprobs.items():
            _append(written, gained[name])
            yield from (b',"', name.encode(), b'":[', written, b"]")

    def _forget_sent(self) -> None:
        self._text.clear()
        self._ids.clear()
        for name, written in list(self._logprobs.items()):
            written.clear()
            if name.startswith("input"):
                del self._logprobs[name]


def _append(written: bytearray, items: Sequence[Any]) -> None:
    """`items` to the inside of a JSON list."""
    if not items:
        return
    if written:
        written += b","
    written += _encode(items)[1:-1]
