"""A snapshot shows every page once, with its holder, and reading it changes nothing."""

import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    DescribePage,
    FindPrefix,
    ForkSession,
    OpenSession,
    ReadMemory,
    RollbackSession,
    SessionTurn,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.dump import namespace_hash
from sgl_jax.mem_cache.pages.pool_records import FREE, RESERVED, TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.memory_view import reader as reader_module
from sgl_jax.memory_view.frames import FrameBuilder
from sgl_jax.memory_view.reader import (
    LOCKED,
    MAX_SESSIONS,
    MAX_TEXT_TOKENS,
    MAX_TURNS,
    MAX_WAITING,
    MemoryReader,
)
from sgl_jax.replay.player import Player
from sgl_jax.scheduler.record.event_log import EventReader
from tests.mem_cache.test_ledger import leak_a_page
from tests.replay.eventful_driver import eventful_driver
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.test_states import make_driver as make_driver_with_states

Snapshot = dict[str, Any]


def shared_prompts(driver: Driver) -> Driver:
    """Requests that share prefixes, more than fit, and a session between them."""
    driver.session(OpenSession(rid="o", session_id="s", streaming=True))
    for i in range(8):
        driver.submit(generate(f"r{i}", [i % 3] * 20 + [i], 12))
        if i % 3 == 0:
            turn = SessionTurn(id="s")
            driver.submit(generate(f"turn{i}", [7, i], 4, session=turn))
        for _ in range(6):
            driver.step()
    driver.run()
    return driver


def with_windows() -> Driver:
    groups = (*FULL_ATTENTION, CacheGroup(8, 1))
    return shared_prompts(Driver(make_sizes(num_pages=24, groups=groups)))


def with_host() -> Driver:
    """Prefixes with windows go to host memory and come back, by slow transfers."""
    groups = (*FULL_ATTENTION, CacheGroup(8, 1))
    sizes = make_sizes(dp_size=2, num_pages=24, groups=groups, host_ratio=2.0)
    driver = Driver(sizes, SchedulerArgs(hicache_fetch_policy="always"))
    driver.oracle.host.end_rate = 0.2
    shared_prompts(driver)
    for i in range(12):
        driver.submit(generate(f"again{i}", [i % 6] * 24 + [i], 4))
        for _ in range(6):
            driver.step()
    driver.run()
    return driver


DRIVERS = {
    "prefixes in host memory": with_host,
    "full attention, two ranks, retracts, sessions": eventful_driver,
    "one rank that is short of pages": lambda: shared_prompts(Driver(make_sizes(num_pages=20))),
    "windows": with_windows,
    "states": lambda: shared_prompts(make_driver_with_states(num_pages=24)),
}


def snapshots(driver: Driver) -> Iterator[Snapshot]:
    """One after each event of a replay of `driver`, which proves that reading changes nothing."""
    events = EventReader(io.BytesIO(driver.recording.getvalue()))
    player = Player(events.started, check_memory="busy")
    reader = MemoryReader(player.scheduler)
    for event in events:
        player.feed(event)
        yield reader.read(ReadMemory(has_tree=True, has_tokens=True))
    player.finish()


def codes_of(rank: Snapshot, pool: int) -> np.ndarray:
    return np.frombuffer(rank["codes"][pool], np.int32)


@pytest.mark.parametrize("name", DRIVERS)
def test_the_pages_add_up_to_the_engines_own_counts(name: str) -> None:
    kinds = Counter[str]()
    for snapshot in snapshots(DRIVERS[name]()):
        for rank in snapshot["ranks"]:
            assert rank["defect"] is None
            leases = rank["leases"]
            idle = {
                r for r, is_idle in zip(leases["row"], leases["is_idle"], strict=True) if is_idle
            }
            for number, pool in enumerate(rank["pools"]):
                codes = codes_of(rank, number)
                rows = codes[codes > 0]
                is_idle = np.isin(rows, list(idle))
                found = {
                    "total_pages": len(codes),
                    "free_pages": int((codes == FREE).sum()),
                    "reserved_pages": int((codes == RESERVED).sum()),
                    "cached_pages": int(np.isin(codes, [TREE, LOCKED]).sum()),
                    "protected_pages": int((codes == LOCKED).sum()),
                    "session_held_pages": int(is_idle.sum()),
                    "leased_pages": int((~is_idle).sum()),
                }
                assert found == {name: pool[name] for name in found}
                kinds.update(name for name, count in found.items() if count)
            assert set(codes_of(rank, 0)[codes_of(rank, 0) > 0].tolist()) <= set(leases["row"])
    assert kinds["leased_pages"] > 20
    assert kinds["protected_pages"] > 20


