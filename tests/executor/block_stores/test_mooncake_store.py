"""Values in Mooncake's store have a checksum, as in a folder; its client is a dictionary here."""

import sys
from types import SimpleNamespace

import pytest

from sgl_jax.executor.block_stores.mooncake_store import MooncakeStore

KEYS = [f"ab/{number:032x}" for number in range(3)]
VALUES = [b"a" * 100, b"b" * 100, b"c" * 100]


class Client:
    """Has the calls that the store uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def setup(self, *settings: object) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) for key in keys]

    def get_batch(self, keys: list[str]) -> list[bytes]:
        return [self.values.get(key, b"") for key in keys]

    def put_batch(self, keys: list[str], values: list[bytes]) -> int:
        self.values.update(zip(keys, values, strict=True))
        return 0

    def remove(self, key: str) -> int:
        del self.values[key]
        return 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MooncakeStore:
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace())
    module = SimpleNamespace(MooncakeDistributedStore=Client)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return MooncakeStore({})


def test_values_come_back(store: MooncakeStore) -> None:
    store.put(KEYS[:2], VALUES[:2])
    assert store.get(KEYS) == [*VALUES[:2], None]
    assert store.exists(KEYS) == [True, True, False]


@pytest.mark.parametrize("kind", ["cut", "changed", "of another key", "without a checksum"])
def test_a_value_that_is_not_whole_is_removed(store: MooncakeStore, kind: str) -> None:
    store.put(KEYS, VALUES)
    values = store._store.values
    data = values[KEYS[0]]
    values[KEYS[0]] = {
        "cut": data[:-1],
        "changed": data[:-1] + b"x",
        "of another key": values[KEYS[1]],
        "without a checksum": VALUES[0],
    }[kind]
    assert store.get(KEYS) == [None, *VALUES[1:]]
    assert store.exists(KEYS) == [False, True, True]
    store.put(KEYS[:1], VALUES[:1])
    assert store.get(KEYS) == VALUES
