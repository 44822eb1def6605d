"""The table of messages to the engine: each with its handler, its reply and its HTTP route.

To add a call, write a message (`core/messages.py`), a row here, and the method that the row names.
The engine finds the method by the row (`Call.handler`), and the server makes the route
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
    """The call succeeded; there is no other data."""


class Flushed(msgspec.Struct, frozen=True):
    """The prefix caches are empty."""

    flushed: bool = True


class CacheSaved(msgspec.Struct, frozen=True):
    """The cache was saved: so many tokens of prefixes."""

    num_tokens: int


class GenerationState(msgspec.Struct, frozen=True):
    """The state of generation, and the counts of requests."""

    is_paused: bool
    num_running: int
    num_waiting: int


class WeightsUpdated(msgspec.Struct, frozen=True):
    """The new weights are in use. `num_paused_requests` were running, and continue with them."""

    success: bool
    message: str
    num_paused_requests: int


class SettingsChanged(msgspec.Struct, frozen=True):
    """The settings that the call changed, with their new values."""

    updated: bool
    server_args: dict[str, Any]


class Traced(msgspec.Struct, frozen=True):
    """The folder of the device trace, which is written when the trace ends."""

    output_dir: str


class ExpertRecord(msgspec.Struct, frozen=True):
    """Tokens whose router chose each expert, [layers][experts]; dense layers have zeros."""

    logical_count: list[list[int]]


class RolledBack(msgspec.Struct, frozen=True):
    """The session after the call."""

    num_turns: int
    num_tokens: int


class Forked(msgspec.Struct, frozen=True):
    """The new session, and the length of its history."""

    session_id: str
    num_tokens: int


class SessionEntry(msgspec.Struct, frozen=True):
    """A session.

    `cached_tokens` counts the tokens of its history and running turn whose KV rank `dp_rank` holds.
    It is 0, and `dp_rank` None, if the KV was evicted or the turn waits to be recomputed.
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
    """All open sessions that the caller may see."""

    sessions: list[SessionEntry]


class PageMove(msgspec.Struct, frozen=True):
    """`owner` did `action` to the page at tick `clock` of its pool."""

    clock: int
    action: str
    owner: str


class PageDescription(msgspec.Struct, frozen=True):
    """The owner of a page, and its moves as far as they are kept, oldest first.

    `tokens` is the interval of its holder's tokens that the page holds. `is_whole` is false if
    older moves may be forgotten.
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
    """The cached prefix on a rank, with the ids of its nodes from the root down."""

    dp_rank: int
    num_tokens: int
    nodes: list[int]


class PrefixFound(msgspec.Struct, frozen=True):
    """The part of `num_tokens` tokens that each rank has cached."""

    num_tokens: int
    ranks: list[FoundOnRank]


class Call(NamedTuple):
    """One kind of message to the engine."""

    message: type[msgspec.Struct]
    # Name of a method: of `Controls` for a `ControlMessage`, of `SessionService` for a
    # `SessionMessage`, of `MemoryReader` for a `MemoryMessage`, of `Scheduler` for the end of a
    # request, else of `EngineCore`.
    handler: str
    answer: Any = None  # type of the data of a `Reply`; None: there is no reply
    route: str | None = None  # path of the HTTP route; None: clients cannot make this call
    methods: tuple[str, ...] = ("POST",)
    is_admin: bool = False
    timeout_s: float | None = None  # for the reply; None: the default of the server
    is_read: bool = False  # changes nothing
    is_undone: bool = False  # if it was made but its caller no longer waits (`CancelCall`)


CALLS = (
    Call(GenerateRequest, "submit"),
    Call(AbortRequest, "abort"),
    Call(StopRequest, "stop"),
    Call(CancelCall, "cancel"),
    # Older clients of SGLang send a GET; from a browser it is refused (`guards/origins.py`).
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
        # Their names are SGLang's.
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
