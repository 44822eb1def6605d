"""Answers of `/generate`: their fields, and their JSON as they grow."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.apis.openai import LOWEST_LOGPROB, token_text
from sgl_jax.text.tokenizer import Tokenizer

NativeLogprob = tuple[float | None, int, str | None]  # log-probability, token id, text


class VersionSpan(Struct, frozen=True):
    """The output tokens from `start` to `end` are from one version of the weights."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, frozen=True):
    """Facts of an answer in addition to its text. At the end, `e2e_latency` is in seconds,
    `weight_versions` covers the output tokens, `has_old_kv` is true if KV of earlier weights was
    kept, and `routed_experts` is base64 of int32 [tokens, layers, top_k]. `hidden_states` has a
    list of the prompt's vectors, then the vector of each output token but the last."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: dict[str, int | str | None] | None
    dp_rank: int
    weight_version: str  # of the last token
    e2e_latency: float | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    has_old_kv: bool | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    hidden_states: list[Any] | UnsetType = UNSET
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    input_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET


class Generated(Struct, frozen=True):
    """One answer; in a stream `text` and `output_ids` are all so far, or only the new part.

    `index` counts the answers of a list.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_encode = msgspec.json.encode


class NativeAnswer:
    """One answer as JSON, a `Generated`. Only the gain of each chunk is encoded."""

    def __init__(
        self, stream: RequestStream, logprob_tokenizer: Tokenizer | None, tail: dict[str, Any]
    ) -> None:
        """Set up an empty answer with the last fields `tail`. With `logprob_tokenizer`,
        log-probabilities have the texts of their tokens."""
        self._stream = stream
        self._tokenizer = logprob_tokenizer
        self._tail = b"," + _encode(tail)[1:] if tail else b"}"
        self._text = bytearray()  # without quotes
        self._ids = bytearray()  # without brackets; so are the lists of log-probabilities
        names = native_logprobs(stream.request, None, (), ())
        self._logprobs = {name: bytearray() for name in names}

    def write(self, chunk: Chunk) -> bytes:
        self._text += _encode(chunk.text)[1:-1]
        _append(self._ids, chunk.token_ids)
        facts = _encode(describe(self._stream, chunk))[:-1]
        parts: list[bytes | bytearray]
        parts = [b'{"text":"', self._text, b'","output_ids":[', self._ids, b'],"meta_info":', facts]
        if self._logprobs:
            gained = native_logprobs(
                self._stream.request, self._tokenizer, chunk.logprobs, chunk.prompt_logprobs
            )
            for name, written in self._logprobs.items():
                _append(written, gained[name])
                parts += (b',"', name.encode(), b'":[', written, b"]")
        parts += (b"}", self._tail)
        return b"".join(parts)

    def forget_sent(self) -> None:
        self._text.clear()
        self._ids.clear()
        for name, written in list(self._logprobs.items()):
            written.clear()
            if name.startswith("input"):
                del self._logprobs[name]


def _append(written: bytearray, items: Sequence[Any]) -> None:
    if items:
        written += b"," if written else b""
        written += _encode(items)[1:-1]


def describe(stream: RequestStream, chunk: Chunk, **logprobs: Any) -> MetaInfo:
    """Return the facts of `stream` after `chunk`; `logprobs` are further fields."""
    finish, num_tokens = chunk.finish, chunk.num_output_tokens
    reason: dict[str, int | str | None] | None = None
    if finish is not None:
        more = {"stop": ("matched", finish.matched), "length": ("length", num_tokens)}
        name, value = more.get(finish.type, ("message", finish.message))
        reason = {"type": finish.type, name: value}
    experts = None if finish is None else stream.routed_experts
    versions = stream.weight_versions
    return MetaInfo(
        id=stream.client_rid,
        prompt_tokens=stream.num_prompt_tokens,
        completion_tokens=num_tokens,
        cached_tokens=stream.cached_tokens,
        finish_reason=reason,
        dp_rank=stream.dp_rank,
        weight_version=versions[-1][1],
        e2e_latency=UNSET if finish is None else stream.e2e_latency_s,
        weight_versions=UNSET if finish is None else _spans(versions, num_tokens),
        has_old_kv=True if finish is not None and stream.has_old_kv else UNSET,
        routed_experts=UNSET if experts is None else base64.b64encode(experts.tobytes()).decode(),
        hidden_states=UNSET if finish is None else _hidden_states(stream),
        **logprobs,
    )


def _spans(versions: Sequence[tuple[int, str]], num_tokens: int) -> list[VersionSpan]:
    ends = [*(start for start, _ in versions[1:]), num_tokens]
    return [
        VersionSpan(version, start, end)
        for (start, version), end in zip(versions, ends, strict=True)
    ]


def _hidden_states(stream: RequestStream) -> list[Any] | UnsetType:
    states = stream.hidden_states
    if states is None:
        return UNSET
    count = stream.num_prompt_tokens
    return [states[:count].tolist(), *states[count:].tolist()]


def native_logprobs(
    request: GenerateRequest,
    tokenizer: Tokenizer | None,
    outputs: Sequence[TokenLogprobs],
    prompts: Sequence[TokenLogprobs],
) -> dict[str, list[Any]]:
    """Return the log-probability fields of `MetaInfo` requested by `request`, for both parts.

    Entries have SGLang's form `[logprob, token id, text]`; the text needs a `tokenizer`.
    """
    if not request.return_logprob:
        return {}

    def write(token_id: int, logprob: float | None) -> NativeLogprob:
        text = None if tokenizer is None else token_text(tokenizer.token_bytes(token_id))
        return (None if logprob is None else max(logprob, LOWEST_LOGPROB), token_id, text)

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
