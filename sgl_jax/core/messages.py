"""Messages from the frontend (text, HTTP) to the engine process: `FrontMessage`.

Every message is a msgspec struct, tagged with its class name and sent as msgpack, with a record of
its handler, reply and route (`core/calls.py`). Messages on the model's weights are in
`weight_messages.py`, on profiles in `profile_messages.py`, those to the frontend in
`engine_messages.py`.

Annotations such as `Ge(0)` limit values from clients: the server checks them, the engine does not.
"""

from typing import Annotated, Any, Literal

import msgspec
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, doc

from sgl_jax.core import calls
from sgl_jax.core.calls import CALL_OF as CALL_OF
from sgl_jax.core.calls import WithReply, call
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.profile_messages import ProfileMessage
from sgl_jax.core.request_limits import INT32, MAX_NAMESPACE_CHARS, MAX_SESSION_ID_CHARS
from sgl_jax.core.sampling_params import LogprobsMode, SamplingParams
from sgl_jax.core.shares import Tenant
from sgl_jax.core.weight_messages import WeightMessage


class Name(str):
    """Annotation with the client's name of a field."""


SessionId = Annotated[str, MinLen(1), MaxLen(MAX_SESSION_ID_CHARS)]
# If the client sends no id, the server generates and returns one.
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
        bos_token_id: token to drop from the front of an appended turn.
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


# The hints of requests, and their outcomes (`scheduler/hint_counts.py`).
HINTS = ("pause", "retain", "evict", "unknown")
HINT_OUTCOMES = ("recorded", "capped", "ignored")


class Reuse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of the next request of the same conversation. It orders evictions, no more.

    Args:
        agent: the conversation's id among its tenant's; "" if the client sends none.
        call_token_ids: any tool call has one of these tokens; () if no answer is known to be final,
            because no tools are offered or calls begin with no token of their own.
        pause_s: the client's forecast of the seconds from the end of the answer to that request.
        is_family: `agent` is the id of a group of conversations.
        keep_s: the client wants the prefix to be kept for these seconds before its others.
        is_last: the conversation ends with the answer.
    """

    agent: str = ""
    call_token_ids: tuple[int, ...] = ()
    pause_s: float | None = None
    is_family: bool = False
    keep_s: float = 0.0
    is_last: bool = False


@call("submit")
class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate a continuation of `input_ids`. The frontend validates it before sending it.

    Args:
        rid: request id, unique among the requests in flight.
        input_ids: prompt token ids, at least one.
        sampling: sampling parameters; `max_new_tokens` is set (the frontend fills in the default).
        return_logprob: report the log-probability of each generated token.
        top_logprobs_num: also report it for this many most likely tokens at each position.
        token_ids_logprob: also report it for these token ids, at most MAX_LOGPROB_IDS.
        logprob_start_len: report prompt log-probabilities from this position on; -1 for none.
        logprobs_mode: the distribution of the output's log-probabilities; a prompt's are raw.
        scores_output: the prompt ends with a given output: its log-probabilities from
            `logprob_start_len` on are of `logprobs_mode`, too, without penalties and bias.
        dp_rank: data-parallel rank that must run the request; None: the balancer chooses.
        session: set if the request is a session's turn; the history is put before `input_ids`.
        namespace: requests share cached prefixes only within one namespace; "" is also one. A turn
            has its session's namespace or "".
        priority: in [-2**31, 2**31); ignored unless scheduling by priority is on.
        is_prompt_only: the client needs no output. The engine still generates one token, which the
            frontend drops.
        return_hidden: report the last layer's hidden state of the prompt's last token, after the
            final norm; only with `is_prompt_only`.
        return_routed_experts: report the experts of each token.
        routed_experts_start_len: report them from this position on.
        return_hidden_states: report the last layer's hidden state of each token, after the final
            norm.
        is_length_default: the engine may lower `max_new_tokens` to the room that the session's
            history leaves: the client did not set it, or `--strict-max-tokens` is off.
        tenant: None: no tenant; all such requests share the engine as one tenant.
        is_probe: a health probe, exempt from the queue limits. Refused while another probe is in
            flight.
        reuse: what is known of the conversation's next request.
        num_unknown_hints: hints of the client that are not understood.
        images: the images of `input_ids`, in order; their tokens are those of `image_token_ids`.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    logprob_start_len: int = -1
    logprobs_mode: LogprobsMode = "raw"
    scores_output: bool = False
    dp_rank: int | None = None
    session: SessionTurn | None = None
    is_length_default: bool = False
    is_prompt_only: bool = False
    return_hidden: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_hidden_states: bool = False
    namespace: str = ""
    priority: int = 0
    tenant: Tenant | None = None
    is_probe: bool = False
    reuse: Reuse = Reuse()
    num_unknown_hints: int = 0
    images: tuple[ImageInput, ...] = ()

    @property
    def token_values(self) -> int:
        """Return the mask of requested values of tokens; see `token_values.py`."""
        return self.return_routed_experts | self.return_hidden_states << 1

    @property
    def token_values_start(self) -> int:
        """Return the position of the first token whose values are reported."""
        return 0 if self.return_hidden_states else self.routed_experts_start_len

    @property
    def pixel_bytes(self) -> int:
        return sum(len(image.pixels) for image in self.images)

    def without_pixels(self) -> "GenerateRequest":
        """Return the request as it is kept where only the places of its images are read."""
        if not self.images:
            return self
        images = tuple(msgspec.structs.replace(image, pixels=b"") for image in self.images)
        return msgspec.structs.replace(self, images=images)


@call("abort")
class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a waiting or running request, or every request if `abort_all`; `rid` is then "".

    The engine may have finished the request already. `session` is set for a session's turn if
    the client will not receive its end: the session then drops that turn. `status_code` is the HTTP
    status if the request is invalid.
    """

    rid: str = ""
    abort_all: bool = False
    message: str = "aborted by the client"
    status_code: int | None = None
    session: SessionTurn | None = None