def test_the_blocks_of_the_hosts_memory_add_up_while_they_come_and_go() -> None:
    kinds = Counter[str]()
    for snapshot in snapshots(with_host()):
        for rank in snapshot["ranks"]:
            assert rank["defect"] is None
            for pool, raw in zip(rank["host_pools"], rank["host_codes"], strict=True):
                codes = np.frombuffer(raw, np.int32)
                found = {
                    "total_blocks": len(codes),
                    "free_blocks": int((codes == FREE).sum()),
                    "reserved_blocks": int((codes == RESERVED).sum()),
                    "cached_blocks": int(np.isin(codes, [TREE, LOCKED]).sum()),
                    "leaving_blocks": int((codes == LOCKED).sum()),
                    "arriving_blocks": int((codes > 0).sum()),
                }
                assert found == pool
                kinds.update(name for name, count in found.items() if count)
    assert min(kinds["leaving_blocks"], kinds["arriving_blocks"]) > 20, kinds


@pytest.mark.parametrize("name", DRIVERS)
def test_the_tree_lists_every_page_that_it_owns(name: str) -> None:
    most = num_gone = 0
    for snapshot in snapshots(DRIVERS[name]()):
        for rank, tree in zip(snapshot["ranks"], snapshot["tree"], strict=True):
            assert tree["num_pages_left_out"] == 0
            for pool, counts in enumerate(rank["pools"]):
                listed = sum(node["num_pages"][pool] for node in tree["nodes"])
                assert listed == counts["cached_pages"]
            seen = {None: 0}
            for node in tree["nodes"]:
                assert node["start"] == seen[node["parent"]], "parents come first"
                assert len(node["tokens"]) == 4 * (node["end"] - node["start"])
                if name == "windows":
                    gone = [
                        page
                        for first, count in node["tombstones"]
                        for page in range(first, first + count)
                    ]
                    assert gone == sorted(set(gone))
                    assert node["num_pages"][1] == node["num_pages"][0] - len(gone)
                    num_gone += len(gone)
                seen[node["id"]] = node["end"]
            most = max(most, len(tree["nodes"]))
    assert most > 3
    assert (num_gone > 0) == (name == "windows")


@pytest.mark.parametrize("name", DRIVERS)
def test_each_page_of_the_tree_is_described_by_its_node(name: str) -> None:
    driver = DRIVERS[name]()
    driver.submit(generate("last", [4] * 20, 4))
    driver.run()
    reader = MemoryReader(driver.scheduler)
    num_found = 0
    for rank in driver.scheduler.ranks:
        nodes = {node.node_id: node for node in rank.memory.cache.nodes()}
        for pool, allocator in enumerate(rank.memory.allocators):
            for page in np.flatnonzero(allocator.owners() == TREE).tolist():
                place: dict[str, Any] = {"dp_rank": rank.dp_rank, "pool": pool, "page": page}
                found = reader.describe_page(DescribePage(**place))
                assert found.tokens is not None
                assert found.node is not None
                node, first = nodes[found.node], found.tokens[0]
                index = (first - (node.end - len(node.key))) // 4
                pages = [
                    node.values[each.index][index]
                    for each in rank.memory.cache.tree.components
                    if each.pool == pool
                ]
                assert page in pages
                num_found += 1
    assert num_found > 3


def test_leases_and_waiting_requests_are_those_of_the_scheduler() -> None:
    driver = Driver(make_sizes(num_pages=20))
    for i in range(6):
        driver.submit(generate(f"r{i}", [i] * 20, 12))
    for _ in range(12):
        driver.step()
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory())
    (rank,) = snapshot["ranks"]
    leases = rank["leases"]
    memory = driver.scheduler.ranks[0].memory
    assert leases["row"] == sorted(memory.leases)
    for index, row in enumerate(leases["row"]):
        lease = memory.leases[row]
        lengths = [leases[name][index] for name in ("protected", "committed", "allocated")]
        assert lengths == [
            lease.cache_protected_len,
            lease.kv_committed_len,
            lease.kv_allocated_len,
        ]
        assert driver.scheduler._requests[leases["rid"][index]].lease is lease
    waiting = snapshot["waiting"]
    assert len(waiting) == snapshot["num_waiting"] == driver.scheduler.num_waiting > 0
    assert {entry["kind"] for entry in waiting} == {"pages"}
    assert "pages short on rank 0" in waiting[0]["reason"]


