"""A dump tells everything about a rank, and is written however broken the rank is."""

import json
from pathlib import Path

import pytest

from sgl_jax.mem_cache.dump import dump_rank, write_dump
from sgl_jax.mem_cache.rank_memory import RankMemory
from tests.mem_cache.test_ledger import CORRUPTIONS, busy_memory, leak_a_page


def test_a_dump_tells_where_every_page_and_row_is() -> None:
    memory = busy_memory()
    dump = json.loads(json.dumps(dump_rank(memory)))
    assert dump["view"]["dp_rank"] == 7
    assert dump["findings"] == []
    (pool,) = dump["pools"]
    owned = sorted(page for pages in pool["owners"].values() for page in pages)
    assert sorted(owned + pool["free_pages"]) == list(range(memory.allocator.num_pages))
    assert pool["owners"]["reserved"] == [0]
    assert pool["owners"]["row 2"] == memory.leases[2].pages(4)[0].tolist()

    first, second = dump["rows"]
    assert first["pages"] == memory.leases[1].pages(4).tolist()
    assert (first["row"], first["cache_protected_len"], first["kv_committed_len"]) == (1, 8, 10)
    assert (second["row"], second["kv_allocated_len"], second["held"]) == (2, 8, True)
    assert sorted(dump["free_rows"] + [1, 2]) == [1, 2, 3, 4, 5]

    nodes = {node["id"]: node for node in dump["tree"]["nodes"]}
    locked = nodes[next(lease["node"] for lease in dump["leases"] if lease["row"] == 1)]
    assert (locked["locks"], locked["start"], locked["end"]) == ([1], 0, 8)
    assert locked["pages"][0] == first["pages"][0][:2]
    assert sum(len(node["pages"][0]) for node in nodes.values()) == len(pool["owners"]["tree"])
    assert dump["tree"]["num_locks"] == 1


def test_a_dump_tells_the_last_moves_and_what_is_wrong() -> None:
    memory = busy_memory()
    leak_a_page(memory)
    dump = dump_rank(memory)
    (found,) = dump["findings"]
    (page,) = found["pages"]
    transitions = dump["pools"][0]["transitions"]
    last = transitions[-1]
    assert (last["action"], last["pages"]) == ("take", [["row 2", page]])
    clocks = [move["clock"] for move in transitions]
    assert clocks == sorted(set(clocks))


def test_prompts_are_not_in_it() -> None:
    text = json.dumps(dump_rank(busy_memory()))
    assert "token" not in text.replace("num_locked_tokens", "")


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=[c.__name__ for c, _ in CORRUPTIONS])
def test_any_corruption_can_be_dumped(corruption: tuple[object, str], tmp_path: Path) -> None:
    memories = [busy_memory(), busy_memory()]
    corrupt, _ = corruption
    corrupt(memories[1])  # type: ignore[operator]
    path = tmp_path / "dump.json"
    write_dump(path, memories, "why", {"step": 3})
    dump = json.loads(path.read_text())
    assert (dump["reason"], dump["context"]) == ("why", {"step": 3})
    sound, broken = dump["ranks"]
    assert sound["findings"] == []
    assert broken["findings"] != []


def test_a_part_that_cannot_be_read_says_why_and_the_rest_is_there() -> None:
    memory: RankMemory = busy_memory()
    memory.cache.nodes()[0].values[0] = None
    dump = dump_rank(memory)
    assert "the walk itself failed: TypeError" in dump["findings"][0]["what"]
    assert dump["tree"].startswith("cannot be read: ")
    assert dump["view"]["dp_rank"] == 7
    assert len(dump["rows"]) == 2


def test_an_old_dump_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text("old")
    with pytest.raises(FileExistsError):
        write_dump(path, [busy_memory()], "why", {})
    assert path.read_text() == "old"
