"""Replies to calls of the engine, and the record of a call: handler, reply, HTTP route, limits.

To add a call, define a message with its record in `core/messages.py`, and write the method that the
record names. The engine finds the method by the record (`Call.handler`), and the server creates the
route (`server/admin/call_routes.py`).

The body of a `route` holds the message's fields except `rid`, typed by their annotations; fields
with a default are optional. The route's description is the first paragraph of the message's
docstring.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec


class WithReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message that the engine answers with a `Reply` of the same `rid`, set by the frontend."""

    rid: str = ""


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


class WeightsUpdated(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new weights are in use, also for the `num_paused_requests` that were running, or
    `num_missing` tensors must still arrive."""

    success: bool
    message: str
    num_paused_requests: int
    num_missing: int = 0


class VersionUpdated(msgspec.Struct, frozen=True):
    """The label of the served weights."""

    success: bool
    message: str
    new_version: str


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
    # Method name. The class is `SessionService` for a `SessionMessage`, `MemoryReader` for a
    # `MemoryMessage`, `Scheduler` for the end of a request, `EngineCore` for a request and the
    # shutdown, else `Controls`.
    handler: str
    answer: Any = None  # type of `Reply.data`; None: no reply
    route: str | None = None  # path of the HTTP route; None: not exposed over HTTP
    methods: tuple[str, ...] = ("POST",)
    is_admin: bool = False
    timeout_s: float | None = None  # limit for the reply; None: the server's default
    is_read: bool = False  # read-only
    is_undone: bool = False  # undo the call if the caller stops waiting for it (`CancelCall`)


# Every message's record, in the order of their definitions.
CALL_OF: dict[type[msgspec.Struct], Call] = {}
_Message = TypeVar("_Message", bound=type[msgspec.Struct])


def call(handler: str, *record: Any, **more: Any) -> Callable[[_Message], _Message]:
    """Record a message's `Call`."""

    def note(message: _Message) -> _Message:
        CALL_OF[message] = Call(message, handler, *record, **more)
        return message

    return note
