"""Moves blocks between the host's memory and a store, on threads of its own.

So neither a step nor a transfer to or from the devices waits for a disk or a network. One thread
searches, one runs the loads that requests await, and one puts and all else: no request waits for a
put, nor for others' loads before it is known whether its own would be worth it.

If a call fails or takes too long, the store is suspended: its transfers end as failed, at once,
until a probe succeeds. A thread that hangs in a call is left behind, and touches no block when the
call returns.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_jax.core.daemon_thread import DaemonThread
from sgl_jax.core.step_plan import BoolArray
from sgl_jax.core.transfers import StoreTransfer, TransferEnd
from sgl_jax.executor.block_stores.block_store import BlockStore, StoreBusyError

logger = logging.getLogger(__name__)

# A suspended store is probed so often.
_REST_S = 30.0
# A call that takes longer is overdue.
_CALL_LIMIT_S = 10.0
# Threads that hang in the store: with so many, it is not probed any more.
_MAX_HANGING = 8
# The end waits so long for transfers, and so long for the store to close.
_CLOSE_LIMIT_S = 10.0
_POLL_S = 0.002
# Values of so many blocks are read or written at once.
_BATCH = 16


class BlockContents(Protocol):
    """The blocks of one pool."""

    def value(self, dp_rank: int, block: int) -> bytes: ...

    def set_value(self, dp_rank: int, block: int, value: bytes) -> bool:
        """False if the value has not the size of a block; then nothing changes."""
        ...


class _GivenUpError(Exception):
    """The transfer has ended before."""


class _Lane:
    """A thread, and since when it waits for the store, if it does."""

    def __init__(self, name: str, limit_s: float = _CALL_LIMIT_S) -> None:
        self.thread = DaemonThread(name)
        self._limit_s = limit_s
        self._since_s: float | None = None

    def call(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Call the store, on this thread."""
        self._since_s = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._since_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Return whether a call takes longer than it may."""
        since_s = self._since_s
        return since_s is not None and since_s + self._limit_s < now_s


class _Job:
    """A transfer that has begun, with the store's keys: of the weights that were served as it was
    planned. It ends once, on its thread or when it is given up; afterwards it touches no block."""

    def __init__(
        self,
        move: StoreTransfer,
        fingerprint: str,
        lane: _Lane,
        on_end: Callable[[TransferEnd], object],
    ) -> None:
        self.dp_rank, self.end_s, self.lane = move.dp_rank, move.end_s, lane
        # By pool.
        self.keys = [[f"{fingerprint}/{bytes(key).hex()}" for key in own] for own in move.keys]
        self.blocks = [listed.tolist() for listed in move.blocks]
        self._number = move.number
        self._on_end = on_end
        self._lock = threading.Lock()
        self.has_ended = False

    def batches(self) -> Iterator[tuple[int, list[str], list[int], slice]]:
        """The pool, keys and blocks of each part, and its place in the pool's list."""
        for pool, (keys, blocks) in enumerate(zip(self.keys, self.blocks, strict=True)):
            for first in range(0, len(blocks), _BATCH):
                part = slice(first, first + _BATCH)
                yield pool, keys[part], blocks[part], part

    @contextmanager
    def using_blocks(self) -> Iterator[None]:
        """Within, the blocks are the transfer's. Raises _GivenUpError if it has ended."""
        with self._lock:
            if self.has_ended:
                raise _GivenUpError
            yield

    def end(
        self, *, succeeded: bool, seconds: float = 0.0, found: Sequence[BoolArray] = ()
    ) -> None:
        """State the end, unless it was stated before."""
        with self._lock:
            if not self.has_ended:
                end = TransferEnd(self.dp_rank, self._number, succeeded, seconds, tuple(found))
                self._on_end(end)
                self.has_ended = True


class _Lanes(NamedTuple):
    searches: _Lane
    awaited: _Lane
    others: _Lane