@call("stop")
class StopRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The frontend found a stop string: the output ends after `num_output_tokens`.

    The engine drops the tokens generated after that and sends no reply. If it has already ended the
    request, and that was a turn of `session`, the session drops them.
    """

    rid: str
    num_output_tokens: int
    session: SessionTurn | None = None


@call("cancel")
class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel the message with `call` as its `rid`: its sender no longer waits for the reply.

    The engine does not begin that call, or undoes it if it can (`Call.is_undone`). It sends a reply
    to the call, but none to this message.
    """

    call: str


# Older SGLang clients send a GET; from a browser it is refused (`server/guards/origins.py`).
@call("flush", calls.Flushed, "/flush_cache", ("GET", "POST"), is_admin=True)
class FlushCache(WithReply, frozen=True, kw_only=True, tag=True):
    """Empty the prefix caches; refused while requests run."""


@call("save_cache", calls.CacheSaved, "/save_cache", is_admin=True, timeout_s=120.0)
class SaveCache(WithReply, frozen=True, kw_only=True, tag=True):
    """Save the open sessions and the list of cached prefixes in the folder of `--restore-cache`."""


@call("read_state", dict[str, Any], is_read=True)
class GetState(WithReply, frozen=True, kw_only=True, tag=True):
    """Get the memory view of each rank and the counters, as a dictionary."""


@call("read", dict[str, Any], is_read=True)
class ReadMemory(WithReply, frozen=True, kw_only=True, tag=True):
    """Get the place of every page, and everything that holds pages or waits for them.

    The reply's data is a snapshot (`memory_view/reader.py`). If `has_tree`, it includes the prefix
    trees; if `has_tokens`, it includes token ids.
    """

    has_tree: bool = False
    has_tokens: bool = False


@call("describe_page", calls.PageDescription, "/memory/page", is_admin=True, is_read=True)
class DescribePage(WithReply, frozen=True, kw_only=True, tag=True):
    """Describe the owner of a page and its latest moves."""

    dp_rank: Annotated[int, Ge(0), Lt(INT32)]
    pool: Annotated[int, Ge(0), Lt(INT32)]
    page: Annotated[int, Ge(0), Lt(INT32)]


