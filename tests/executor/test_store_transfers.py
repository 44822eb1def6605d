"""Transfers to and from a store that fails, hangs or loses values."""

import threading
import time

import numpy as np
import pytest

from sgl_jax.core.transfers import StoreTransfer, TransferEnd
from sgl_jax.executor.store_transfers import StoreTransfers
from tests.waiting import until


class Contents:
    """Two blocks of one byte."""

    def __init__(self) -> None:
        self.blocks = {1: b"a", 2: b"b"}

    def value(self, dp_rank: int, block: int) -> bytes:
        return self.blocks[block]

    def set_value(self, dp_rank: int, block: int, value: bytes) -> bool:
        self.blocks[block] = value
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
        keys = np.array([[block] * 17 for block in blocks], np.uint8)
        return StoreTransfer(0, number, (keys,), (np.array(blocks, np.int32),), end_s=end_s)

    def wait(self) -> TransferEnd:
        self.transfers.wait()
        return self.ends[-1]


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
    rig.store.values["ab/" + "01" * 17] = b"c"
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
    rig.store.is_broken = False
    rig.transfers._rests_until_s = time.monotonic()
    rig.transfers.begin([rig.move(9, [1])], [], [])
    assert rig.wait().succeeded
