"""Transfers to and from a store that fails, hangs or loses values."""

import fcntl
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from sgl_jax.core.transfers import StoreTransfer, TransferEnd
from sgl_jax.executor.block_stores import folder_store
from sgl_jax.executor.block_stores.folder_store import FolderStore
from sgl_jax.executor.store_transfers import StoreTransfers
from tests.support.waiting import until


class Contents:
    """Two blocks of one byte."""

    num_values = 1

    def __init__(self) -> None:
        self.blocks = {1: b"a", 2: b"b"}

    def values(self, dp_rank: int, block: int) -> list[bytes]:
        return [self.blocks[block]]

    def set_values(self, dp_rank: int, block: int, values: list[bytes]) -> bool:
        (self.blocks[block],) = values
        return True


class Store:
    """A dictionary that takes `seconds` for each `get`, and fails if it `is_broken`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.seconds, self.is_broken = 0.0, False
        self.num_calls = 0

    def exists(self, keys: list[str]) -> list[bool]:
        self.num_calls += 1
        if self.is_broken:
            raise OSError("no space left")
        return [key in self.values for key in keys]

    def get(self, keys: list[str]) -> list[bytes | None]:
        time.sleep(self.seconds)
        return [self.values.get(key) for key in keys]

    def put(self, keys: list[str], values: list[bytes]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def close(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.store, self.contents = Store(), Contents()
        self.ends: list[TransferEnd] = []
        self.transfers = StoreTransfers(self.store, [self.contents], "ab", self.ends.append)  # type: ignore[arg-type]

    def move(self, number: int, blocks: list[int], end_s: float | None = None) -> StoreTransfer:
        keys = np.array([[block] * 18 for block in blocks], np.uint8)
        return StoreTransfer(0, number, (keys,), (np.array(blocks, np.int32),), end_s=end_s)

    def wait(self) -> TransferEnd:
        self.transfers.wait()
        return self.ends[-1]

    def probe(self) -> None:
        """Let the time of the next probe come, and wait for its end."""
        self.transfers.look(time.monotonic() + 60)
        until(lambda: self.transfers._probe is None, "the probe ends")


def test_values_come_back_and_losses_are_flagged() -> None:
    rig = Rig()
    rig.transfers.begin([], [], [rig.move(1, [1])])
    assert rig.wait().succeeded
    rig.contents.blocks[1] = b"?"
    for searches, loads in (([rig.move(2, [1, 2])], []), ([], [rig.move(3, [1, 2])])):
        rig.transfers.begin(searches, loads, [])
        rig.wait()
    assert [[flags.tolist() for flags in end.found] for end in rig.ends] == [
        [],
        [[True, False]],
        [[True, False]],
    ]
    assert rig.contents.blocks == {1: b"a", 2: b"b"}


def test_keys_are_of_the_weights_at_the_time_of_the_plan() -> None:
    rig = Rig()
    rig.store.seconds = 0.05
    rig.transfers.begin([], [rig.move(1, [1])], [rig.move(2, [1])])
    rig.transfers.fingerprint = "cd"
    rig.wait()
    (key,) = rig.store.values
    assert key.startswith("ab/")


def test_a_load_ends_in_time_with_what_it_has() -> None:
    rig = Rig()
    rig.contents.blocks = dict.fromkeys(range(64), b"x")
    rig.transfers.begin([], [], [rig.move(1, list(range(64)))])
    rig.wait()
    rig.store.seconds = 0.04
    load = rig.move(2, list(range(64)), end_s=time.monotonic() + 0.05)
    rig.transfers.begin([], [load], [])
    (found,) = rig.wait().found
    assert found[:16].all()
    assert not found[48:].any()


def test_no_request_waits_for_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, may_end = Rig(), threading.Event()
    rig.store.values["ab/" + "01" * 18] = b"c"
    monkeypatch.setattr(rig.store, "put", lambda *_: may_end.wait(10))
    search, load = (rig.move(number, [1])._replace(is_awaited=True) for number in (2, 3))
    rig.transfers.begin([], [], [rig.move(1, [2])])
    rig.transfers.begin([search], [load], [])
    until(lambda: {end.number for end in rig.ends} == {2, 3}, "the load ends")
    may_end.set()
    assert rig.wait().number == 1
    assert rig.contents.blocks[1] == b"c"


def test_no_search_waits_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, may_end = Rig(), threading.Event()
    monkeypatch.setattr(rig.store, "get", lambda keys: may_end.wait(10) and [None for _ in keys])
    load = rig.move(1, [1])._replace(is_awaited=True)
    rig.transfers.begin([], [load], [])
    rig.transfers.begin([rig.move(2, [1])], [], [])
    until(lambda: [end.number for end in rig.ends] == [2], "the search ends")
    may_end.set()
    assert rig.wait().number == 1


def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    rig = Rig()
    rig.store.is_broken = True
    for number in range(5):
        rig.transfers.begin([rig.move(number, [1])], [], [])
        assert not rig.wait().succeeded
    assert rig.store.num_calls == 1
    assert rig.transfers.look(time.monotonic()) == [False]
    rig.store.is_broken = False
    rig.probe()
    assert rig.transfers.look(time.monotonic()) == [True]
    rig.transfers.begin([rig.move(9, [1])], [], [])
    assert rig.wait().succeeded


CALLS = ("exists", "get", "put")


def test_a_wait_keeps_each_answer_once_for_the_next_look() -> None:
    rig = Rig()
    rig.store.values, rig.store.seconds = {f"ab/{'01' * 18}": b"c"}, 0.1
    rig.store.is_broken = True  # searches alone
    rig.transfers.begin([], [rig.move(1, [1])._replace(is_awaited=True)], [])
    rig.transfers.begin([rig.move(2, [1])], [], [])
    rig.wait()
    assert sorted((end.number, end.succeeded) for end in rig.ends) == [(1, True), (2, False)]
    assert rig.transfers.look(time.monotonic()) == [False]


def test_a_put_into_a_busy_store_has_failed_and_the_store_stays_in_use(tmp_path: Path) -> None:
    rig = Rig()
    rig.transfers = StoreTransfers(
        FolderStore(tmp_path, 10**6), [rig.contents], "ab", rig.ends.append
    )
    with patch.object(folder_store, "_LOCK_LIMIT_S", 0.0), open(tmp_path / "size") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rig.transfers.begin([], [], [rig.move(1, [1, 2])])
        assert not rig.wait().succeeded, "it is put again only if it is known to have failed"
    assert rig.transfers.look(time.monotonic()) == []
    rig.transfers.begin([], [], [rig.move(2, [1, 2])])
    assert rig.wait().succeeded
    rig.transfers.begin([rig.move(3, [1, 2])], [], [])
    assert rig.wait().found[0].tolist() == [True, True]


class HangingRig(Rig):
    """A rig whose store hangs in one of its calls until `may_go_on` is set."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.num_hanging = 0
        inner = getattr(self.store, call)

        def hang(*args: Any) -> Any:
            self.num_hanging += 1
            self.may_go_on.wait(60)
            return inner(*args)

        setattr(self.store, call, hang)
        self.store.values |= {f"ab/{'01' * 18}": b"c", f"ab/{'02' * 18}": b"d"}

    def begin(self, number: int, call: str, blocks: list[int]) -> None:
        move = self.move(number, blocks)._replace(is_awaited=call == "get")
        lists = {"exists": ([move], [], []), "get": ([], [move], []), "put": ([], [], [move])}
        self.transfers.begin(*lists[call])

    def until_hanging(self, count: int) -> None:
        until(lambda: self.num_hanging == count, "the store hangs")