def test_lists_are_bounded() -> None:
    driver = Driver(make_sizes(num_pages=20))
    for i in range(MAX_WAITING + 30):
        driver.submit(generate(f"r{i}", [i % 50] * 20, 12))
    driver.step()
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory())
    assert len(snapshot["waiting"]) == MAX_WAITING
    assert snapshot["num_waiting"] == MAX_WAITING + snapshot["num_waiting_left_out"] > MAX_WAITING


def test_the_last_turns_of_long_sessions_are_listed_with_their_parents() -> None:
    driver = Driver(make_sizes(num_pages=60))
    num_turns = MAX_TURNS + 6
    for session_id in ("stream", "tree"):
        is_streaming = session_id == "stream"
        driver.session(OpenSession(rid="o", session_id=session_id, streaming=is_streaming))
        for i in range(num_turns):
            # The last two of the tree continue turns of which one is listed.
            before = {num_turns - 2: 0, num_turns - 1: num_turns - 3}.get(i, i - 1)
            parent = None if is_streaming or i == 0 else f"{session_id}{before}"
            turn = SessionTurn(id=session_id, rid=parent)
            driver.submit(generate(f"{session_id}{i}", [i % 50], 1, session=turn))
            driver.run()
    sessions = sessions_of(driver)
    for session_id, last in (("stream", [61, 62]), ("tree", [None, 61])):
        turns = sessions[session_id]["turns"]
        parents = [turn["parent"] for turn in turns]
        assert sessions[session_id]["num_left_out"] == 6
        assert [turn["name"] for turn in turns] == [f"{session_id}{i}" for i in range(6, num_turns)]
        assert parents[:3] == [None, 0, 1]
        assert parents[-2:] == last


def test_sessions_with_pages_are_listed_before_the_newest_others() -> None:
    driver = Driver(make_sizes(num_pages=60))
    driver.tick(1.0)
    for session_id in ("idle", "busy", *(f"s{i}" for i in range(MAX_SESSIONS + 5))):
        driver.session(OpenSession(rid="o", session_id=session_id, streaming=True))
    driver.submit(generate("first", [1] * 9, 4, session=SessionTurn(id="idle")))
    driver.run()
    driver.tick(2.0)
    driver.submit(generate("turn", [2] * 20, 30, session=SessionTurn(id="busy")))
    for _ in range(6):
        driver.step()
    driver.tick(7.0)
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory())
    names = [session["session_id"] for session in snapshot["sessions"]]
    assert names == ["idle", "busy", *(f"s{i}" for i in range(MAX_SESSIONS + 4, 6, -1))]
    assert snapshot["num_sessions"] == MAX_SESSIONS + 7
    assert snapshot["num_sessions_left_out"] == 7
    idle, busy, other = snapshot["sessions"][:3]
    leases = snapshot["ranks"][0]["leases"]
    assert dict(zip(leases["row"], leases["session_id"], strict=True)) == {
        idle["row"]: "idle",
        busy["row"]: "busy",
    }
    assert (idle["is_running"], busy["is_running"], other["is_running"]) == (False, True, False)
    assert (idle["idle_s"], busy["idle_s"], other["idle_s"]) == (5.0, 0.0, 5.0)
    assert min(idle["num_pages"], busy["num_pages"]) > 0
    assert (other["row"], other["dp_rank"], other["num_pages"]) == (None, None, 0)


