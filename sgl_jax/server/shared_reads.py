"""Shared reads of the engine's state, so that many clients cause few calls to the engine.

A read returns the reply to a call that begins after the read has arrived, so it is never older than
its request. Reads waiting for the same call share its reply and the bytes encoded from it. Calls of
a kind begin at most ten times a second, and up to a second apart if they are expensive or have many
readers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request, Response

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import CallMessage
from sgl_jax.server.engine_calls import call_engine, refused
from sgl_jax.server.errors import ApiError
from sgl_jax.server.references import References

_MIN_INTERVAL_S = 0.1
# Interval between the starts of two calls, as a multiple of a call's processor time in engine and
# server: 1/100 of a core.
_REST = 100
# Added to that time for each reader, in seconds, so that the next call begins 20 ms later. Request
# and answer of a reader take about 1 ms, thus all readers of a kind 1/20 of the server's core.
_READER_COST_S = 0.0002
# Upper bound on that interval, so that encoding for many keys cannot make a scrape time out.
_MAX_INTERVAL_S = 1.0

T = TypeVar("T")


class Snapshot:
    """One reply of the engine, and the bytes encoded from it."""

    def __init__(self, reply: Reply) -> None:
        self.data = reply.data
        self.cost_s = reply.cost_s
        self._written: dict[Hashable, bytes] = {}

    def write(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return the bytes under `key`, made by the first reader."""
        self.cost_s += _READER_COST_S
        if key not in self._written:
            started = time.thread_time()
            self._written[key] = make()
            self.cost_s += time.thread_time() - started
        return self._written[key]

    def json(self, key: Hashable, make: Callable[[dict[str, Any]], Any]) -> Response:
        body = self.write(key, lambda: msgspec.json.encode(make(self.data)))
        return Response(body, media_type="application/json")


class SharedRun(Generic[T]):
    """Runs `make` for all waiting callers; each gets the result of a run begun after its `get`.

    `interval_s` maps a run's result (None: an error) to the seconds from its start to the next
    run's.
    """

    def __init__(
        self, make: Callable[[], Awaitable[T]], interval_s: Callable[[T | None], float]
    ) -> None:
        self._make = make
        self._interval_s = interval_s
        self._running = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None
        self._last: tuple[float, T | None] = (-1e9, None)

    async def get(self) -> T:
        """Wait for the next run. Its error is raised in all waiting callers."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            # If it fails after all callers have left, mark its error as retrieved.
            self._next.add_done_callback(lambda run: run.cancelled() or run.exception())
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        async with self._running:
            begun_at, last = self._last
            await asyncio.sleep(begun_at + self._interval_s(last) - time.monotonic())
            self._next = None
            begun_at = time.monotonic()
            self._last = begun_at, None
            result = await self._make()
            self._last = begun_at, result
            return result


class EngineReads:
    """The reads of one server. Reads with parameters are not shared, but run one at a time."""

    def __init__(self, refs: References) -> None:
        self._refs = refs
        self._shared: dict[CallMessage, SharedRun[Snapshot]] = {}
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    async def read(self, message: CallMessage, timeout_s: float | None = None) -> Snapshot:
        """Return the engine's reply.

        Raises:
            ApiError: the engine refused, or 503: no reply within `timeout_s` (None: the server's
                limit for calls).
            EngineDeadError, EngineStuckError, ShuttingDownError: no reply is possible.
        """
        self._refs.health.check()
        timeout_s = self._refs.answer_timeout_s if timeout_s is None else timeout_s
        has_parameters = len(msgspec.structs.fields(message)) > 1
        try:
            async with asyncio.timeout(timeout_s):
                if has_parameters:
                    return await self._read_in_turn(message)
                return await self._shared_run(message).get()
        except TimeoutError as error:
            raise ApiError(503, f"the engine gave no answer within {timeout_s:g} s") from error

    def _shared_run(self, message: CallMessage) -> SharedRun[Snapshot]:
        if message not in self._shared:
            self._shared[message] = SharedRun(partial(self._call, message), _interval_s)
        return self._shared[message]

    async def _read_in_turn(self, message: CallMessage) -> Snapshot:
        async with self._turn:
            await asyncio.sleep(self._free_at - time.monotonic())
            begun_at = time.monotonic()
            snapshot = None
            try:
                snapshot = await self._call(message)
            finally:
                self._free_at = begun_at + _interval_s(snapshot)
            return snapshot

    async def _call(self, message: CallMessage) -> Snapshot:
        reply = await call_engine(self._refs, message)
        self._refs.frontend.check_alive()
        if not reply.ok:
            raise refused(reply, reply.message)
        return Snapshot(reply)


def _interval_s(last: Snapshot | None) -> float:
    cost_s = 0.0 if last is None else last.cost_s
    return max(_MIN_INTERVAL_S, min(_REST * cost_s, _MAX_INTERVAL_S))


def reads_of(request: Request) -> EngineReads:
    reads = request.app.state.engine_reads
    assert isinstance(reads, EngineReads)
    return reads
