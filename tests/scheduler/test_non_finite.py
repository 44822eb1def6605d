"""A row whose results are not finite ends alone, and nothing that it computed is found again."""

from collections.abc import Callable
from typing import Any

import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.messages import OpenSession, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Flush
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.oracle_executor import NON_FINITE_BITS

BAD = 41
COMMON = list(range(16))
WINDOWED = (*FULL_ATTENTION, CacheGroup(9, 1))

SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"overlap": False},
    "drafts": {"max_draft_tokens": 3},
}


def make_driver(*, overlap: bool = True, **sizes: Any) -> Driver:
    sizes = {
        "page_size": 4,
        "num_rows": 6,
        "num_pages": 60,
        "max_chunk_tokens": 8,
    } | sizes
    return Driver(make_sizes(**sizes), SchedulerArgs(), overlap=overlap)


def ended_non_finite(driver: Driver, *rids: str) -> None:
    for rid in rids:
        assert driver.finish[rid].status_code == 500, rid
        assert "not finite" in driver.finish[rid].message


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_that_is_not_finite_ends_alone(name: str) -> None:
    driver = make_driver(**SETTINGS[name])
    for rid, last in (("a", 17), ("bad", BAD), ("b", 18)):
        driver.submit(generate(rid, [last, 5, 6, 7, 8, 9], 10))
    driver.oracle.bad_token = BAD
    driver.run()
    ended_non_finite(driver, "bad")
    assert driver.tokens["bad"] == []
    for rid in ("a", "b"):
        assert driver.finish[rid].type == "length"
        assert len(driver.tokens[rid]) == 10
        driver.check_tokens(rid)
    assert driver.scheduler.counters()["nonfinite_rows"] == 1
    driver.check_replay()


@pytest.mark.parametrize("name", SETTINGS)
def test_what_it_has_published_is_not_found_and_what_was_good_before_is(name: str) -> None:
    driver = make_driver(**SETTINGS[name])
    driver.submit(generate("first", [*COMMON, 20], 3))
    driver.run()
    driver.oracle.rows_to_glitch = 1  # the second of the chunks behind the common part
    driver.submit(generate("bad", [*COMMON, *range(20, 40)], 3))
    driver.run()
    ended_non_finite(driver, "bad")
    driver.submit(generate("next", [*COMMON, *range(20, 40)], 3))
    driver.run()
    # With overlap, the chunk before was published with the last one's launch.
    assert driver.cached["next"] == len(COMMON) + (8 if driver.max_unread else 0)
    driver.check_tokens("next")
    driver.check_replay()


def finish(driver: Driver, rid: str, prompt: list[int]) -> None:
    """Run a request to its end. Damaged prefixes may still be cached then."""
    driver.submit(generate(rid, prompt, 3))
    while rid not in driver.finish:
        driver.step()


def fail_at_once(driver: Driver, rid: str, prompt: list[int]) -> None:
    """Run a request whose first step is not finite."""
    driver.oracle.rows_to_glitch = 0
    finish(driver, rid, prompt)
    ended_non_finite(driver, rid)


def cached_of(driver: Driver, rid: str, prompt: list[int]) -> int:
    """Run a request; the number of its tokens that were cached."""
    driver.submit(generate(rid, prompt, 3))
    driver.run()
    assert driver.finish[rid].type == "length"
    driver.check_tokens(rid)
    return driver.cached[rid]


def test_the_prefix_that_was_found_is_computed_again_if_two_first_steps_fail_on_it() -> None:
    """Then it is the likelier cause: KV that was damaged since."""
    driver = make_driver()
    assert cached_of(driver, "first", [*COMMON, 20]) == 0
    fail_at_once(driver, "bad", [*COMMON, 21])
    fail_at_once(driver, "too", [*COMMON[:12], 22, 23, 24, 25, 26])
    assert cached_of(driver, "next", [*COMMON, 27]) == 0
    assert cached_of(driver, "last", [*COMMON, 28]) == len(COMMON)
    driver.check_replay()