def test_a_session_shows_its_fork_and_its_rollback() -> None:
    driver = Driver(make_sizes(num_pages=60))
    driver.session(OpenSession(rid="o", session_id="s", streaming=True))
    for i in range(3):
        turn = SessionTurn(id="s", name=f"turn {i}")
        driver.submit(generate(f"t{i}", [i, 9], 6, session=turn))
        driver.run()
    (held,) = sessions_of(driver).values()
    lease = driver.scheduler.ranks[0].memory.leases[held["row"]]
    assert held["num_pages"] == -(-lease.kv_allocated_len // 4) > 0
    assert held["num_pages_freed_by_eviction"] == held["num_pages"]
    assert (held["dp_rank"], held["forked_from"], held["undone"]) == (0, None, [])
    driver.session(ForkSession(rid="f", session_id="s", new_session_id="twin"))
    driver.session(RollbackSession(rid="b", session_id="s", num_turns=1))
    sessions = sessions_of(driver)
    assert [turn["name"] for turn in sessions["s"]["turns"]] == ["turn 0"]
    assert sessions["s"]["undone"] == [{"after_turns": 1, "num_turns": 2}]
    twin = sessions["twin"]
    assert [turn["parent"] for turn in twin["turns"]] == [None, 0, 1]
    assert twin["forked_from"] == {"session_id": "s", "num_turns": 3}
    assert (twin["undone"], twin["row"], twin["num_pages"]) == ([], None, 0)


def sessions_of(driver: Driver) -> dict[str, Any]:
    frame = FrameBuilder().add(MemoryReader(driver.scheduler).read(ReadMemory()), 0.0)
    return {entry["session_id"]: entry for entry in frame["sessions"]}


def lock_once_more(memory: RankMemory) -> None:
    memory.cache.num_locks += 1


def lose_a_lease(memory: RankMemory) -> None:
    memory.leases.pop(2)


@pytest.mark.parametrize("corrupt", [leak_a_page, lock_once_more, lose_a_lease])
def test_a_defect_is_shown_with_its_pages(corrupt: Callable[[RankMemory], None]) -> None:
    driver = Driver(make_sizes(num_pages=40))
    for i in range(2):
        driver.submit(generate(f"r{i}", [i] * 20, 30))
    for _ in range(10):
        driver.step()
    reader = MemoryReader(driver.scheduler)
    assert reader.read(ReadMemory())["ranks"][0]["defect"] is None
    corrupt(driver.scheduler.ranks[0].memory)
    (rank,) = FrameBuilder().add(reader.read(ReadMemory()), 0.0)["ranks"]
    assert not rank["is_closed"]
    assert rank["defect"]
    assert bool(rank["defect_pages"]) == (corrupt is not lock_once_more)


def test_a_page_is_described_by_its_holder_and_its_moves() -> None:
    driver = Driver(make_sizes(num_pages=40))
    driver.submit(generate("done", [1] * 20, 4))
    driver.run()
    driver.submit(generate("r", [1] * 20 + [2] * 8, 30))
    for _ in range(6):
        driver.step()
    reader, memory = MemoryReader(driver.scheduler), driver.scheduler.ranks[0].memory
    (row,) = memory.leases
    protected = memory.leases[row].cache_protected_len
    table = memory.rows.pages[row, 0]
    assert protected > 0
    for index, page in enumerate(table[table > 0].tolist()):
        found = reader.describe_page(DescribePage(dp_rank=0, pool=0, page=page))
        is_shared = 4 * index < protected
        assert found.owner == ("tree" if is_shared else f"row {row}")
        assert found.tokens is not None
        allocated = memory.leases[row].kv_allocated_len
        end = 4 * index + 4 if is_shared else min(4 * index + 4, allocated)
        assert found.tokens == (4 * index, end)
        assert (found.rid, found.node is not None) == (None if is_shared else "r", is_shared)
        assert found.num_locks == is_shared
        assert (found.moves[-1].action, found.is_whole) == (
            "give to the tree" if is_shared else "take",
            True,
        )
    free = reader.describe_page(DescribePage(dp_rank=0, pool=0, page=39))
    assert (free.owner, free.tokens, free.moves) == ("free", None, [])
    for wrong in ({"dp_rank": 1}, {"pool": 1}, {"page": 40}):
        with pytest.raises(InvalidRequestError, match="must be in"):
            reader.describe_page(DescribePage(**{"dp_rank": 0, "pool": 0, "page": 1, **wrong}))  # type: ignore[arg-type]


def test_a_block_is_described_by_its_prefix_and_its_moves() -> None:
    driver = with_host()
    reader, rank = MemoryReader(driver.scheduler), driver.scheduler.ranks[1]
    assert rank.host.tier is not None
    blocks = rank.host.tier.blocks
    blocks.allocators[1].alloc(1, owner=999)
    nodes = blocks.cache.nodes()
    for pool, (allocator, component) in enumerate(
        zip(blocks.allocators, blocks.cache.tree.components, strict=True)
    ):
        places = {
            page: node.end - len(node.key) + 4 * index
            for node in nodes
            for index, page in enumerate(node.values[component.index].tolist())
        }
        for block, owner in enumerate(allocator.owners().tolist()):
            found = reader.describe_page(DescribePage(dp_rank=1, pool=2 + pool, page=block))
            held = (places[block], places[block] + 4) if owner == TREE else None
            assert (found.tokens, found.node, found.rid, found.num_locks) == (held, None, None, 0)
            names = {TREE: "tree", FREE: "free", RESERVED: "reserved", 999: "transfer 999"}
            assert found.owner == names[owner]
            assert bool(found.moves) or owner in (FREE, RESERVED)
            assert not any("row" in move.owner for move in found.moves)
            assert (found.last_access is None) == (owner != TREE)
    for wrong in ({"pool": 4}, {"pool": 2, "page": 49}):
        with pytest.raises(InvalidRequestError, match="must be in"):
            reader.describe_page(DescribePage(**{"dp_rank": 1, "page": 1, **wrong}))  # type: ignore[arg-type]


def test_blocks_that_do_not_add_up_are_a_defect_of_the_rank() -> None:
    driver = with_host()
    reader, (_, rank) = MemoryReader(driver.scheduler), driver.scheduler.ranks
    assert rank.host.tier is not None
    rank.host.tier.blocks.allocators[0].alloc(1, owner=999)
    defects = [each["defect"] for each in reader.read(ReadMemory())["ranks"]]
    words = "host memory of rank 1: copies have 0 blocks, 1 are owned"
    assert defects == [None, words]


def test_the_blocks_that_are_listed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_BLOCKS", 5)
    snapshot = MemoryReader(with_host().scheduler).read(ReadMemory())
    pools = FrameBuilder().add(snapshot, 0.0)["ranks"][0]["pools"]
    assert [pool["name"] for pool in pools] == [
        "full",
        "window 8",
        "host full",
        "host window 8",
    ]
    assert [pool["is_host"] for pool in pools] == [False, False, True, True]
    assert [pool["num_pages"] for pool in pools] == [24, pools[1]["pages"]["total"], 5, 5]
    assert pools[2]["pages"]["total"] == 49


def test_a_history_is_not_whole_once_older_moves_are_forgotten() -> None:
    driver = Driver(make_sizes(num_pages=40))
    reader, allocator = MemoryReader(driver.scheduler), driver.scheduler.ranks[0].memory.allocator
    for _ in range(5000):
        allocator.free(allocator.alloc(1, owner=3), 3)
    found = reader.describe_page(DescribePage(dp_rank=0, pool=0, page=1))
    moves = allocator.transitions()
    assert (found.is_whole, moves[0].clock > 1, found.clock) == (False, True, moves[-1].clock)


def test_a_prefix_is_found_in_its_namespace_alone() -> None:
    driver = Driver(make_sizes(num_pages=40))
    driver.submit(generate("r", [1] * 20, 4))
    driver.run()
    reader = MemoryReader(driver.scheduler)
    (found,) = reader.find_prefix(FindPrefix(input_ids=[1] * 14 + [5] * 6)).ranks
    assert found.num_tokens == 12
    tree = reader.read(ReadMemory(has_tree=True))["tree"][0]
    assert set(found.nodes) <= {node["id"] for node in tree["nodes"]}
    (other,) = reader.find_prefix(FindPrefix(input_ids=[1] * 20, namespace="other")).ranks
    assert (other.num_tokens, other.nodes) == (0, [])


def test_the_tokens_of_a_text_are_bounded() -> None:
    driver = Driver(make_sizes(num_pages=60))
    prompt = [i % 47 for i in range(90)]
    driver.submit(generate("r", prompt, 30))
    for _ in range(20):
        driver.step()
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory(has_tree=True, has_tokens=True))
    for tokens in (
        snapshot["ranks"][0]["leases"]["tokens"][0],
        snapshot["tree"][0]["nodes"][0]["tokens"],
    ):
        assert np.frombuffer(tokens, np.int32).tolist() == prompt[:MAX_TEXT_TOKENS]


