"""Messages from the engine process to the frontend (text, HTTP): `EngineMessage`.

Every message is a msgspec struct, tagged with its class name and sent as msgpack.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy as np

from sgl_jax.core.errors import FAILED
from sgl_jax.core.progress import PhaseReport

FinishType = Literal["stop", "length", "abort"]


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended. `matched` is the stop token id or stop string that ended it, if any."""

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    # HTTP status of the response, 400 or 5xx, for an abort that the client did not request.
    status_code: int | None = None
    code: str | None = None  # machine-readable reason, finer than the status
    param: str | None = None  # the invalid field


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of alternatives at its position.

    The alternatives are the most likely tokens and the request's `token_ids_logprob`.
    """

    token_id: int
    logprob: float | None  # None for the first prompt token, which has no context
    top_ids: list[int]
    top_logprobs: list[float]
    id_logprobs: list[float] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request since its last output.

    `cached_tokens` counts the prompt tokens with KV from the prefix cache. `finish` is set on
    the last output of the request, exactly once.
    """

    rid: str
    token_ids: list[int]
    cached_tokens: int
    dp_rank: int
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # Prompt tokens including the history; set on the first output of a session's turn.
    prompt_tokens: int | None = None
    # Little-endian float32[hidden_size], if requested.
    hidden: bytes | None = None
    # The requested values of the next n tokens, [n, ...] each; see `token_values.py`.
    token_values: dict[str, bytes] = {}


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A prefill chunk from its launch until its result was read; a retract has 0 tokens. Times are
    of `time.perf_counter` of this machine."""

    begin_s: float
    end_s: float
    num_tokens: int


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step; each request with an output is either in `outputs` or in `rids`.

    Most requests get exactly one token in most steps: `rids[i]` gets `token_ids()[i]`. A first or
    last output, several tokens, or log-probabilities go to `outputs`.

    `tokens` is a little-endian int32 array: encoding a list of integers would take a noticeable
    part of the engine's time per step.
    """

    outputs: list[RequestOutput] = []
    rid_lists: list[list[str]] = []  # `rids` in parts, which successive batches share
    tokens: bytes = b""
    # Requests started for the first time -> the time, by `time.perf_counter` of this machine.
    starts: dict[str, float] = {}
    # Prefill chunks and retracts by rid since the last batch; only with --enable-trace.
    marks: dict[str, list[Mark]] = {}

    @property
    def rids(self) -> list[str]:
        """Return the requests that got one token and nothing else, in a new list."""
        return list(chain.from_iterable(self.rid_lists))

    def parts(self, most_bytes: int) -> Iterator["OutputBatch"]:
        """Return the batch in parts with values of tokens of at most `most_bytes`, or of one
        request: many long prompts may end in one step."""
        rest, part, num_bytes = self, list[RequestOutput](), 0
        for output in self.outputs:
            own = sum(map(len, output.token_values.values()))
            if own and num_bytes + own > most_bytes and part:
                yield msgspec.structs.replace(rest, outputs=part)
                rest, part, num_bytes = OutputBatch(), [], 0
            part.append(output)
            num_bytes += own
        yield self if rest is self else OutputBatch(part)

    def token_ids(self) -> list[int]:
        """Return the new token of each request in `rids`."""
        ids: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return ids


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's reply to the message with the same `rid`.

    If not `ok`, `message` has the reason, and `data` may have the invalid `param`, a
    machine-readable `code`, and the HTTP `status_code` if it is not 400.
    """

    rid: str
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}
    cost_s: float = 0.0  # CPU time spent in the engine's loop, for a read-only call


def answer(message: Any, data: Any) -> Reply:
    """Return the reply to a successful call. A dictionary of builtins as `data` is not copied."""
    builtins = data if isinstance(data, dict) else msgspec.to_builtins(data)
    return Reply(rid=message.rid, ok=True, data=builtins)


def refusal(message: Any, why: str, **data: Any) -> Reply:
    """Return the reply to a refused call, with the reason `why` and `Reply.data` from `data`."""
    return Reply(rid=message.rid, ok=False, message=why, data=data)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts about a started engine, such as its sizes and settings.

    This is the engine's first message, sent when the programs are compiled. A call that changes
    some facts sends it again before its reply.
    """

    info: dict[str, Any]


class WeightsChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All tokens after this message are from the weights `version`. The requests `kept_rids` keep
    KV of earlier weights. With `is_label`, the weights are the same."""

    version: str
    kept_rids: list[str] = []
    is_label: bool = False


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot continue. The process ends after this message, and the server exits with
    `exit_code` (core/errors.py).

    `message` is for the operator, not for clients.
    """

    message: str
    exit_code: int = FAILED


class EndRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another host of this engine received a signal: finish the running requests, then stop."""

    host: int


class HostFigures(msgspec.Struct, frozen=True):
    """Work of one host of an engine since its start."""

    num_steps: int = 0
    launch_s: float = 0.0  # total time from a step's arrival to its launch
    step_s: float = 0.0  # total time from a step's arrival to its tokens

    def plus(self, num_steps: int = 0, launch_s: float = 0.0, step_s: float = 0.0) -> "HostFigures":
        return HostFigures(
            self.num_steps + num_steps, self.launch_s + launch_s, self.step_s + step_s
        )


class HostReport(msgspec.Struct, frozen=True):
    """The figures of a host and the seconds since it sent them."""

    rank: int
    figures: HostFigures
    silent_s: float = 0.0


HEARTBEAT_INTERVAL_S = 1.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sign of life of the engine process, once a second, also during loading, compiling and steps.

    `turn_s` is the age in seconds of the current iteration of the engine loop, large during a long
    step; None before the loop starts. `progress` is the phase under way, if any.
    """

    turn_s: float | None
    progress: PhaseReport | None = None
    figures: HostFigures | None = None  # sent by hosts other than host 0


EngineMessage = (
    OutputBatch | Reply | EngineInfo | WeightsChanged | EngineFailed | EndRequested | Heartbeat
)