def test_a_prompt_that_is_never_finite_does_not_take_a_shared_prefix_from_others() -> None:
    driver = make_driver()
    cached_of(driver, "first", [*COMMON, 20])
    driver.oracle.bad_token = BAD
    for i in range(4):
        driver.submit(generate(f"bad {i}", [*COMMON, BAD], 3))
        driver.run()
        ended_non_finite(driver, f"bad {i}")
        assert cached_of(driver, f"next {i}", [*COMMON, 21 + i]) == len(COMMON)
    driver.check_replay()


def damage(driver: Driver) -> None:
    """All that the device's pages hold is not finite now."""
    for rank in driver.oracle._kv:
        for values in rank:
            values ^= NON_FINITE_BITS


def test_a_damaged_prefix_is_found_no_more_although_a_session_keeps_it() -> None:
    driver = make_driver()
    driver.session(OpenSession(rid="open", session_id="s", streaming=True))
    turn = SessionTurn(id="s")
    driver.submit(generate("one", [*COMMON, 20], 3, session=turn))
    driver.run()
    damage(driver)
    for i in range(2):
        finish(driver, f"bad {i}", [*COMMON, 21 + i])
        ended_non_finite(driver, f"bad {i}")
    assert cached_of(driver, "next", [*COMMON, 23]) == 0
    assert cached_of(driver, "last", [*COMMON, 24]) == len(COMMON)
    driver.submit(generate("two", [1], 3, session=turn), [*COMMON, 20, *driver.tokens["one"]])
    driver.run()
    assert driver.finish["two"].type == "length"
    driver.check_tokens("two")
    assert driver.cached["two"] == len(COMMON)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_read_its_prefix_already_end_the_same_way(*, overlap: bool) -> None:
    """They share work: the prefix is on the tree from the launch of its step on."""
    driver = make_driver(overlap=overlap)
    prompt = [*COMMON, *range(20, 36)]
    driver.submit(generate("a", [*prompt, 1], 3))
    driver.step()
    driver.submit(generate("b", [*prompt, 2], 3))
    driver.step()
    driver.oracle.rows_to_glitch = 0
    driver.submit(generate("c", [*prompt, 3], 3))
    driver.run()
    ended = [rid for rid in "abc" if driver.finish[rid].status_code == 500]
    assert ended
    for rid in {*"abc"} - {*ended}:
        driver.check_tokens(rid)
    driver.submit(generate("d", [*prompt, 4], 3))
    driver.run()
    assert driver.finish["d"].type == "length"
    driver.check_tokens("d")


def leave_by_abort(driver: Driver) -> None:
    driver.abort("bad")


def leave_by_retract(driver: Driver) -> None:
    driver.retract("bad")


def test_requests_that_have_left_their_rows_are_forgotten() -> None:
    driver = make_driver()
    driver.submit(generate("long", [1, 2], 60))
    for i in range(20):
        driver.submit(generate(f"r{i}", [3, i], 2))
    driver.run()
    assert driver.finish["long"].type == "length"
    assert not driver.scheduler.non_finite.departed
    assert not driver.scheduler.ranks[0].departed


@pytest.mark.parametrize("leave", [leave_by_abort, leave_by_retract])
def test_a_request_that_has_left_its_row_meanwhile_leaves_nothing_either(
    leave: Callable[[Driver], None],
) -> None:
    driver = make_driver()
    prompt = [*COMMON, *range(20, 40)]
    driver.submit(generate("bad", prompt, 3))
    driver.step()
    driver.oracle.rows_to_glitch = 0
    driver.step()  # launches the second chunk, whose result is not read yet
    assert driver.oracle.num_non_finite == 1
    leave(driver)
    driver.run()  # retracted, it may find its own prefix again before the result is read
    driver.submit(generate("next", prompt, 3))
    driver.run()
    driver.check_tokens("next")
    assert driver.finish["next"].type == "length"


