"""The messages between the front (text, HTTP) and the engine process.

Every message is a msgspec struct, tagged by its class name, so that it travels as msgpack over
a socket and never as pickle. Front to engine: `FrontMessage`, each with a row in the table of
`core/calls.py`. Engine to front: `EngineMessage`.

Annotations limit the values of clients; the server checks them, the engine does not.
"""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, doc

from sgl_jax.core.grammar import Grammar
from sgl_jax.core.request_limits import INT32, MAX_NAMESPACE_CHARS, MAX_SESSION_ID_CHARS
from sgl_jax.core.sampling_params import SamplingParams

_MAX_TIMEOUT_S = 1e9
_MAX_PATH_CHARS = 1024


class Name(str):
    """Annotates a field that clients call so."""


SessionId = Annotated[str, MinLen(1), MaxLen(MAX_SESSION_ID_CHARS)]
# If the client gives none, the answer has the generated one.
NewSessionId = Annotated[SessionId, doc("default: a new one")]
# Clients name it by `extra_key` or `cache_salt`.
Namespace = Annotated[str, MaxLen(MAX_NAMESPACE_CHARS)]

FinishType = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended. `matched` is the stop token id or stop string, if one ended it."""

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    # For an abort not requested by the client: the HTTP status of its answer, 400 or 5xx.
    status_code: int | None = None
    code: str | None = None  # a name of the reason for programs, where the status is too coarse
    param: str | None = None  # the field at fault


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of a request in a session.

    Args:
        id: of the session.
        rid: regular sessions: the turn to append to, or with `replace` the one to replace; None
            starts anew. Streaming sessions always append to their last turn.
        offset: regular sessions: keep so many tokens of the history (0: all), or if negative, all
            but so many.
        replace: regular sessions: drop the turns after `rid` (everything, without one).
        drop_previous_output: regular sessions: append to the last turn's prompt, not its output.
        is_whole: streaming sessions: `input_ids` are the whole conversation, not its end; the
            session finds the part it has.
        bos_token_id: dropped from the front of an appended turn.
        name: how the client calls this turn; by default its request's rid, which the front may
            have made unique.
    """

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False
    is_whole: bool = False
    bos_token_id: int | None = None
    name: str | None = None


# Begins the names of tenants that clients choose (`user`). No key's name holds a space, so no
# client can choose a key's name.
USER_PREFIX = "user "


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The customer a request is served for. All requests of one name state the same numbers.

    Args:
        weight: share of the engine under contention, relative to other tenants; above 0.
        max_queued: requests that may wait; with more, new ones are refused. 0: no limit.
        max_running: requests that may run; others wait meanwhile. 0: no limit.
    """

    name: str
    weight: float = 1.0
    max_queued: int = 0
    max_running: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate a continuation of `input_ids`. Validated before it is sent.

    Args:
        rid: request id, unique among the requests in flight.
        input_ids: prompt token ids, at least one.
        sampling: how to choose tokens; `max_new_tokens` is set (the front fills the default).
        return_logprob: report the log-probability of each generated token.
        top_logprobs_num: and of this many most likely tokens at each position.
        token_ids_logprob: and of these tokens, at most MAX_LOGPROB_IDS.
        logprob_start_len: report prompt log-probabilities from this position on; -1 for none.
        dp_rank: pin the request to one data-parallel rank; None leaves it to the balancer.
        session: the session this is a turn of; its history is put before `input_ids`.
        namespace: requests share cached prefixes only within one namespace; "" is one, too. A
            turn names none, or its session's.
        priority: in [-2**31, 2**31); without effect unless scheduling by priority is on.
        is_prompt_only: the client needs no output. The engine generates one token all the same;
            the front keeps it to itself.
        is_length_default: the client did not set `max_new_tokens`: a turn gets fewer where the
            history of its session leaves less room.
        tenant: the tenant that pays for it; None: no tenant, all such requests share alike.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    logprob_start_len: int = -1
    dp_rank: int | None = None
    session: SessionTurn | None = None
    is_length_default: bool = False
    is_prompt_only: bool = False
    namespace: str = ""
    priority: int = 0
    tenant: Tenant | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request wherever it is. `rid` "" with `abort_all` ends every request.

    The engine may have finished it meanwhile. `session` is set if the client did not receive that
    end and will not: the session that it was a turn of then forgets the turn.
    """

    rid: str = ""
    abort_all: bool = False
    message: str = "aborted by the client"
    session: SessionTurn | None = None


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stop string was found in the text: the output is finished at `num_output_tokens`.

    Later tokens of the request are overshoot; the engine forgets them and sends no reply. It may
    have ended the request meanwhile: then a `session` that it was a turn of forgets them.
    """

    rid: str
    num_output_tokens: int
    session: SessionTurn | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message that a `Reply` answers; the front gives it its `rid`."""

    rid: str = ""


