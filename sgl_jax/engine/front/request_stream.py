"""The output of one request on its way from the engine to its consumer.

The stream decodes tokens to text and searches for stop strings. The `Frontend` calls `accept*`, and
the consumer calls `take`, perhaps on another thread; the lock of the `Frontend` guards both. Must
never use the network or asyncio.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_messages import FinishReason, Mark, RequestOutput, TokenLogprobs
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.step_plan import Float32Array, Int32Array
from sgl_jax.core.token_values import TOKEN_VALUES
from sgl_jax.text.detokenizer import make_detokenizer
from sgl_jax.text.stop_strings import StopStringChecker
from sgl_jax.text.tokenizer import Tokenizer


class Chunk(NamedTuple):
    """The output of a request since the last chunk, perhaps of many tokens."""

    text: str
    token_ids: list[int]
    num_output_tokens: int  # so far, including this chunk
    logprobs: list[TokenLogprobs]  # one per token of this chunk, if requested
    prompt_logprobs: list[TokenLogprobs]
    finish: FinishReason | None


class RequestStream:
    """One request in flight, from `Frontend.submit` to its last chunk.

    Without stop strings, tokens are queued and `take` decodes them together: under load, many
    tokens cost as much as one.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        lock: threading.Lock,
        on_ready: Callable[[], None],
        *,
        client_rid: str,
        sender: str,
        streaming: bool,
        kept_tokens: Set[int] = frozenset(),
        value_shapes: Mapping[str, tuple[int, ...]] = {},
    ) -> None:
        """Create the stream; `kept_tokens` are special tokens never skipped in the text, and
        `value_shapes` are those of a token's values."""
        self.request = request
        self.client_rid = client_rid  # the client's rid; request.rid is unique
        self.sender = sender  # the caller that may abort it
        self.on_ready = on_ready
        self.streaming = streaming
        self.num_output_tokens = 0
        # A session's turn excludes the history until the first output.
        self.num_prompt_tokens = len(request.input_ids)
        self.cached_tokens = 0
        self._versions: list[tuple[int, str]] = []
        self.has_old_kv = False  # KV of earlier weights was kept for it
        self.hidden: bytes | None = None  # see `RequestOutput`
        self._values: dict[str, list[bytes]] = {}  # of the outputs so far, see `RequestOutput`
        self._value_shapes = value_shapes
        self.dp_rank = 0
        self.finish: FinishReason | None = None
        self.error: Exception | None = None  # set instead of `finish` after a failure
        # By `time.perf_counter`; `started_at` and `marks` are stamped in the engine.
        self.created_at = time.perf_counter()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self.marks: list[Mark] = []
        self.on_end: Callable[[RequestStream], None] | None = None  # see `RequestTracer.begin`

        sampling = request.sampling
        self._lock = lock
        self._detokenizer = make_detokenizer(
            tokenizer,
            request.input_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            kept=kept_tokens,
        )
        self._stop_checker = (
            StopStringChecker(
                sampling.stop,
                keep_stop=sampling.no_stop_trim,
                special=tokenizer.special_tokens,
                hidden=self._detokenizer.skipped,
            )
            if sampling.stop
            else None
        )
        self._text = ""  # decoded but not yet taken; used only with stop strings
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._last_chunk_taken = False

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def e2e_latency_s(self) -> float:
        """Return the seconds from arrival to the end, or to now."""
        end = time.perf_counter() if self.finished_at is None else self.finished_at
        return end - self.created_at

    @property
    def weight_versions(self) -> list[tuple[int, str]]:
        """Return (first token, version) of the output tokens that are from one version of the
        weights; of an output without tokens, the version of the first."""
        end = max(self.num_output_tokens, 1)
        return [(start, version) for start, version in self._versions if start < end]

    @property
    def routed_experts(self) -> Int32Array | None:
        """Return the experts of the tokens from `routed_experts_start_len` to the last but one,
        int32[tokens, layers, top_k]; None if they are not requested, or not computed."""
        if not self.request.return_routed_experts:
            return None
        end = self.num_prompt_tokens + self.num_output_tokens - 1
        start = min(self.request.routed_experts_start_len, end)
        experts = self._token_values("routed_experts", start, end)
        return None if experts is None else experts.astype(np.int32)

    @property
    def hidden_states(self) -> Float32Array | None:
        """Return the hidden states of all tokens of the prompt and of the output but the last,
        float32[tokens, hidden_size]; None if they are not requested, or not computed."""
        if not self.request.return_hidden_states:
            return None
        end = self.num_prompt_tokens + max(self.num_output_tokens - 1, 0)
        return self._token_values("hidden_states", 0, end)

    def _token_values(self, name: str, start: int, end: int) -> NDArray[Any] | None:
        """Return the values of the tokens from `start` to `end`; None if not all are there."""
        parts, first = self._values.get(name, ()), self.request.token_values_start
        values = np.frombuffer(b"".join(parts), TOKEN_VALUES[name])
        values = values.reshape(-1, *self._value_shapes[name])[max(start - first, 0) :]
        return values[: end - start] if len(values) >= end - start else None

    def note_weights(self, version: str) -> None:
        """Note that all further tokens are from the weights `version`."""
        start = self.num_output_tokens
        if self._versions and self._versions[-1][0] == start:
            self._versions.pop()
        self._versions.append((start, version))

    def accept_token(self, token: int) -> None:
        """Take one plain token, and set `finish` if it completes a stop string."""
        if self._stop_checker is not None:
            self._scan([token], [token])
            return
        self._ids.append(token)
        self.num_output_tokens += 1

    def accept(self, output: RequestOutput) -> None:
        """Take a full output, and set `finish` at the end or if it completes a stop string."""
        self.cached_tokens = output.cached_tokens
        self.dp_rank = output.dp_rank
        self.hidden = output.hidden or self.hidden
        for name, values in output.token_values.items():
            self._values.setdefault(name, []).append(values)
        if output.prompt_tokens is not None:
            self.num_prompt_tokens = output.prompt_tokens
        self._logprobs += output.logprobs or ()
        self._prompt_logprobs += output.prompt_logprobs or ()
        ids = output.token_ids
        if self.request.is_prompt_only:
            self._logprobs.clear()
            if output.finish is not None:
                is_abort = output.finish.type == "abort"
                self.finish = output.finish if is_abort else FinishReason("length")
            return
        if self._stop_checker is None:
            self._ids += ids
            self.num_output_tokens += len(ids)
            self.finish = output.finish
            return
        self._scan(ids, self._with_text(ids, output.finish))
        if self.finish is None and output.finish is not None:
            self.finish = output.finish
            rest = self._stop_checker.feed(self._detokenizer.flush())
            self._text += rest.text + self._stop_checker.flush()

    def drop_unseen_end(self) -> bool:
        """Return True, once, if the end of the output was not taken. No `take` may follow."""
        if self._last_chunk_taken or self.finish is None or self.finish.type == "abort":
            return False
        self._last_chunk_taken = True
        return True

    def take(self) -> Chunk | None:
        """Return the output since the last call; None if there is none.

        Raises:
            EngineDeadError, ShuttingDownError: the engine ended, or the server stopped waiting,
                before the request ended.
        """
        with self._lock:
            finish = None if self._last_chunk_taken else self.finish
            if not self._ids and not self._prompt_logprobs and finish is None:
                if self.error is not None and self.finish is None:
                    raise self.error
                return None
            ids, self._ids = self._ids, []
            text, self._text = self._text, ""
            logprobs, self._logprobs = self._logprobs, []
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
            num_output_tokens = self.num_output_tokens
            self._last_chunk_taken = finish is not None
        if finish is None:
            if self._stop_checker is None:
                text = self._detokenizer.push(ids)
        else:
            if self._stop_checker is None:
                with_text = self._with_text(ids, finish)
                text = self._detokenizer.push(with_text) + self._detokenizer.flush()
            self.end_trace()
        return Chunk(text, ids, num_output_tokens, logprobs, prompt_logprobs, finish)

    def end_trace(self) -> None:
        """End the trace, after the consumer has taken all or has left. Idempotent."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)

    def _scan(self, ids: Sequence[int], with_text: Sequence[int]) -> None:
        assert self._stop_checker is not None
        min_new_tokens = self.request.sampling.min_new_tokens
        for index, token in enumerate(ids):
            self._ids.append(token)
            self.num_output_tokens += 1
            piece = self._detokenizer.push((token,)) if index < len(with_text) else ""
            piece = piece or self._stop_checker.hidden(token)
            may_stop = self.num_output_tokens >= min_new_tokens
            check = self._stop_checker.feed(piece, may_stop=may_stop)
            self._text += check.text
            if check.matched is not None:
                self.finish = FinishReason(type="stop", matched=check.matched)
                overshoot = len(ids) - index - 1
                if overshoot:
                    del self._logprobs[-overshoot:]
                return

    def _with_text(self, ids: list[int], finish: FinishReason | None) -> list[int]:
        """Return `ids` without the stop token that ended the output, except with `no_stop_trim`."""
        if self.request.sampling.no_stop_trim or finish is None or finish.type != "stop":
            return ids
        return ids[:-1] if ids and finish.matched == ids[-1] else ids
