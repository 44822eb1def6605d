"""Memory records broken wherever the engine may notice: it ends, or repairs itself.

A real engine loop and scheduler on an executor that checks what every step would read. The real
executor in a real process: `tests/live/test_memory_defects.py`.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from sgl_jax.core.engine_messages import Reply, WeightsChanged
from sgl_jax.core.messages import (
    AbortRequest,
    DescribePage,
    FlushCache,
    FrontMessage,
    GenerateRequest,
    ReadMemory,
    Shutdown,
)
from sgl_jax.core.progress import Progress
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import RankResult, StepHandle, StepPlan
from sgl_jax.core.weight_messages import UpdateWeightsFromTensor
from sgl_jax.engine.loop import core as core_module
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.loop.memory_audit import MAX_DUMPS, DefectRecord
from sgl_jax.engine.loop.weight_updates import _Staging
from sgl_jax.mem_cache.errors import LedgerError, MemoryDefectError, OwnershipError
from sgl_jax.mem_cache.pages.pool_records import TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.scheduler.events import Rebuild
from tests.engine.scripted_channel import ScriptedChannel
from tests.scheduler.driver import make_sizes
from tests.support.oracle_executor import OracleExecutor

SIZES = make_sizes(dp_size=2, num_pages=40, max_chunk_tokens=24, max_context_len=64)
NUM_REQUESTS = 6
NUM_TOKENS = 12


class OracleModelExecutor:
    """As much of `ModelExecutor` as the engine loop uses, on the content oracle."""

    def __init__(self, args: ServerArgs, progress: Progress) -> None:
        self.sizes = SIZES
        self.info: dict[str, Any] = {"eos_token_ids": []}
        self.num_resets = 0
        self.oracle = OracleExecutor(SIZES)

    def warm_up(self) -> None:
        return

    def start_background(self) -> bool:
        return False

    def compile_counts(self) -> dict[str, int]:
        return {"compiles_after_ready": 3}

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.num_resets, self.oracle.launch(plan)

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        life, oracle_handle = handle
        if life != self.num_resets:
            raise RuntimeError("the step was launched before the reset")
        return self.oracle.result(oracle_handle)

    def reset(self) -> None:
        self.num_resets += 1
        self.oracle = OracleExecutor(SIZES)

    def close(self) -> None:
        return


@pytest.fixture
def make_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., EngineCore]:
    monkeypatch.setattr(core_module, "ModelExecutor", OracleModelExecutor)
    monkeypatch.setattr(core_module, "_IDLE_POLL_S", 0.0)

    def make(check_memory: str, action: str, **settings: Any) -> EngineCore:
        args = ServerArgs(
            model_path="none",
            check_memory=check_memory,
            memory_error_action=action,
            memory_dump_dir=str(tmp_path / "dumps"),
            **settings,
        )
        return EngineCore(args)

    return make


def prompt(i: int) -> list[int]:
    return [i % 3] * 9 + [i]


def requests(prefix: str, count: int = NUM_REQUESTS) -> list[FrontMessage]:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
    return [
        GenerateRequest(rid=f"{prefix}{i}", input_ids=prompt(i), sampling=sampling)
        for i in range(count)
    ]


def leak_a_page(memory: RankMemory) -> None:
    memory.allocator.alloc(1, owner=1)


def leak_a_lock(memory: RankMemory) -> None:
    node = memory.cache.match_prefix(np.array(prompt(0), np.int32)).node
    assert node is not None


def free_pages_in_use(memory: RankMemory) -> None:
    for lease in memory.leases.values():
        memory.allocator.free(lease.pages(4, lease.cache_protected_len)[0], lease.row)


def give_pages_in_use_away(memory: RankMemory) -> None:
    for lease in memory.leases.values():
        memory.allocator.give_to_tree(lease.pages(4, lease.cache_protected_len)[0], lease.row)


def count_pages_that_are_not_free(memory: RankMemory) -> None:
    memory.cache._full.num_evictable += 1000
    free = memory.allocator.num_free
    memory.allocator.alloc(free, owner=1)


def forget_a_lease(memory: RankMemory) -> None:
    memory.leases.clear()


# What breaks, which checks run, and the message that arrives next, if any.
BUSY_DEFECTS: dict[str, tuple[Callable[[RankMemory], None], str, list[FrontMessage]]] = {
    "a leaked page, at the next commit": (leak_a_page, "busy", []),
    "a leaked lock, at the next commit": (leak_a_lock, "busy", []),
    "pages freed in use, at the next commit": (free_pages_in_use, "busy", []),
    "pages freed in use, when a step fails for it": (free_pages_in_use, "off", []),
    "pages freed in use, on abort": (free_pages_in_use, "off", [AbortRequest(abort_all=True)]),
    "pages freed in use, at the end": (free_pages_in_use, "off", [Shutdown()]),
    "pages given away, on release": (give_pages_in_use_away, "off", []),
    "pages that are not there, when planning": (count_pages_that_are_not_free, "off", []),
    "a lost lease, on release": (forget_a_lease, "idle", []),
}


def break_in_flight(
    core: EngineCore, corrupt: Callable[[RankMemory], None], then: list[FrontMessage]
) -> Iterator[list[FrontMessage]]:
    """Six requests run, rank 0 breaks, six more are sent once the first have ended."""
    yield requests("a")
    for _ in range(4):
        yield []
    assert core.scheduler.num_running == NUM_REQUESTS
    assert core.steps.in_flight
    corrupt(core.scheduler.ranks[0].memory)
    yield then
    for _ in range(100):
        if core.scheduler.is_idle:
            break
        yield []
    assert core.scheduler.is_idle
    yield requests("b")
    for _ in range(100):
        yield []


@pytest.mark.parametrize("defect", BUSY_DEFECTS)
def test_repair_fails_what_is_in_flight_and_serves_on_with_right_answers(
    make_core: Callable[..., EngineCore], tmp_path: Path, defect: str
) -> None:
    corrupt, check_memory, then = BUSY_DEFECTS[defect]
    core = make_core(check_memory, "repair")
    channel = ScriptedChannel(break_in_flight(core, corrupt, then))
    core.run(channel)

    ends = channel.ends()
    is_last = any(isinstance(message, Shutdown) for message in then)
    assert {rid for rid in ends if rid.startswith("a")} == {f"a{i}" for i in range(NUM_REQUESTS)}
    failed = [finish for finish in ends.values() if finish.status_code == 500]
    assert failed
    # Where the executor noticed first, one request was already told that a step had failed.
    texts = [finish.message or "" for finish in failed]
    assert any("memory wrong and started afresh" in text for text in texts)
    assert all("memory" in text or "step failed" in text for text in texts)
    assert not any(str(tmp_path) in text for text in texts)
    tokens = channel.tokens()
    for i in range(0 if is_last else NUM_REQUESTS):
        assert tokens[f"b{i}"] == core.executor.oracle.expected_output(prompt(i), NUM_TOKENS)  # type: ignore[attr-defined]
        assert ends[f"b{i}"].type == "length"

    assert core.state()["counters"]["memory_errors"] == 1
    assert core.executor.num_resets == (2 if "step fails" in defect else 1)  # type: ignore[attr-defined]
    core.scheduler.audit()
    (dump,) = (tmp_path / "dumps").iterdir()
    assert json.loads(dump.read_text())["ranks"][0]["view"]["dp_rank"] == 0


@pytest.mark.parametrize("defect", BUSY_DEFECTS)
def test_crash_ends_the_loop_and_names_the_dump(
    make_core: Callable[..., EngineCore], tmp_path: Path, defect: str
) -> None:
    corrupt, check_memory, then = BUSY_DEFECTS[defect]
    core = make_core(check_memory, "crash")
    with pytest.raises(MemoryDefectError, match=r"rank 0.*; memory dump: ") as caught:
        core.run(ScriptedChannel(break_in_flight(core, corrupt, then)))
    path = Path(str(caught.value).rpartition("memory dump: ")[2])
    assert path.parent == tmp_path / "dumps"
    assert json.loads(path.read_text())["reason"] in str(caught.value)


def test_those_that_wait_are_answered_and_forgotten_as_well(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core("busy", "repair")

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a", count=40)
        yield []
        yield []
        assert core.scheduler.num_waiting > 0
        leak_a_page(core.scheduler.ranks[1].memory)
        yield []
        assert core.scheduler.is_idle
        assert core.scheduler.num_waiting == core.scheduler.num_running == 0
        assert not any(rank.unsent_admissions for rank in core.scheduler.ranks)
        yield requests("b")
        for _ in range(50):
            yield []

    channel = ScriptedChannel(script())
    core.run(channel)
    ends = channel.ends()
    assert len(ends) == 40 + NUM_REQUESTS
    assert all(ends[f"a{i}"].status_code == 500 for i in range(40))
    assert all(ends[f"b{i}"].type == "length" for i in range(NUM_REQUESTS))
    assert core.scheduler.counters()["requests_finished"] == 40 + NUM_REQUESTS


def test_a_rebuilt_scheduler_tells_the_device_of_no_request_it_lost(
    make_core: Callable[..., EngineCore],
) -> None:
    scheduler = make_core("off", "repair").scheduler
    (message,) = requests("a", count=1)
    assert isinstance(message, GenerateRequest)
    scheduler.handle(message)
    (request,) = scheduler._waiting
    assert scheduler.ranks[0].admit(request, scheduler._waiting.cursor(request, 0))
    scheduler.handle(Rebuild("broken"))
    assert not scheduler.ranks[0].unsent_admissions
    assert request.lease is None
    assert scheduler.num_running == 0


def test_a_leak_is_found_at_rest_and_repaired(
    make_core: Callable[..., EngineCore], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core("idle", "repair")

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        for _ in range(50):
            yield []
        yield requests("b")
        yield []
        leak_a_page(core.scheduler.ranks[1].memory)
        for _ in range(50):
            yield []

    channel = ScriptedChannel(script())
    core.run(channel)
    assert all(finish.type == "length" for finish in channel.ends().values())
    assert core.state()["counters"]["memory_errors"] == 1
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "memory dump: " in record.getMessage()
    assert "LedgerError: rank 1: rows hold 0 pages, 1 are leased" in record.getMessage()
    assert "row 1 took page" in record.getMessage()


def test_a_flush_that_finds_a_leaked_lock_is_answered(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core("off", "repair")

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        for _ in range(50):
            yield []
        for rank in core.scheduler.ranks:
            rank.memory.cache.match_prefix(np.array(prompt(0), np.int32))
        yield [FlushCache(rid="flush")]
        yield [FlushCache(rid="again")]

    channel = ScriptedChannel(script())
    core.run(channel)
    replies = {reply.rid: reply for reply in channel.sent if isinstance(reply, Reply)}
    assert not replies["flush"].ok
    assert "started afresh" in replies["flush"].message
    assert replies["again"].ok
    assert all(view.cached_pages == 0 for view in core.scheduler.memory_views())


def run_updates(core: EngineCore, *messages: UpdateWeightsFromTensor) -> ScriptedChannel:
    """Run the loop with these messages, whose tensors were taken and complete the weights."""
    updates, update, ended = core._controls.updates, MagicMock(), Future[set[str]]()
    ended.set_result(set())

    def script() -> Iterator[list[FrontMessage]]:
        updates._update = update
        updates.stagings += [_Staging(message, update, ended) for message in messages]
        yield from [[]] * 4

    channel = ScriptedChannel(script())
    core.run(channel)
    return channel


def test_an_update_that_meets_a_defect_is_answered(
    make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, rids = make_core("off", "repair"), ("first", "second")
    monkeypatch.setattr(core.steps, "settle", MagicMock(side_effect=LedgerError("broken")))
    messages = (UpdateWeightsFromTensor(rid=rid, tensors=b"", is_last=True) for rid in rids)
    channel = run_updates(core, *messages)
    replies = [each for each in channel.sent if isinstance(each, Reply)]
    assert [(each.rid, each.ok, each.data.get("status_code")) for each in replies] == [
        ("first", False, 500),
        ("second", False, 500),
    ]
    assert all("started afresh" in each.message for each in replies)


def test_new_weights_are_told_though_giving_up_the_old_kv_finds_a_defect(
    make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core("off", "repair")
    defect = MagicMock(side_effect=LedgerError("broken"))
    monkeypatch.setattr(core.executor, "weights", MagicMock(is_mixed=False), raising=False)
    monkeypatch.setattr(core.executor, "renew_store_keys", renew := MagicMock(), raising=False)
    monkeypatch.setattr(core._controls.updates, "_give_up_kv", defect)
    message = UpdateWeightsFromTensor(rid="update", tensors=b"", weight_version="new")
    channel = run_updates(core, message)
    (reply,) = (each for each in channel.sent if isinstance(each, Reply))
    assert (reply.ok, reply.data["status_code"]) == (False, 500)
    assert WeightsChanged(version="new") in channel.sent
    assert core.info["weight_version"] == "new"
    renew.assert_called_once_with(keeps_kv=False)


@pytest.mark.parametrize("is_found_by", ["a later flush", "the loop"])
def test_all_flushes_are_answered_when_one_finds_a_defect(
    make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch, is_found_by: str
) -> None:
    core = make_core("off", "repair")
    is_moving = [True]
    moving = property(lambda scheduler: is_moving[0])
    monkeypatch.setattr(type(core.scheduler.offload), "is_moving_out", moving)

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        for _ in range(50):
            yield []
        for rank in core.scheduler.ranks:
            rank.memory.cache.match_prefix(np.array(prompt(0), np.int32))
        yield [FlushCache(rid="1")]
        yield [FlushCache(rid="2")]
        is_moving[0] = False
        yield [FlushCache(rid="3")] if is_found_by == "a later flush" else []
        yield [FlushCache(rid="afterwards")]

    channel = ScriptedChannel(script())
    core.run(channel)
    replies = [reply for reply in channel.sent if isinstance(reply, Reply)]
    refused = ["1", "2", "3"][: 3 if is_found_by == "a later flush" else 2]
    assert [reply.rid for reply in replies] == [*refused, "afterwards"]
    assert [reply.ok for reply in replies] == [False] * len(refused) + [True]
    assert all("started afresh" in reply.message for reply in replies[:-1])
    assert core.state()["counters"]["memory_errors"] == 1


def test_a_recording_with_a_repair_plays_again(
    make_core: Callable[..., EngineCore], tmp_path: Path
) -> None:
    from sgl_jax.replay.player import Player
    from sgl_jax.scheduler.record.event_log import EventReader

    file = tmp_path / "events"
    secrets = {"api_key": "open-sesame", "admin_api_key": "swordfish"}
    core = make_core("idle", "repair", record_events=str(file), **secrets)

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        for _ in range(50):
            yield []
        leak_a_page(core.scheduler.ranks[0].memory)
        core._is_audited = False
        yield []
        yield requests("b")
        for _ in range(50):
            yield []

    core.run(ScriptedChannel(script()))
    assert core.state()["counters"]["memory_errors"] == 1
    with file.open("rb") as recorded:
        reader = EventReader(recorded)
        player = Player(reader.started, "busy")
        for event in reader:
            player.feed(event)
        player.finish()
    assert player.scheduler.memory_views() == core.scheduler.memory_views()
    assert not any(secret.encode() in file.read_bytes() for secret in secrets.values())


def memories() -> list[RankMemory]:
    return [RankMemory(rank, SIZES) for rank in range(2)]


def test_dumps_stop_before_they_fill_the_disk(tmp_path: Path) -> None:
    record = DefectRecord(str(tmp_path))
    for _ in range(MAX_DUMPS):
        assert "memory dump: " in record.record(LedgerError("off"), memories(), {})
    assert "no memory dump" in record.record(LedgerError("off"), memories(), {})
    assert len(list(tmp_path.iterdir())) == MAX_DUMPS
    assert record.num_defects == MAX_DUMPS + 1


def test_without_a_folder_dumps_go_to_a_new_private_one() -> None:
    where = DefectRecord(None).record(OwnershipError("off"), memories(), {})
    path = Path(where.removeprefix("memory dump: "))
    assert path.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0
    path.unlink()
    path.parent.rmdir()


def test_a_dump_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    where = DefectRecord(str(tmp_path / "file")).record(LedgerError("off"), memories(), {})
    assert where.startswith("the memory dump could not be written: ")


def test_the_tree_is_an_owner_like_any_other() -> None:
    """A page of the tree that is freed behind its back breaks the next eviction."""
    (memory, _) = memories()
    pages = memory.allocator.alloc(2, owner=1)
    memory.allocator.give_to_tree(pages, owner=1)
    memory.allocator.free(pages, TREE)
    with pytest.raises(OwnershipError, match=r"tree freed page 1"):
        memory.allocator.free(pages, TREE)


def test_a_memory_that_cannot_be_read_is_refused_and_the_engine_serves_on(
    make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core("busy", "crash")

    def script() -> Iterator[list[FrontMessage]]:
        yield [*requests("a"), ReadMemory(rid="whole", has_tree=True)]
        with monkeypatch.context() as broken:
            broken.delattr(MemoryReader, "_sessions")  # as records may be that are wrong
            yield [ReadMemory(rid="broken"), DescribePage(rid="page", dp_rank=0, pool=0, page=1)]
        for _ in range(60):
            yield []

    channel = ScriptedChannel(script())
    core.run(channel)
    replies = {reply.rid: reply for reply in channel.sent if isinstance(reply, Reply)}
    assert replies["whole"].ok
    assert replies["whole"].data["counters"]["compiles_after_ready"] == 3
    assert isinstance(replies["whole"].data["ranks"][0]["codes"][0], bytes)
    assert not replies["broken"].ok
    assert replies["broken"].data["status_code"] == 500
    assert replies["page"].ok
    assert len(channel.ends()) == NUM_REQUESTS
    assert {finish.type for finish in channel.ends().values()} == {"length"}