class CompileGrammar(Question, frozen=True, kw_only=True, tag=True):
    """Compile a grammar before requests with it are sent; refused if it cannot be served."""

    grammar: Grammar


class FlushCache(Question, frozen=True, kw_only=True, tag=True):
    """Empty the prefix caches; refused while requests run."""


class GetState(Question, frozen=True, kw_only=True, tag=True):
    """Request the memory view and counters; the `Reply` has a dictionary."""


class OpenSession(Question, frozen=True, kw_only=True, tag=True):
    """Open a session; answers its id, or a 503 while too many are open.

    Refused if the id is in use. `namespace` is that of all its turns, as in `GenerateRequest`.
    """

    session_id: NewSessionId
    streaming: Annotated[bool, doc("append-only, one request in flight, KV kept in place")] = False
    # The name is SGLang's.
    capacity_of_str_len: Annotated[
        int, Ge(0), Lt(INT32), doc("tokens that the history may hold; 0: no limit")
    ] = 0
    timeout_s: Annotated[
        Annotated[float, Gt(0), Le(_MAX_TIMEOUT_S)] | None,
        Name("timeout"),
        doc("idle seconds until it is closed"),
    ] = None
    namespace: Namespace = ""


class CloseSession(Question, frozen=True, kw_only=True, tag=True):
    """Close a session and free its memory; a turn in flight is finished first."""

    session_id: SessionId


class RollbackSession(Question, frozen=True, kw_only=True, tag=True):
    """Take a streaming session back to the end of its first `num_turns` turns."""

    session_id: SessionId
    num_turns: Annotated[int, Ge(0), Lt(INT32)]


class ForkSession(Question, frozen=True, kw_only=True, tag=True):
    """Open a streaming session with the history of another; what is cached of it is shared. A 503
    while too many are open, or sessions hold too many tokens.
    """

    session_id: SessionId
    new_session_id: NewSessionId


class ListSessions(Question, frozen=True, kw_only=True, tag=True):
    """All open sessions of the caller."""


SessionMessage = OpenSession | CloseSession | RollbackSession | ForkSession | ListSessions


class PauseGeneration(Question, frozen=True, kw_only=True, tag=True):
    """Run no step until generation is continued. Requests are taken meanwhile, and wait."""

    mode: Annotated[
        PauseMode,
        doc(
            "of running requests, `in_place` leaves all as it is; `retract` takes their KV, and "
            "they go on with the same tokens afterwards; `abort` ends them and those that wait"
        ),
    ] = "abort"


class ContinueGeneration(Question, frozen=True, kw_only=True, tag=True):
    """Run steps again after a pause; does nothing if there is none."""


