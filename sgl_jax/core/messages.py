"""The messages from the front (text, HTTP) to the engine process: `FrontMessage`.

Every message is a msgspec struct, tagged with its class name, and travels as msgpack. Each has a
row in the table of `core/calls.py`. `engine_messages.py` has the messages to the front.

Annotations such as `Ge(0)` limit values from clients: the server checks them, the engine does not.
"""

from typing import Annotated, Literal

import msgspec
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, doc

from sgl_jax.core.request_limits import INT32, MAX_NAMESPACE_CHARS, MAX_SESSION_ID_CHARS
from sgl_jax.core.sampling_params import SamplingParams

_MAX_TIMEOUT_S = 1e9
_MAX_PATH_CHARS = 1024


class Name(str):
    """Annotates a field with the name that clients use for it."""


SessionId = Annotated[str, MinLen(1), MaxLen(MAX_SESSION_ID_CHARS)]
# If the client sends none, the server generates one and returns it.
NewSessionId = Annotated[SessionId, doc("default: a new one")]
# Clients send it as `extra_key` or `cache_salt`.
Namespace = Annotated[str, MaxLen(MAX_NAMESPACE_CHARS)]

PauseMode = Literal["abort", "retract", "in_place"]


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of a request in a session.

    Args:
        id: the session's id.
        rid: regular sessions: name of the turn to continue; None begins a new branch. Streaming
            sessions always continue their last turn.
        offset: regular sessions: number of tokens of the continued turn to keep; 0 keeps all, and a
            negative number drops as many from the end.
        replace: regular sessions: drop all turns that continue `rid` (all turns, if that is None).
        drop_previous_output: regular sessions: keep the prompt of the continued turn, not its
            output.
        is_whole: streaming sessions: `input_ids` are the whole conversation, not only its new end.
        bos_token_id: dropped from the front of an appended turn.
        name: the client's name for this turn; None: the rid of the request.
    """

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False
    is_whole: bool = False
    bos_token_id: int | None = None
    name: str | None = None


# Prefix of tenant names that come from the field `user`. Names of API keys have no space, so no
# client can pass for the tenant of a key.
USER_PREFIX = "user "


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The customer that a request belongs to. All requests of one name have the same limits.

    Args:
        weight: share of the engine under contention, relative to other tenants; above 0.
        max_queued: waiting requests at most; further ones are refused. 0: no limit.
        max_running: running requests at most; further ones wait. 0: no limit.
        is_pooled: it has no share of its own (`core.shares`), but one together with all requests
            without a tenant, because clients can make up any number of such names.
    """

    name: str
    weight: float = 1.0
    max_queued: int = 0
    max_running: int = 0
    is_pooled: bool = False


def holder_of(tenant: Tenant | None) -> str:
    """Return the name under which a tenant's share is counted (`core.shares`)."""
    return "" if tenant is None or tenant.is_pooled else tenant.name


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate a continuation of `input_ids`. The front validates it before sending it.

    Args:
        rid: request id, unique among the requests in flight.
        input_ids: prompt token ids, at least one.
        sampling: sampling parameters; `max_new_tokens` is set (the front fills in the default).
        return_logprob: report the log-probability of each generated token.
        top_logprobs_num: report it also for this many most likely tokens at each position.
        token_ids_logprob: report it also for these token ids, at most MAX_LOGPROB_IDS.
        logprob_start_len: report prompt log-probabilities from this position on; -1 for none.
        dp_rank: pin the request to one data-parallel rank; None leaves it to the balancer.
        session: set if the request is a session's turn; the history is put before `input_ids`.
        namespace: requests share cached prefixes only within one namespace, "" included. A turn
            has its session's namespace or "".
        priority: in [-2**31, 2**31); without effect unless scheduling by priority is on.
        is_prompt_only: the client needs no output. The engine still generates one token, which the
            front drops.
        is_length_default: the engine may lower `max_new_tokens` where the session's history leaves
            less room: the client did not set it, or `--strict-max-tokens` is off.
        tenant: None: no tenant; all such requests share the engine as one tenant would.
        is_probe: a probe of the engine's health, for which no limit of the queue counts. Refused
            while there is another one.
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
    is_probe: bool = False


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request, waiting or running. `abort_all` ends every request; `rid` is then "".

    The engine may have finished the request already. `session` is set if it was a session's turn
    whose client will not receive the end: the session then drops that turn. `status_code`: of HTTP,
    if the request is at fault.
    """

    rid: str = ""
    abort_all: bool = False
    message: str = "aborted by the client"
    status_code: int | None = None
    session: SessionTurn | None = None


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The front found a stop string in the text: the output ends after `num_output_tokens`.

    The engine drops the tokens that it generated after that, and sends no reply. If it has ended
    the request already, and that was a turn of `session`, the session drops them.
    """

    rid: str
    num_output_tokens: int
    session: SessionTurn | None = None


class WithReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message that the engine answers with a `Reply` of the same `rid`, which the front sets."""

    rid: str = ""


class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits any longer for the reply to the message with this `call` as its `rid`.

    The engine does not begin that call, or undoes it if it can (`Call.is_undone`). There is no
    reply to this message, but one to the call.
    """

    call: str


class FlushCache(WithReply, frozen=True, kw_only=True, tag=True):
    """Empty the prefix caches; refused while requests run."""