@call("find_prefix", calls.PrefixFound, is_read=True)
class FindPrefix(WithReply, frozen=True, kw_only=True, tag=True):
    """Find the longest prefix of these tokens in every rank's prefix tree."""

    input_ids: list[int]
    namespace: Namespace = ""


MemoryMessage = ReadMemory | DescribePage | FindPrefix


@call("open", str, "/open_session", is_undone=True)
class OpenSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Open a session and return its id; a 503 while too many are open.

    Refused if the id is in use. All turns have its `namespace` (see `GenerateRequest`).
    """

    session_id: NewSessionId
    streaming: Annotated[bool, doc("append-only, one request in flight, KV kept in place")] = False
    # SGLang's name.
    capacity_of_str_len: Annotated[
        int, Ge(0), Lt(INT32), doc("tokens that the history may hold; 0: no limit")
    ] = 0
    timeout_s: Annotated[
        Annotated[float, Gt(0), Le(1e9)] | None,
        Name("timeout"),
        doc("idle seconds until the session is closed"),
    ] = None
    namespace: Namespace = ""
    tenant: Tenant | None = None


@call("close", calls.Done, "/close_session")
class CloseSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Close a session and free its memory, after a turn in flight has finished."""

    session_id: SessionId


@call("roll_back", calls.RolledBack, "/rollback_session")
class RollbackSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Take a streaming session back to the end of its first `num_turns` turns."""

    session_id: SessionId
    num_turns: Annotated[int, Ge(0), Lt(INT32)]


@call("fork", calls.Forked, "/fork_session", is_undone=True)
class ForkSession(WithReply, frozen=True, kw_only=True, tag=True):
    """Open a streaming session with the history and cached KV of another. Returns a 503 while too
    many sessions are open, or they hold too many tokens."""

    session_id: SessionId
    new_session_id: NewSessionId
    tenant: Tenant | None = None


@call("list_all", calls.SessionList, "/list_sessions", ("GET", "POST"), is_read=True)
class ListSessions(WithReply, frozen=True, kw_only=True, tag=True):
    """List all open sessions of the caller."""


SessionMessage = OpenSession | CloseSession | RollbackSession | ForkSession | ListSessions


@call("pause", calls.GenerationState, "/pause_generation", is_admin=True, is_undone=True)
class PauseGeneration(WithReply, frozen=True, kw_only=True, tag=True):
    """Run no step until generation is continued. New requests are accepted and wait."""

    mode: Annotated[
        PauseMode,
        doc(
            "`in_place`: running requests keep their KV; `retract`: their KV is freed and computed "
            "again afterwards; `abort`: all running and waiting requests are aborted"
        ),
    ] = "abort"


@call("resume", calls.GenerationState, "/continue_generation", is_admin=True, is_undone=True)
class ContinueGeneration(WithReply, frozen=True, kw_only=True, tag=True):
    """Run steps again after a pause; does nothing if generation is not paused."""


@call("set_settings", calls.SettingsChanged, "/set_internal_state", is_admin=True, is_undone=True)
class SetInternalState(WithReply, frozen=True, kw_only=True, tag=True):
    """Change settings of the running server by flag name; other settings stay."""

    server_args: Annotated[
        dict[str, str | float],
        doc(
            "`schedule_policy`, `load_balance_method`, `waiting_timeout`, `request_timeout`, "
            "`priority_scheduling_preemption_threshold`, `chunked_prefill_size` up to its value at "
            "start-up"
        ),
    ]


@call("shut_down")
class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the engine and abort the requests in flight."""


# Messages with a `Reply`.
CallMessage = (
    FlushCache
    | SaveCache
    | GetState
    | MemoryMessage
    | SessionMessage
    | PauseGeneration
    | ContinueGeneration
    | WeightMessage
    | SetInternalState
    | ProfileMessage
)
FrontMessage = GenerateRequest | AbortRequest | StopRequest | CallMessage | CancelCall | Shutdown