class UpdateWeightsFromDisk(Question, frozen=True, kw_only=True, tag=True):
    """Go on with the weights of another folder of the same model. Requests that run give up their
    KV, and go on with the same tokens; if loading fails, with the old weights."""

    model_path: Annotated[
        str, MinLen(1), MaxLen(_MAX_PATH_CHARS), doc("folder on the server's machine")
    ]
    flush_cache: Annotated[
        bool, doc("empty the prefix caches, sessions' too; else KV of the old weights is used on")
    ] = True
    abort_all_requests: Annotated[bool, doc("end all requests first")] = False


class SetInternalState(Question, frozen=True, kw_only=True, tag=True):
    """Change settings while the server runs, under the names of its flags; the others stay."""

    server_args: Annotated[
        dict[str, str | float],
        doc(
            "`schedule_policy`, `load_balance_method`, `waiting_timeout`, `request_timeout`, "
            "`priority_scheduling_preemption_threshold`, `chunked_prefill_size` up to that of the "
            "start"
        ),
    ]


class StartProfile(Question, frozen=True, kw_only=True, tag=True):
    """Start a device trace, to be read with TensorBoard or xprof."""

    num_steps: Annotated[
        Annotated[int, Ge(1), Lt(INT32)] | None,
        doc("steps after which it ends by itself; default: it ends at `/stop_profile`"),
    ] = None

    output_dir: Annotated[
        Annotated[str, MinLen(1), MaxLen(_MAX_PATH_CHARS)] | None,
        doc("default: a new temporary folder"),
    ] = None


class StopProfile(Question, frozen=True, kw_only=True, tag=True):
    """End the trace and write it."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the engine; requests in flight are aborted. To finish them, wait before sending this."""


ControlMessage = (
    PauseGeneration
    | ContinueGeneration
    | UpdateWeightsFromDisk
    | SetInternalState
    | StartProfile
    | StopProfile
)
Asked = CompileGrammar | FlushCache | GetState | SessionMessage | ControlMessage
FrontMessage = GenerateRequest | AbortRequest | StopRequest | Asked | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and of others at its position.

    These are the most likely ones, and the ones that the request names (`token_ids_logprob`).
    """

    token_id: int
    logprob: float | None  # None for the first prompt token, which nothing predicts
    top_ids: list[int]
    top_logprobs: list[float]
    id_logprobs: list[float] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The gain of one request since its last output.

    `token_ids` are the new tokens only. `cached_tokens` counts the prompt tokens whose KV came
    from the prefix cache. `finish` is set on the last output of the request, exactly once.
    """

    rid: str
    token_ids: list[int]
    cached_tokens: int
    dp_rank: int
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # For a session's turn, with its first output: tokens of the prompt, history included.
    prompt_tokens: int | None = None


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step, one entry per request that gained something.

    Most requests gain exactly one plain token in most steps: `rids[i]` gained `token_ids()[i]`.
    Everything else (first output, last output, several tokens, log-probabilities) is in `outputs`.
    A request is in one of the two, not in both.

    `tokens` are int32, little-endian: a copy of an array, since the engine would take as long to
    make a list of numbers, and to encode it, as for much else of a step.
    """

    outputs: list[RequestOutput] = []
    rids: list[str] = []
    tokens: bytes = b""

    def token_ids(self) -> list[int]:
        """The tokens, one for each of `rids`."""
        ids: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return ids


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a message that carries `rid` and expects one.

    If not `ok`, `message` has the reason, and `data` may name the `param` at fault, a `code`
    for programs and the `status_code` that a client should see, if not 400.
    """

    rid: str
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The facts of a started engine: every program is compiled, sizes are known.

    Its first message, and sent again when some have changed, before the reply to that call.
    """

    info: dict[str, Any]


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot go on; the process ends after this message.

    `message` is for the operator, not for clients.
    """

    message: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's process runs. Sent once a second, also while it loads, compiles, or computes.

    `turn_s` is how long the engine loop has been in its present turn, in seconds: a long step
    shows there. None before there is a loop.
    """

    turn_s: float | None


EngineMessage = OutputBatch | Reply | EngineInfo | EngineFailed | Heartbeat