def test_nodes_of_all_ranks_together_are_bounded_and_the_rest_is_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "MAX_NODES", 6)
    driver = Driver(make_sizes(dp_size=2, num_pages=60))
    for i in range(12):
        driver.submit(generate(f"r{i}", [i] * 8, 4))
    driver.run()
    snapshot = MemoryReader(driver.scheduler).read(ReadMemory(has_tree=True))
    assert "tokens" not in snapshot["tree"][0]["nodes"][0]
    assert "tokens" not in snapshot["ranks"][0]["leases"]
    for rank, tree in zip(snapshot["ranks"], snapshot["tree"], strict=True):
        assert len(tree["nodes"]) == 3
        listed = sum(node["num_pages"][0] for node in tree["nodes"])
        assert listed + tree["num_pages_left_out"] == rank["pools"][0]["cached_pages"] > listed


def test_snapshots_show_neither_tokens_nor_namespaces_of_prompts() -> None:
    driver = Driver(make_sizes(num_pages=60))
    driver.submit(generate("r", [1] * 20, 30, namespace="a secret"))
    for _ in range(12):
        driver.step()
    reader = MemoryReader(driver.scheduler)
    shown = repr(reader.read(ReadMemory(has_tree=True)))
    assert namespace_hash("a secret") in shown
    assert "a secret" not in shown
    assert "tokens'" not in shown.replace("_tokens'", "")
