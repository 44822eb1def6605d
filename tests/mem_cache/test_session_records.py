"""Every way the records of sessions can be wrong is found, and the dump shows them."""

from collections.abc import Callable

import pytest

from sgl_jax.mem_cache.dump import dump_rank
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    publish_prefix,
    release_idle_lease,
    release_kv_cache,
    resume_lease,
)
from tests.mem_cache.test_session_leases import array, known, make_memory, take_turn


def busy_memory() -> tuple[RankMemory, KVLease, KVLease]:
    """Session "idle" holds row 1, "runs" has checked out row 2, and a plain request has row 3."""
    memory = make_memory(4)
    idle = take_turn(memory, 10, 12, 10, "idle")
    take_turn(memory, 6, 8, 6, "runs")
    running = resume_lease(memory, "runs", 6)
    plain = memory.open_lease(known(0))
    assert memory.grow_rows(array(plain.row), array(3))
    publish_prefix(memory, running, known(6))
    audit(memory, num_running=2)
    return memory, idle, running


def test_a_session_whose_lease_is_not_listed_is_found() -> None:
    memory, idle, _ = busy_memory()
    memory.sessions._idle["idle"] = KVLease(3, idle.row, memory.rows)
    with pytest.raises(LedgerError, match=r"idle session 'idle' holds .*, which is not listed"):
        audit(memory)


def test_a_session_that_keeps_a_released_lease_is_found() -> None:
    memory, idle, _ = busy_memory()
    release_kv_cache(memory, idle, known(0), insert=False)
    with pytest.raises(LedgerError, match=r"'idle' holds KVLease.*released.*not listed"):
        audit(memory)


def test_a_lease_both_idle_and_checked_out_is_found() -> None:
    memory, _, running = busy_memory()
    memory.sessions._idle["third"] = running
    with pytest.raises(LedgerError, match="'runs' and 'third' both have row 2"):
        audit(memory)
    with pytest.raises(
        LedgerError, match="2 requests run and 2 sessions are idle, but there are 3"
    ):
        check_balance(memory, num_running=2)


def test_a_session_with_two_leases_is_found() -> None:
    memory, _, _ = busy_memory()
    memory.sessions._idle["runs"] = memory.sessions._idle.pop("idle")
    with pytest.raises(LedgerError, match=r"idle session 'runs' holds .*, but runs as well"):
        audit(memory)
    memory, _, _ = busy_memory()
    memory.leases[3].session_id = "runs"
    with pytest.raises(LedgerError, match=r"row 3, .* is of session 'runs', which does not run"):
        audit(memory)


def test_a_checked_out_row_without_a_lease_is_found() -> None:
    memory, _, _ = busy_memory()
    memory.sessions._checked_out["ghost"] = KVLease(3, 4, memory.rows)
    with pytest.raises(LedgerError, match=r"'ghost' runs on KVLease.*row 4.*not its lease"):
        audit(memory)


def lock_a_page_too_many(memory: RankMemory) -> None:
    memory.locked[0].lock(memory.rows.pages[1, 0, 1:2])


def forget_that_a_session_is_idle(memory: RankMemory) -> None:
    memory.locked[0].mark_running(memory.rows.pages[1, 0, :2])


def park_what_a_request_has_locked(memory: RankMemory) -> None:
    memory.locked[0].mark_idle(memory.rows.pages[2, 0, :1])


def lock_anew_what_idle_sessions_have_locked(memory: RankMemory) -> None:
    memory.locked[0].num_locked -= 2


def hold_a_page_more_for_sessions(memory: RankMemory) -> None:
    memory.locked[0].num_locked += 1


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (lock_a_page_too_many, r"locked by other leases than was counted: page 2: tree"),
        (forget_that_a_session_is_idle, "locked by other leases than was counted: page 1: tree"),
        (
            park_what_a_request_has_locked,
            r"\(running, idle, any\) leases: \(0, 3, 3\) were counted, a walk finds \(1, 3, 3\)",
        ),
        (lock_anew_what_idle_sessions_have_locked, "leases have locked 1 pages, the tree counts 2"),
        (
            hold_a_page_more_for_sessions,
            r"leases: \(1, 3, 4\) were counted, a walk finds \(1, 3, 3\)",
        ),
    ],
)
def test_a_wrong_count_of_what_idle_sessions_keep_is_found(
    corrupt: Callable[[RankMemory], None], words: str
) -> None:
    memory, _, _ = busy_memory()
    corrupt(memory)
    with pytest.raises(LedgerError, match=f"(?s)^rank 3: .*{words}"):
        audit(memory)


def test_pages_counted_for_idle_sessions_though_there_are_none_are_found_without_a_walk() -> None:
    memory, _, _ = busy_memory()
    assert release_idle_lease(memory, "idle")
    check_balance(memory, num_running=2)
    memory.locked[0].num_idle += 1
    with pytest.raises(LedgerError, match="no session is idle, and 1 pages are held for some"):
        check_balance(memory, num_running=2)


def test_the_dump_shows_sessions() -> None:
    memory, idle, running = busy_memory()
    dump = dump_rank(memory)
    assert dump["sessions"] == [
        {"session_id": "idle", "row": idle.row, "idle": True},
        {"session_id": "runs", "row": running.row, "idle": False},
    ]
    assert dump["view"]["session_rows"] == 1
    assert dump["view"]["session_held_pages"] == 1
    assert dump["findings"] == []
