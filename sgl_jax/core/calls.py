"""The table of messages to the engine, each with its handler, reply and HTTP route.

To add a call, define a message (`core/messages.py`), add a row here, and write the method that the
row names. The engine finds the method by the row (`Call.handler`), and the server creates the route
(`server/admin/call_routes.py`).

The body of a `route` holds the message's fields except `rid`, typed by their annotations; fields
with a default are optional. The route's description is the first paragraph of the message's
docstring.
"""

from typing import Any, NamedTuple

import msgspec

from sgl_jax.core.messages import (
    AbortRequest,
    CancelCall,
    CloseSession,
    ContinueGeneration,
    DescribePage,
    DumpExpertRecord,
    FindPrefix,
    FlushCache,
    ForkSession,
    GenerateRequest,
    GetState,
    ListSessions,
    OpenSession,
    PauseGeneration,
    ReadMemory,
    RollbackSession,
    SaveCache,
    SetInternalState,
    Shutdown,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
    StopRequest,
    UpdateWeightsFromDisk,
)


class Done(msgspec.Struct, frozen=True):
    """Success without further data."""


class Flushed(msgspec.Struct, frozen=True):
    """The prefix caches are empty."""

    flushed: bool = True


class CacheSaved(msgspec.Struct, frozen=True):
    """The cache was saved; `num_tokens` counts the tokens of the saved prefixes."""

    num_tokens: int


class GenerationState(msgspec.Struct, frozen=True):
    """The state of generation and the number of running and waiting requests."""

    is_paused: bool
    num_running: int
    num_waiting: int


class WeightsUpdated(msgspec.Struct, frozen=True):
    """The new weights are in use, also for the `num_paused_requests` that were running."""

    success: bool
    message: str
    num_paused_requests: int


class SettingsChanged(msgspec.Struct, frozen=True):
    """The changed settings with their new values."""

    updated: bool
    server_args: dict[str, Any]


class Traced(msgspec.Struct, frozen=True):
    """The folder of the device trace, written when the trace ends."""

    output_dir: str


class ExpertRecord(msgspec.Struct, frozen=True):
    """Number of tokens routed to each expert, [layers][experts]; 0 in dense layers."""

    logical_count: list[list[int]]


class RolledBack(msgspec.Struct, frozen=True):
    """The length of the session after the call."""

    num_turns: int
    num_tokens: int


class Forked(msgspec.Struct, frozen=True):
    """The new session and the length of its history."""

    session_id: str
    num_tokens: int


class SessionEntry(msgspec.Struct, frozen=True):
    """The state of an open session.

    `cached_tokens` counts the tokens of its history and running turn with KV on rank `dp_rank`. If
    the KV was evicted or the turn waits to be recomputed, it is 0 and `dp_rank` is None.
    """

    session_id: str
    streaming: bool
    num_turns: int
    num_tokens: int
    num_running: int
    is_closing: bool
    idle_s: float
    timeout_s: float | None
    dp_rank: int | None
    cached_tokens: int


class SessionList(msgspec.Struct, frozen=True):
    """All open sessions visible to the caller."""

    sessions: list[SessionEntry]


class PageMove(msgspec.Struct, frozen=True):
    """`owner` did `action` to the page at tick `clock` of its pool."""

    clock: int
    action: str
    owner: str


class PageDescription(msgspec.Struct, frozen=True):
    """The owner of a page and its recorded moves, oldest first.

    `tokens` is the interval of the holder's tokens stored in the page. If `is_whole` is false,
    older moves may be missing.
    """

    owner: str
    tokens: tuple[int, int] | None
    rid: str | None
    session_id: str | None
    node: int | None
    num_locks: int | None
    last_access: int | None
    clock: int
    moves: list[PageMove]
    is_whole: bool


class FoundOnRank(msgspec.Struct, frozen=True):
    """The prefix cached on a rank, with the ids of its tree nodes from the root down."""

    dp_rank: int
    num_tokens: int
    nodes: list[int]


class PrefixFound(msgspec.Struct, frozen=True):
    """The cached part of `num_tokens` tokens on each rank."""

    num_tokens: int
    ranks: list[FoundOnRank]


class Call(NamedTuple):
    """One kind of message to the engine."""

    message: type[msgspec.Struct]
    # Method name. The class is `Controls` for a `ControlMessage`, `SessionService` for a
    # `SessionMessage`, `MemoryReader` for a `MemoryMessage`, `Scheduler` for the end of a request,
    # else `EngineCore`.
    handler: str
    answer: Any = None  # type of `Reply.data`; None: no reply
    route: str | None = None  # path of the HTTP route; None: not exposed over HTTP
    methods: tuple[str, ...] = ("POST",)
    is_admin: bool = False
    timeout_s: float | None = None  # limit for the reply; None: the server's default
    is_read: bool = False  # read-only
    is_undone: bool = False  # undo the call if the caller stops waiting for it (`CancelCall`)


CALLS = (
    Call(GenerateRequest, "submit"),
    Call(AbortRequest, "abort"),
    Call(StopRequest, "stop"),
    Call(CancelCall, "cancel"),
    # Older SGLang clients send a GET; from a browser it is refused (`server/guards/origins.py`).
    Call(FlushCache, "flush", Flushed, "/flush_cache", ("GET", "POST"), is_admin=True),
    Call(SaveCache, "save_cache", CacheSaved, "/save_cache", is_admin=True, timeout_s=120.0),
    Call(GetState, "read_state", dict[str, Any], is_read=True),
    Call(ReadMemory, "read", dict[str, Any], is_read=True),
    Call(
        DescribePage,
        "describe_page",
        PageDescription,
        "/memory/page",
        is_admin=True,
        is_read=True,
    ),
    Call(FindPrefix, "find_prefix", PrefixFound, is_read=True),
    Call(OpenSession, "open", str, "/open_session", is_undone=True),
    Call(CloseSession, "close", Done, "/close_session"),
    Call(RollbackSession, "roll_back", RolledBack, "/rollback_session"),
    Call(ForkSession, "fork", Forked, "/fork_session", is_undone=True),
    Call(ListSessions, "list_all", SessionList, "/list_sessions", ("GET", "POST"), is_read=True),
    *(
        Call(message, handler, GenerationState, route, is_admin=True, is_undone=True)
        for message, handler, route in (
            (PauseGeneration, "pause", "/pause_generation"),
            (ContinueGeneration, "resume", "/continue_generation"),
        )
    ),
    Call(
        UpdateWeightsFromDisk,
        "update_weights",
        WeightsUpdated,
        "/update_weights_from_disk",
        is_admin=True,
        timeout_s=3600.0,
    ),
    Call(
        SetInternalState,
        "set_settings",
        SettingsChanged,
        "/set_internal_state",
        is_admin=True,
        is_undone=True,
    ),
    Call(StartProfile, "start_profile", Traced, "/start_profile", is_admin=True, timeout_s=120.0),
    Call(StopProfile, "stop_profile", Traced, "/stop_profile", is_admin=True, timeout_s=120.0),
    *(
        # SGLang's names.
        Call(message, handler, data, f"/{verb}_expert_distribution_record", is_admin=True)
        for message, handler, data, verb in (
            (StartExpertRecord, "start_expert_record", Done, "start"),
            (StopExpertRecord, "stop_expert_record", Done, "stop"),
            (DumpExpertRecord, "dump_expert_record", ExpertRecord, "dump"),
        )
    ),
    Call(Shutdown, "shut_down"),
)
CALL_OF = {call.message: call for call in CALLS}