def test_a_session_keeps_its_history_and_no_kv_of_the_turn_that_failed() -> None:
    driver = make_driver()
    driver.session(OpenSession(rid="open", session_id="s", streaming=True))
    turn = SessionTurn(id="s")
    driver.submit(generate("one", COMMON, 3, session=turn))
    driver.run()
    history = COMMON + driver.tokens["one"]
    driver.oracle.rows_to_glitch = 0
    driver.submit(generate("bad", [20, 21], 3, session=turn), history)
    driver.run()
    ended_non_finite(driver, "bad")
    driver.submit(generate("two", [22, 23], 3, session=turn), history)
    driver.run()
    assert driver.finish["two"].type == "length"
    driver.check_tokens("two")


def test_a_turn_that_reads_a_withdrawn_prefix_ends_well_and_its_session_shares_the_new_one() -> (
    None
):
    driver = make_driver()
    cached_of(driver, "first", [*COMMON, 19])
    driver.session(OpenSession(rid="open", session_id="s", streaming=True))
    turn = SessionTurn(id="s")
    driver.submit(generate("one", [*COMMON, 20], 20, session=turn))
    for _ in range(3):
        driver.step()
    for i in range(2):
        driver.oracle.rows_to_glitch = 1  # behind the turn's row
        finish(driver, f"bad {i}", [*COMMON, 21])
    assert "one" not in driver.finish
    assert cached_of(driver, "next", [*COMMON, 22]) == 0
    driver.check_tokens("one")
    assert all(view.session_rows == 0 for view in driver.scheduler.memory_views())
    driver.submit(generate("two", [1], 3, session=turn), [*COMMON, 20, *driver.tokens["one"]])
    driver.run()
    driver.check_tokens("two")
    assert driver.cached["two"] == len(COMMON)


def test_neither_the_host_nor_the_store_keeps_it() -> None:
    sizes = make_sizes(page_size=4, num_rows=6, num_pages=60, max_chunk_tokens=8, host_ratio=2.0)
    args = SchedulerArgs(hicache_storage_backend="file", hicache_write_policy="write_through")
    driver = Driver(sizes, args)
    driver.oracle.host.end_rate = 1.0  # as early as a transfer may end
    prompt = [*COMMON, *range(20, 40)]
    driver.submit(generate("bad", prompt, 5))
    driver.oracle.rows_to_glitch = 3
    driver.run()
    ended_non_finite(driver, "bad")
    driver.submit(generate("next", prompt, 5))
    driver.run()
    driver.check_tokens("next")
    for rank in driver.scheduler.ranks:
        rank.memory.cache.reset()  # only the host has it now
    driver.submit(generate("again", prompt, 5))
    driver.run()
    assert driver.finish["again"].type == "length"
    driver.check_tokens("again")


def test_windows_publish_each_chunk_and_none_that_is_not_finite_is_found() -> None:
    sizes = make_sizes(page_size=4, num_rows=6, num_pages=60, max_chunk_tokens=8, groups=WINDOWED)
    driver = Driver(sizes, SchedulerArgs())
    prompt = [*COMMON, *range(20, 40)]
    driver.oracle.rows_to_glitch = 2
    driver.submit(generate("bad", prompt, 3))
    driver.run()
    ended_non_finite(driver, "bad")
    driver.submit(generate("next", prompt, 3))
    driver.run()
    driver.check_tokens("next")
    assert driver.cached["next"] == len(COMMON)


