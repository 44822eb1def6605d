"""Move blocks between host memory and a block store on separate threads.

Neither a step nor a device transfer waits for a disk or a network. One thread searches, one runs
the loads that requests wait for, and one runs puts and everything else. So a request waits neither
for a put, nor for other requests' loads before its search has ended.

If a call fails or takes too long, the store is suspended: its transfers fail immediately until a
probe succeeds. A thread that hangs in a call is abandoned and accesses no block when the call
returns.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress, islice
from operator import not_
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_jax.core.daemon_thread import DaemonThread
from sgl_jax.core.step_plan import BoolArray
from sgl_jax.core.transfers import HASH_BYTES, STORED_TOKENS, StoreTransfer, TransferEnd
from sgl_jax.executor.block_stores.block_store import BlockStore, StoreBusyError

logger = logging.getLogger(__name__)

# Interval between probes of a suspended store.
_REST_S = 30.0
# A call that takes longer is overdue.
_CALL_LIMIT_S = 10.0
# With this many threads hanging in the store, it is not probed any more.
_MAX_HANGING = 8
# Limit for the transfers to end at close, and then for the store to close.
_CLOSE_LIMIT_S = 10.0
_POLL_S = 0.002
# Blocks read or written per call.
_BATCH = 16


class BlockContents(Protocol):
    """The blocks of one pool, each of which is stored as `num_values` values."""

    @property
    def num_values(self) -> int: ...

    def values(self, dp_rank: int, block: int) -> list[bytes]: ...

    def set_values(self, dp_rank: int, block: int, values: Sequence[bytes]) -> bool:
        """Write a block; return False, without a change, if a value has the wrong size."""
        ...


class _GivenUpError(Exception):
    """The transfer has already ended."""


class _Lane:
    """A thread, and the start of its call to the store, if one is running."""

    def __init__(self, name: str, limit_s: float = _CALL_LIMIT_S) -> None:
        self.thread = DaemonThread(name)
        self._limit_s = limit_s
        self._since_s: float | None = None

    def call(self, ask: Callable[..., Any], *args: Any) -> Any:
        self._since_s = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._since_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Return True if a call takes longer than its limit."""
        since_s = self._since_s
        return since_s is not None and since_s + self._limit_s < now_s


class _Job:
    """A running transfer, with store keys for the weights served when it was planned. It ends once,
    on its thread or when it is given up; afterwards it accesses no block."""

    def __init__(
        self,
        move: StoreTransfer,
        pools: Sequence[BlockContents],
        fingerprint: str,
        lane: _Lane,
        on_end: Callable[[TransferEnd], object],
    ) -> None:
        self.dp_rank, self.end_s, self.lane = move.dp_rank, move.end_s, lane
        # By pool: the keys of each block's values.
        self.keys = [
            [_value_keys(fingerprint, bytes(key), pool.num_values) for key in own]
            for own, pool in zip(move.keys, pools, strict=True)
        ]
        self.blocks = [listed.tolist() for listed in move.blocks]
        self._number = move.number
        self._on_end = on_end
        self._lock = threading.Lock()
        self.has_ended = False
        self.has_other_sizes = False

    def batches(self) -> Iterator[tuple[int, list[list[str]], list[int], slice]]:
        """Yield the pool, keys and blocks of each part, and its slice of the pool's list."""
        for pool, (keys, blocks) in enumerate(zip(self.keys, self.blocks, strict=True)):
            for first in range(0, len(blocks), _BATCH):
                part = slice(first, first + _BATCH)
                yield pool, keys[part], blocks[part], part

    @contextmanager
    def using_blocks(self) -> Iterator[None]:
        """Hold the lock on the transfer's blocks. Raises _GivenUpError if it has ended."""
        with self._lock:
            if self.has_ended:
                raise _GivenUpError
            yield

    def end(
        self, *, succeeded: bool, seconds: float = 0.0, found: Sequence[BoolArray] = ()
    ) -> None:
        with self._lock:
            if not self.has_ended:
                end = TransferEnd(self.dp_rank, self._number, succeeded, seconds, tuple(found))
                self._on_end(end._replace(has_other_sizes=self.has_other_sizes))
                self.has_ended = True


class _Lanes(NamedTuple):
    searches: _Lane
    awaited: _Lane
    others: _Lane


