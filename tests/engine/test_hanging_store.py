"""A store that hangs delays no one: neither requests, nor flushes, new weights, or the end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.weight_messages import UpdateWeightsFromDisk
from sgl_jax.engine.loop import controls, saved_cache
from sgl_jax.engine.offline import Engine
from sgl_jax.executor import model_executor, store_transfers
from tests.engine.test_host_memory import GOLDEN, SAMPLING, SETTINGS
from tests.support.waiting import until

MODEL = str(GOLDEN / "qwen3")
PROMPTS = [[number * 7 + i % 11 for i in range(40)] for number in range(1, 8)]


class HangingStore:
    """An empty store that hangs in one of its calls until `may_go_on` is set."""

    def __init__(self) -> None:
        self.hangs_in = ""
        self.may_go_on = threading.Event()
        self.num_calls = 0

    def _enter(self, call: str) -> None:
        self.num_calls += 1
        if call == self.hangs_in:
            self.may_go_on.wait(120)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._enter("exists")
        return [self.hangs_in == "get" for _ in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        self._enter("get")
        return [None for _ in keys]

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._enter("put")

    def close(self) -> None:
        self._enter("close")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStore]:
    store = HangingStore()
    monkeypatch.setattr(model_executor, "open_block_store", lambda args: store)
    yield store
    store.may_go_on.set()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hanging")
    return {
        **SETTINGS,
        "page_size": 16,
        "model_path": MODEL,
        "max_total_tokens": 512,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
        "hicache_storage_dir": str(folder / "store"),
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def ask(engine: Engine, prompt: list[int]) -> list[int]:
    (result,) = engine.generate(input_ids=[prompt], sampling_params=SAMPLING, progress=False)
    return result.output_ids


def counter(engine: Engine, name: str) -> int:
    count: int = engine.server_info()["counters"][name]
    return count


@pytest.mark.parametrize("call", ["exists", "get"])
def test_after_the_first_overdue_call_requests_do_without_the_store(
    store: HangingStore, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(store_transfers, "_CALL_LIMIT_S", 0.3)
    # No probe, however long a busy machine takes.
    monkeypatch.setattr(store_transfers, "_REST_S", float("inf"))
    store.hangs_in = call
    with Engine(**settings) as engine:
        for prompt in PROMPTS[:2]:
            ask(engine, prompt)
        assert counter(engine, "store_failures") == 1
        num_calls = store.num_calls
        for prompt in PROMPTS[2:]:
            ask(engine, prompt)
        assert store.num_calls == num_calls
        assert counter(engine, "store_failures") == 1
        assert counter(engine, "host_copied_pages") > 0
        store.may_go_on.set()


def while_it_hangs(engine: Engine, store: HangingStore, call: Callable[[], Any]) -> Any:
    """The result of `call`, made while a put hangs."""
    store.hangs_in = "put"
    ask(engine, PROMPTS[0])
    until(lambda: store.num_calls > 0, "a put begins")
    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(call)
        # The engine serves on.
        assert len(ask(engine, [3, 4, 5])) == 8
        return called.result(60)


def test_a_flush_completes_once_a_put_is_overdue(
    store: HangingStore, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(**settings) as engine:
        while_it_hangs(engine, store, engine.flush_cache)
        monkeypatch.setattr(
            store_transfers._Lane, "is_overdue", lambda self, now_s: bool(self._since_s)
        )
        assert engine.flush_cache()
        store.may_go_on.set()


def test_a_flush_is_refused_if_a_put_takes_too_long(
    store: HangingStore, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "_FLUSH_LIMIT_S", 0.2)
    with Engine(**settings) as engine:
        assert not while_it_hangs(engine, store, engine.flush_cache)
        assert not engine.flush_cache()
        store.may_go_on.set()
        until(engine.flush_cache, "the put ends")


def test_new_weights_wait_for_no_put(store: HangingStore, settings: dict[str, Any]) -> None:
    with Engine(**settings) as engine:
        before = ask(engine, PROMPTS[1])

        def update() -> bool:
            message = UpdateWeightsFromDisk(rid="u", model_path=MODEL, flush_cache=True)
            return engine._engine.call(message).ok

        assert while_it_hangs(engine, store, update)
        assert ask(engine, PROMPTS[1]) == before
        store.may_go_on.set()


def test_the_end_waits_for_a_put_for_a_while_only(
    store: HangingStore,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for module in (store_transfers, saved_cache):
        monkeypatch.setattr(module, "_CLOSE_LIMIT_S", 0.3)
    with Engine(**settings | {"restore_cache": str(tmp_path)}) as engine:
        store.hangs_in = "put"
        ask(engine, PROMPTS[0])
        until(lambda: store.num_calls > 0, "a put begins")