@pytest.mark.parametrize("groups", [FULL_ATTENTION, WINDOWED])
def test_a_withdrawn_prefix_that_another_request_reads_makes_room_for_a_new_one(
    groups: tuple[CacheGroup, ...],
) -> None:
    driver = make_driver(groups=groups)
    for rid, length in (("holder", 40), ("publishes", 60)):
        driver.submit(generate(rid, [*COMMON, 20], length))
        for _ in range(6):
            driver.step()
    for i in range(2):
        driver.oracle.rows_to_glitch = 2  # behind the holders' rows
        driver.submit(generate(f"bad {i}", [*COMMON, 21], 3))
        while f"bad {i}" not in driver.finish:
            driver.step()
        ended_non_finite(driver, f"bad {i}")
    assert "holder" not in driver.finish
    for rid, cached in (("next", 0), ("last", len(COMMON))):
        driver.submit(generate(rid, [*COMMON, 22], 3))
        while rid not in driver.finish:
            driver.step()
        assert driver.cached[rid] == cached
        assert "holder" not in driver.finish
    for rank in driver.scheduler.ranks:
        assert any(node.is_withdrawn for node in rank.memory.cache.nodes())
    driver.run()
    for rid in ("holder", "publishes", "next", "last"):
        assert driver.finish[rid].type == "length"
        driver.check_tokens(rid)
    for rank in driver.scheduler.ranks:
        assert not any(node.is_withdrawn for node in rank.memory.cache.nodes())
    driver.check_replay()


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_copy_to_the_host_that_is_under_way_is_given_up(num_good: int) -> None:
    """With windows each chunk is published, and offered to the host, before its result is read."""
    sizes = make_sizes(
        page_size=4, num_rows=6, num_pages=60, max_chunk_tokens=8, groups=WINDOWED, host_ratio=2.0
    )
    driver = Driver(sizes, SchedulerArgs(hicache_write_policy="write_through"))
    host = driver.oracle.host
    (rank,) = driver.scheduler.ranks
    assert rank.host.tier is not None
    copies = rank.host.tier.blocks.copies
    prompt = [*COMMON, *range(20, 40)]
    driver.oracle.rows_to_glitch = num_good
    driver.submit(generate("bad", prompt, 3))
    while "bad" not in driver.finish:
        # Copies of good chunks end, and that of the chunk that fails does not.
        has_bad = any(len(copy.tokens) > 8 * num_good for copy in copies.values())
        host.end_rate = 0.0 if has_bad else 1.0
        driver.step()
    ended_non_finite(driver, "bad")
    assert [copy.is_wanted for copy in copies.values()] == [False]
    host.end_rate = 1.0
    driver.run()
    rank.memory.cache.reset()  # only the host has it now
    driver.submit(generate("next", prompt, 3))
    driver.run()
    assert driver.finish["next"].type == "length"
    driver.check_tokens("next")


def host_driver(**args: Any) -> Driver:
    """With windows, and chunks that end within pages."""
    sizes = make_sizes(
        page_size=4, num_rows=6, num_pages=60, max_chunk_tokens=6, groups=WINDOWED, host_ratio=2.0
    )
    driver = Driver(sizes, SchedulerArgs(hicache_write_policy="write_through", **args))
    driver.oracle.host.end_rate = 1.0  # as early as a transfer may end
    return driver


@pytest.mark.parametrize("length", range(10, 15))
def test_a_copy_is_given_up_if_the_step_began_within_a_page(length: int) -> None:
    driver = host_driver()
    prompt = list(range(length))
    driver.oracle.rows_to_glitch = 1  # the chunk from position 6 on
    driver.submit(generate("bad", prompt, 3))
    driver.run()
    ended_non_finite(driver, "bad")
    for rank in driver.scheduler.ranks:
        rank.memory.cache.reset()  # only the host has it now
    driver.submit(generate("next", prompt, 3))
    driver.run()
    assert driver.finish["next"].type == "length"
    driver.check_tokens("next")


STORE = {
    "hicache_storage_backend": "file",
    "hicache_fetch_policy": "always",
    "hicache_storage_prefetch_policy": "wait_complete",
}


@pytest.mark.parametrize("length", [10, 24])
def test_a_prefix_that_the_store_has_damaged_is_loaded_no_more(length: int) -> None:
    driver = host_driver(**STORE)
    prompt = list(range(length))
    driver.submit(generate("first", prompt, 3))
    driver.run()
    driver.scheduler.handle(Flush())  # only the store has it now
    assert driver.oracle.host.store
    for values in driver.oracle.host.store.values():
        values ^= NON_FINITE_BITS
    names = [f"next {i}" for i in range(4)]
    for rid in names:
        finish(driver, rid, prompt)
        for rank in driver.scheduler.ranks:
            rank.memory.cache.reset()  # only the host and the store have it now
    driver.run()
    codes = [driver.finish[rid].status_code for rid in names]
    assert codes[0] == 500
    assert codes[2:] == [None, None]
    driver.check_tokens(names[-1])