class StoreTransfers:
    """The searches, loads and puts of an engine.

    Args:
        store: the block store.
        pools: the blocks in host memory.
        fingerprint: hexadecimal, of the model, its weights and the layout. If replaced, later
            transfers use the new value.
        on_end: called with each end, on any thread.
        awaited_limit_s: seconds before a call that a request waits for is overdue; None: general
            limit.
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
        self._lock = threading.Lock()  # guards the fields below
        self._probe: _Lane | None = None  # running probe
        self._probe_at_s: float | None = None  # time of the next; None unless suspended
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
        """Begin transfers: each thread runs its transfers in this order."""
        self._jobs = [job for job in self._jobs if not job.has_ended]
        lanes = self._lanes
        for move in searches:
            self._start(move, self._search, lanes.searches)
        for move in loads:
            self._start(move, self._load, lanes.awaited if move.is_awaited else lanes.others)
        for move in puts:
            self._start(move, self._put, lanes.others)

    def look(self, now_s: float) -> list[bool]:
        """Suspend the store if a call is overdue, and probe it if a probe is due. Call often.

        Returns the results since the last call, in order: False for each failed or overdue call,
        True if a probe succeeded and the store is in use again.
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
            self._answers = answers + self._answers  # for the next `look`

    def close(self) -> None:
        """Wait a limited time for the transfers. Cannot be used again."""
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
                logger.error("%s: it is not used until a probe succeeds", why)
                self._probe_at_s = time.monotonic() + _REST_S

    def _run_probe(self, lane: _Lane) -> None:
        key, value = f"{self.fingerprint}/{secrets.token_hex(16)}", secrets.token_bytes(16)
        answers = False
        try:
            lane.call(self._store.put, [key], [value])
            lane.call(self._store.exists, [key])
            lane.call(self._store.get, [key])
            answers = True
        except Exception:  # any error fails the probe
            logger.warning("the store still fails", exc_info=True)
        with self._lock:
            if self._probe is lane:  # else the probe was overdue
                self._probe = None
                self._answers.append(answers)
                if answers:
                    logger.info("the store is in use again")
                    self._probe_at_s = None

    # -- transfers, on their threads ---------------------------------------------------------

    def _start(
        self, move: StoreTransfer, transfer: Callable[[_Job], list[BoolArray]], lane: _Lane
    ) -> None:
        job = _Job(move, self._pools, self.fingerprint, lane, self._on_end)
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
        except StoreBusyError as error:  # blocks are put again when they are next used
            logger.warning("a transfer of the store failed: %s", error)
        except Exception:  # such as a full disk, or a lost master
            if job.has_ended:
                return
            logger.exception("a transfer of the store failed")
            self._suspend("the store failed")
        job.end(succeeded=succeeded, seconds=time.monotonic() - begin_s, found=found)

    def _search(self, job: _Job) -> list[BoolArray]:
        found = [
            np.array([all(has) for has in _of_blocks(job, self._store.exists, keys)], np.bool_)
            for keys in job.keys
        ]
        if job.keys[0] and not found[0].any():
            others = [other for own in job.keys[0][:_BATCH] for other in _other_sizes(own[-1])]
            job.has_other_sizes = any(job.lane.call(self._store.exists, others))
        return found

    def _load(self, job: _Job) -> list[BoolArray]:
        found = [np.zeros(len(blocks), np.bool_) for blocks in job.blocks]
        for pool, keys, blocks, part in job.batches():
            if job.end_s is not None and time.monotonic() > job.end_s:
                break
            of_blocks = _of_blocks(job, self._store.get, keys)
            with job.using_blocks():
                found[pool][part] = [
                    None not in own and self._pools[pool].set_values(job.dp_rank, block, own)
                    for block, own in zip(blocks, of_blocks, strict=True)
                ]
        return found

    def _put(self, job: _Job) -> list[BoolArray]:
        for pool, keys, blocks, _ in job.batches():
            has = _of_blocks(job, self._store.exists, keys)
            lacking = [
                (block, own, are_there)
                for block, own, are_there in zip(blocks, keys, has, strict=True)
                if not all(are_there)
            ]
            new: dict[str, bytes] = {}
            with job.using_blocks():
                for block, own, are_there in lacking:
                    values = self._pools[pool].values(job.dp_rank, block)
                    new.update(compress(zip(own, values, strict=True), map(not_, are_there)))
            job.lane.call(self._store.put, list(new), list(new.values()))
        return []


def _of_blocks(
    job: _Job, call: Callable[[list[str]], Sequence[Any]], keys: Sequence[list[str]]
) -> list[list[Any]]:
    """Return the results of a store's `call` for each block's keys."""
    results = iter(job.lane.call(call, list(chain.from_iterable(keys))))
    return [list(islice(results, len(own))) for own in keys]


def _value_keys(fingerprint: str, key: bytes, num_values: int) -> list[str]:
    """Return the keys of the last `num_values` values of a page: all of them, or the only one of
    a state."""
    hashes, rest = key[-2 - num_values * HASH_BYTES : -2], key[-2:].hex()
    starts = range(0, len(hashes), HASH_BYTES)
    return [f"{fingerprint}/{hashes[i : i + HASH_BYTES].hex()}{rest}" for i in starts]


def _other_sizes(key: str) -> list[str]:
    """Return the keys of values of all other sizes that end at the same token."""
    sizes = range(STORED_TOKENS.bit_length())
    return [other for i in sizes if (other := f"{key[:-2]}{i:02x}") != key]