class StoreTransfers:
    """The searches, loads and puts of an engine.

    Args:
        store: that has the blocks.
        pools: the blocks in the host's memory.
        fingerprint: of the model, its weights and the layout: hexadecimal. May be replaced; later
            transfers have the new one.
        on_end: called with each end, on any thread.
        awaited_limit_s: a call that a request awaits is overdue after so long; None: as others.
    """

    def __init__(
        self,
        store: BlockStore,
        pools: Sequence[BlockContents],
        fingerprint: str,
        on_end: Callable[[TransferEnd], object],
        awaited_limit_s: float | None = None,
    ) -> None:
        self._store = store
        self._pools = pools
        self.fingerprint = fingerprint
        self._on_end = on_end
        self._awaited_limit_s = min(awaited_limit_s or _CALL_LIMIT_S, _CALL_LIMIT_S)
        self._lanes = self._new_lanes()
        self._left_behind: list[DaemonThread] = []
        self._jobs: list[_Job] = []
        self._lock = threading.Lock()  # of the following
        self._probe: _Lane | None = None  # under way
        self._probe_at_s: float | None = None  # the next; None unless the store is suspended
        self._answers: list[bool] = []

    def _new_lanes(self) -> _Lanes:
        return _Lanes(
            _Lane("block store, searches", self._awaited_limit_s),
            _Lane("block store, awaited", self._awaited_limit_s),
            _Lane("block store"),
        )

    def begin(
        self,
        searches: Sequence[StoreTransfer],
        loads: Sequence[StoreTransfer],
        puts: Sequence[StoreTransfer],
    ) -> None:
        """Begin transfers: each thread runs its own in this order."""
        self._jobs = [job for job in self._jobs if not job.has_ended]
        lanes = self._lanes
        for move in searches:
            self._start(move, self._search, lanes.searches)
        for move in loads:
            self._start(move, self._load, lanes.awaited if move.is_awaited else lanes.others)
        for move in puts:
            self._start(move, self._put, lanes.others)

    def look(self, now_s: float) -> list[bool]:
        """Suspend the store if a call is overdue, and probe it if that is due: to be called often.

        Returns, in order since the last look, False for each failed or overdue call, and True if a
        probe succeeded and the store is in use again.
        """
        if any(lane.is_overdue(now_s) for lane in self._lanes):
            self._suspend("a call of the store is overdue")
            self.give_up()
        with self._lock:
            if self._probe is not None and self._probe.is_overdue(now_s):
                self._left_behind.append(self._probe.thread)
                self._probe = None
                self._answers.append(False)
            self._left_behind = [each for each in self._left_behind if each.is_alive]
            is_due = self._probe_at_s is not None and self._probe_at_s <= now_s
            if is_due and self._probe is None and len(self._left_behind) < _MAX_HANGING:
                self._probe_at_s = now_s + _REST_S
                self._probe = _Lane("block store, probe")
                self._probe.thread.submit(self._run_probe, self._probe)
                self._probe.thread.close()
            answers, self._answers = self._answers, []
        return answers

    def give_up(self) -> None:
        """End all transfers now, as failed."""
        for job in self._jobs:
            job.end(succeeded=False)
        self._jobs.clear()
        for lane in self._lanes:
            lane.thread.close()
            self._left_behind.append(lane.thread)
        self._lanes = self._new_lanes()

    def wait(self) -> None:
        """Wait until all transfers have ended, or a call is overdue."""
        answers: list[bool] = []
        while not all(job.has_ended for job in self._jobs):
            answers += self.look(time.monotonic())
            time.sleep(_POLL_S)
        with self._lock:
            self._answers = answers + self._answers  # for the next look

    def close(self) -> None:
        """Wait for the transfers, for a while. Cannot be used again."""
        end_s = time.monotonic() + _CLOSE_LIMIT_S
        while time.monotonic() < end_s and not all(job.has_ended for job in self._jobs):
            self.look(time.monotonic())
            time.sleep(_POLL_S)
        self.give_up()
        closing = DaemonThread("block store, end")
        closed = closing.submit(self._store.close)
        try:
            closed.result(_CLOSE_LIMIT_S)
        except TimeoutError:
            logger.error("the store did not close within %.0f s", _CLOSE_LIMIT_S)

    # -- suspension -------------------------------------------------------------------------

    def _suspend(self, why: str) -> None:
        with self._lock:
            self._answers.append(False)
            if self._probe_at_s is None:
                logger.error("%s: it is left alone until a probe succeeds", why)
                self._probe_at_s = time.monotonic() + _REST_S

    def _run_probe(self, lane: _Lane) -> None:
        """Call the store as transfers do."""
        key, value = f"{self.fingerprint}/{secrets.token_hex(16)}", secrets.token_bytes(16)
        answers = False
        try:
            lane.call(self._store.put, [key], [value])
            lane.call(self._store.exists, [key])
            lane.call(self._store.get, [key])
            answers = True
        except Exception:  # of any type, as in a transfer
            logger.warning("the store still fails", exc_info=True)
        with self._lock:
            if self._probe is lane:  # else it was overdue
                self._probe = None
                self._answers.append(answers)
                if answers:
                    logger.info("the store is in use again")
                    self._probe_at_s = None

    # -- transfers, on their threads ---------------------------------------------------------

    def _start(
        self, move: StoreTransfer, transfer: Callable[[_Job], list[BoolArray]], lane: _Lane
    ) -> None:
        job = _Job(move, self.fingerprint, lane, self._on_end)
        if self._probe_at_s is not None:
            job.end(succeeded=False)
            return
        self._jobs.append(job)
        lane.thread.submit(self._run, job, transfer)

    def _run(self, job: _Job, transfer: Callable[[_Job], list[BoolArray]]) -> None:
        begin_s, succeeded = time.monotonic(), False
        found: list[BoolArray] = []
        try:
            if not job.has_ended and self._probe_at_s is None:
                found, succeeded = transfer(job), True
        except _GivenUpError:
            return
        except StoreBusyError as error:  # its blocks are put again when they are used
            logger.warning("a transfer of the store failed: %s", error)
        except Exception:  # of any type: a disk is full, a master has gone
            if job.has_ended:
                return
            logger.exception("a transfer of the store failed")
            self._suspend("the store failed")
        job.end(succeeded=succeeded, seconds=time.monotonic() - begin_s, found=found)

    def _search(self, job: _Job) -> list[BoolArray]:
        return [np.array(job.lane.call(self._store.exists, keys), np.bool_) for keys in job.keys]

    def _load(self, job: _Job) -> list[BoolArray]:
        found = [np.zeros(len(blocks), np.bool_) for blocks in job.blocks]
        for pool, keys, blocks, part in job.batches():
            if job.end_s is not None and time.monotonic() > job.end_s:
                break
            values = job.lane.call(self._store.get, keys)
            own = self._pools[pool]
            with job.using_blocks():
                found[pool][part] = [
                    value is not None and own.set_value(job.dp_rank, block, value)
                    for block, value in zip(blocks, values, strict=True)
                ]
        return found

    def _put(self, job: _Job) -> list[BoolArray]:
        for pool, keys, blocks, _ in job.batches():
            has = job.lane.call(self._store.exists, keys)
            new = [i for i, is_there in enumerate(has) if not is_there]
            with job.using_blocks():
                values = [self._pools[pool].value(job.dp_rank, blocks[i]) for i in new]
            job.lane.call(self._store.put, [keys[i] for i in new], values)
        return []