@pytest.mark.parametrize("call", CALLS)
def test_an_overdue_call_suspends_the_store_until_it_answers_a_probe(call: str) -> None:
    rig = HangingRig(call)
    rig.store.values.pop(f"ab/{'02' * 18}")
    rig.begin(1, call, [2])
    rig.begin(2, call, [2])  # waits behind the first
    rig.until_hanging(1)
    now_s = time.monotonic()
    assert rig.transfers.look(now_s) == []
    assert rig.transfers.look(now_s + 11) == [False]
    assert [(end.number, end.succeeded) for end in rig.ends] == [(1, False), (2, False)]
    for number, each in enumerate(CALLS, start=3):  # they end at once
        rig.begin(number, each, [1])
        assert (rig.ends[-1].number, rig.ends[-1].succeeded) == (number, False)
    assert rig.transfers.look(now_s + 12) == []
    rig.transfers.look(now_s + 60)
    rig.until_hanging(2)
    rig.transfers.look(time.monotonic())
    assert rig.num_hanging == 2, "one probe at a time"
    rig.may_go_on.set()
    until(lambda: rig.transfers.look(time.monotonic()) == [True], "the probe ends")
    rig.begin(9, "exists", [1])
    assert rig.wait().succeeded


def test_a_load_that_was_given_up_writes_no_block() -> None:
    rig = HangingRig("get")
    rig.begin(1, "get", [1, 2])
    rig.until_hanging(1)
    (thread,) = [lane.thread for lane in rig.transfers._lanes if lane.thread.is_alive]
    rig.transfers.give_up()
    assert [end.succeeded for end in rig.ends] == [False]
    rig.may_go_on.set()
    until(lambda: not thread.is_alive, "the thread ends")
    assert rig.contents.blocks == {1: b"a", 2: b"b"}
    assert len(rig.ends) == 1


def test_a_put_that_was_given_up_reads_no_block() -> None:
    rig = HangingRig("exists")
    rig.store.values.clear()
    rig.begin(1, "put", [1, 2])
    rig.until_hanging(1)
    (thread,) = [lane.thread for lane in rig.transfers._lanes if lane.thread.is_alive]
    rig.transfers.give_up()
    rig.may_go_on.set()
    until(lambda: not thread.is_alive, "the thread ends")
    assert rig.store.values == {}


def test_threads_that_hang_are_few() -> None:
    rig = HangingRig("exists")
    before = threading.active_count()
    for call in CALLS:
        rig.begin(1, call, [1])
    rig.until_hanging(2)
    now_s = time.monotonic()
    for minute in range(1, 100):
        rig.transfers.look(now_s + 60 * minute)
        rig.transfers.look(now_s + 60 * minute + 20)
        rig.begin(minute, "exists", [1])
    assert threading.active_count() - before <= 11
    rig.may_go_on.set()


@pytest.mark.parametrize("call", [*CALLS, "close"])
def test_a_store_that_hangs_keeps_no_process_from_ending(call: str) -> None:
    program = textwrap.dedent(
        f"""
        from sgl_jax.executor import store_transfers
        from tests.executor.test_store_transfers import HangingRig
        store_transfers._CLOSE_LIMIT_S = 0.1
        rig = HangingRig({call!r})
        if {call!r} != "close":
            rig.begin(1, {call!r}, [1])
            rig.until_hanging(1)
        rig.transfers.close()
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