class SaveCache(WithReply, frozen=True, kw_only=True, tag=True):
    """Save the open sessions and the list of cached prefixes in the folder of `--restore-cache`."""


class GetState(WithReply, frozen=True, kw_only=True, tag=True):
    """Get the memory view of each rank and the counters, as a dictionary."""


class ReadMemory(WithReply, frozen=True, kw_only=True, tag=True):
    """Get the place of every page, and all that holds pages or waits for them.

    The reply's data are a snapshot (`memory_view/reader.py`), with the prefix trees if `has_tree`,
    and with token ids if `has_tokens`.
    """

    has_tree: bool = False
    has_tokens: bool = False


class DescribePage(WithReply, frozen=True, kw_only=True, tag=True):
    """Describe the owner of a page and its latest moves."""

    dp_rank: Annotated[int, Ge(0), Lt(INT32)]
    pool: Annotated[int, Ge(0), Lt(INT32)]
    page: Annotated[int, Ge(0), Lt(INT32)]


class FindPrefix(WithReply, frozen=True, kw_only=True, tag=True):
    """Find the longest prefix of these tokens in every rank's prefix tree."""

    input_ids: list[int]
    namespace: Namespace = ""


MemoryMessage = ReadMemory | DescribePage | FindPrefix


class OpenSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Open a session; returns its id, or a 503 while too many are open.

    Refused if the id is in use. All turns have its `namespace` (see `GenerateRequest`).
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
        doc("idle seconds until the session is closed"),
    ] = None
    namespace: Namespace = ""
    tenant: Tenant | None = None


class CloseSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Close a session and free its memory, after a turn in flight has finished."""

    session_id: SessionId


class RollbackSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Take a streaming session back to the end of its first `num_turns` turns."""

    session_id: SessionId
    num_turns: Annotated[int, Ge(0), Lt(INT32)]


class ForkSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Open a streaming session with the history of another; the two share its cached KV. Returns a
    503 while too many sessions are open, or they hold too many tokens.
    """

    session_id: SessionId
    new_session_id: NewSessionId
    tenant: Tenant | None = None


class ListSessions(WithReply, frozen=True, kw_only=True, tag=True):
    """List all open sessions of the caller."""


SessionMessage = OpenSession | CloseSession | RollbackSession | ForkSession | ListSessions


class PauseGeneration(WithReply, frozen=True, kw_only=True, tag=True):
    """Run no step until generation is continued. New requests are accepted and wait."""

    mode: Annotated[
        PauseMode,
        doc(
            "`in_place`: running requests keep their KV; `retract`: their KV is freed and computed "
            "again afterwards; `abort`: all running and waiting requests are aborted"
        ),
    ] = "abort"


class ContinueGeneration(WithReply, frozen=True, kw_only=True, tag=True):
    """Run steps again after a pause; does nothing if generation is not paused."""


class UpdateWeightsFromDisk(WithReply, frozen=True, kw_only=True, tag=True):
    """Load the weights of another folder of the same model. Running requests compute their KV again
    and continue after the same tokens. If loading fails, the old weights stay."""

    model_path: Annotated[
        str, MinLen(1), MaxLen(_MAX_PATH_CHARS), doc("folder on the server's machine")
    ]
    flush_cache: Annotated[
        bool, doc("empty all caches, sessions' too; if false, KV of the old weights stays in use")
    ] = True
    abort_all_requests: Annotated[bool, doc("end all requests first")] = False


class SetInternalState(WithReply, frozen=True, kw_only=True, tag=True):
    """Change settings of the running server, named as its flags; all other settings stay."""

    server_args: Annotated[
        dict[str, str | float],
        doc(
            "`schedule_policy`, `load_balance_method`, `waiting_timeout`, `request_timeout`, "
            "`priority_scheduling_preemption_threshold`, `chunked_prefill_size` up to its value at "
            "start-up"
        ),
    ]


class StartProfile(WithReply, frozen=True, kw_only=True, tag=True):
    """Start a device trace, to be read with TensorBoard or xprof."""

    num_steps: Annotated[
        Annotated[int, Ge(1), Lt(INT32)] | None,
        doc("number of steps to trace; default: until `/stop_profile`"),
    ] = None

    output_dir: Annotated[
        Annotated[str, MinLen(1), MaxLen(_MAX_PATH_CHARS)] | None,
        doc("default: a new temporary folder"),
    ] = None


class StopProfile(WithReply, frozen=True, kw_only=True, tag=True):
    """End the trace and write it."""


class StartExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """Start to record how often each layer's experts are chosen."""


class StopExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """End the record of experts."""


class DumpExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """Return the record of experts that runs, or the last one: a file for
    `--init-expert-location`."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the engine and abort the requests in flight."""


ControlMessage = (
    PauseGeneration
    | ContinueGeneration
    | UpdateWeightsFromDisk
    | SetInternalState
    | StartProfile
    | StopProfile
    | StartExpertRecord
    | StopExpertRecord
    | DumpExpertRecord
)
CacheMessage = FlushCache | SaveCache
# Each gets a `Reply`.
CallMessage = CacheMessage | GetState | MemoryMessage | SessionMessage | ControlMessage
FrontMessage = GenerateRequest | AbortRequest | StopRequest | CallMessage | CancelCall | Shutdown
