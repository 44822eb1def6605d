"""The messages from the engine process to the front (text, HTTP): `EngineMessage`.

Every message is a msgspec struct, tagged with its class name, and travels as msgpack.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from sgl_jax.core.exit_codes import FAILED
from sgl_jax.core.progress import PhaseReport

FinishType = Literal["stop", "length", "abort"]


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended. `matched` is the stop token id or stop string, if one ended it."""

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    # HTTP status of the response, 400 or 5xx, for an abort that the client did not request.
    status_code: int | None = None
    code: str | None = None  # the reason as a name for programs, where the status is too coarse
    param: str | None = None  # the field at fault


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and of others at its position.

    The others are the most likely tokens, and the request's `token_ids_logprob`.
    """

    token_id: int
    logprob: float | None  # None for the first prompt token, which nothing predicts
    top_ids: list[int]
    top_logprobs: list[float]
    id_logprobs: list[float] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The new tokens of one request since its last output.

    `cached_tokens` counts the prompt tokens whose KV came from the prefix cache. `finish` is set on
    the last output of the request, exactly once.
    """

    rid: str
    token_ids: list[int]
    cached_tokens: int
    dp_rank: int
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # With the first output of a session's turn: prompt tokens, history included.
    prompt_tokens: int | None = None


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A prefill chunk of `num_tokens`, from its launch until its result was read; 0 tokens: a
    retract. Times as in `OutputBatch.starts`.
    """

    begin_s: float
    end_s: float
    num_tokens: int


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step; each request with an output is either in `outputs` or in `rids`.

    Most requests get exactly one plain token in most steps: `rids[i]` gets `token_ids()[i]`. A
    first or last output, several tokens, or log-probabilities are in `outputs`.

    `tokens` is an int32 array, little-endian: building and encoding a list of integers would take a
    noticeable part of the engine's time per step.
    """

    outputs: list[RequestOutput] = []
    rids: list[str] = []
    tokens: bytes = b""
    # Requests that started for the first time -> the time, by `time.perf_counter` of this machine.
    starts: dict[str, float] = {}
    # Prefill chunks and retracts of requests since the last batch; only with --enable-trace.
    marks: dict[str, list[Mark]] = {}

    def token_ids(self) -> list[int]:
        """The new token of each of `rids`."""
        ids: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return ids


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's reply to the message with the same `rid`.

    If not `ok`, `message` has the reason, and `data` may have the `param` at fault, a `code` for
    programs, and the HTTP `status_code` if it is not 400.
    """

    rid: str
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}
    cost_s: float = 0.0  # processor time that the engine's loop took, if the call is a read


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts of a started engine, such as its sizes and settings.

    It is the engine's first message, sent when the programs are compiled. A call that changes some
    facts sends it again, before its reply.
    """

    info: dict[str, Any]


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot go on; the process ends after this message, and the server with
    `exit_code` (core/exit_codes.py).

    `message` is for the operator, not for clients.
    """

    message: str
    exit_code: int = FAILED


class EndRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another host of this engine got a signal: finish the running requests, then end all."""

    host: int


class HostFigures(msgspec.Struct, frozen=True):
    """Work of one host of an engine since its start."""

    num_steps: int = 0
    launch_s: float = 0.0  # from a step's arrival until it was launched, all steps together
    step_s: float = 0.0  # from a step's arrival until its tokens were there

    def plus(self, num_steps: int = 0, launch_s: float = 0.0, step_s: float = 0.0) -> "HostFigures":
        """These figures and more work."""
        return HostFigures(
            self.num_steps + num_steps, self.launch_s + launch_s, self.step_s + step_s
        )


class HostReport(msgspec.Struct, frozen=True):
    """The figures of a host, and the seconds since it sent them."""

    rank: int
    figures: HostFigures
    silent_s: float = 0.0


HEARTBEAT_INTERVAL_S = 1.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sign of life of the engine process, once a second, also while it loads, compiles or computes.

    `turn_s` is the age of the engine loop's current turn in seconds: it is large during a long
    step. None before the loop starts. `progress` is a phase under way, if there is one.
    """

    turn_s: float | None
    progress: PhaseReport | None = None
    figures: HostFigures | None = None  # of a host that host 0 leads


EngineMessage = OutputBatch | Reply | EngineInfo | EngineFailed | EndRequested | Heartbeat
