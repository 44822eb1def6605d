"""States of recurrent layers: where they are kept, and what goes on from them.

Every step is checked by the oracle: a row's source must hold the state after exactly the tokens
before its first query.
"""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup
from sgl_jax.core.messages import OpenSession, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from tests.mem_cache.tree_model import follow
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.liveness import Liveness

PAGE = 4
HYBRID = (*FULL_ATTENTION, CacheGroup(LAST_VALUE, 1, is_recurrent=True))


def make_driver(num_snapshots=40, multiple=4, args=None, **sizes):
    states = (num_snapshots, multiple, 1)
    return Driver(make_sizes(page_size=PAGE, groups=HYBRID, states=states, **sizes), args)


def numbers(seed, count):
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


def run(driver, rid, prompt, num_new=3, **fields):
    driver.submit(generate(rid, prompt, num_new, **fields))
    driver.run()
    driver.check_tokens(rid)
    return driver.cached[rid]


def test_a_prompt_goes_on_from_the_last_whole_page_of_the_same_prompt():
    driver, prompt = make_driver(), numbers(1, 22)
    assert run(driver, "first", prompt) == 0
    assert run(driver, "second", prompt) == 20


def test_a_prompt_of_whole_pages_leaves_out_its_last_token():
    driver, prompt = make_driver(), numbers(1, 20)
    run(driver, "first", prompt)
    assert run(driver, "second", prompt) == 16


def test_a_conversation_goes_on_from_the_end_of_an_answer():
    driver, prompt = make_driver(), numbers(2, 9)
    run(driver, "first", prompt, num_new=8)
    history = prompt + driver.tokens["first"]
    # The last token was sampled, and never computed.
    assert run(driver, "second", [*history, 1, 2, 3]) == 16


def test_a_branch_is_kept_by_the_first_that_branches_off():
    driver, shared = make_driver(multiple=64), numbers(3, 24)
    run(driver, "first", shared + numbers(4, 10))
    assert run(driver, "second", shared + numbers(5, 10)) == 0
    assert run(driver, "third", shared + numbers(6, 10)) == 24


def test_states_at_multiples_of_the_interval_are_kept():
    driver, shared = make_driver(multiple=2), numbers(3, 21)
    run(driver, "first", shared + numbers(4, 10))
    assert run(driver, "second", shared + numbers(5, 10)) == 16


def test_what_waits_for_a_prefix_in_flight_finds_a_state_at_its_end():
    driver, shared = make_driver(multiple=64, max_chunk_tokens=PAGE), numbers(3, 24)
    driver.submit(generate("first", shared + numbers(4, 10), 3))
    driver.step()
    driver.submit(generate("second", shared + numbers(5, 10), 3))
    driver.run()
    for rid in ("first", "second"):
        driver.check_tokens(rid)
    assert driver.cached["second"] == 24


@pytest.mark.parametrize("num_unread", [0, 1, 2])
@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_a_turn_goes_on_where_the_last_one_ended(num_unread, max_draft_tokens):
    driver = make_driver(max_draft_tokens=max_draft_tokens)
    driver.max_unread = num_unread
    assert driver.session(OpenSession(rid="", session_id="s", streaming=True)).ok
    history = []
    for turn in range(4):
        rid, new = f"turn {turn}", numbers(turn, 7)
        message = generate(rid, new, 6, session=SessionTurn(id="s"))
        driver.submit(message, history)
        driver.run()
        driver.check_tokens(rid)
        if turn:
            # All but what was sampled last and, where nothing was in flight, never computed.
            assert driver.cached[rid] >= len(history) - 1
        history += new + driver.tokens[rid]


def test_a_turn_goes_on_where_a_stop_amid_accepted_drafts_was():
    """The step after it was launched before the stop was known, and began past it."""
    driver, prompt = make_driver(max_draft_tokens=4), numbers(1, 9)
    run(driver, "whole", prompt, num_new=40)
    output = driver.tokens["whole"]
    for count in range(2, 40):
        stop = output[count - 1]
        if stop in output[: count - 1]:
            continue
        driver = make_driver(max_draft_tokens=4)
        assert driver.session(OpenSession(rid="", session_id="s", streaming=True)).ok
        turn = SessionTurn(id="s")
        driver.submit(generate("a", prompt, 40, session=turn, stop_token_ids=(stop,)))
        driver.run()
        assert driver.tokens["a"] == output[:count]
        driver.submit(generate("b", numbers(2, 3), 4, session=turn), prompt + driver.tokens["a"])
        driver.run()
        driver.check_tokens("b")


@pytest.mark.parametrize("num_unread", [1, 2])
@pytest.mark.parametrize("max_draft_tokens", [1, 4])
def test_a_session_keeps_no_more_than_its_next_turn_goes_on_with(num_unread, max_draft_tokens):
    """Two unread steps have overwritten both halves of a row that stopped amid accepted drafts."""
    prompt = numbers(1, 9)
    args = SchedulerArgs(disable_radix_cache=True, session_memory_fraction=1.0)
    num_kept = []
    for stop in range(50):
        driver = make_driver(max_draft_tokens=max_draft_tokens, args=args)
        driver.max_unread = num_unread
        assert driver.session(OpenSession(rid="", session_id="s", streaming=True)).ok
        turn = SessionTurn(id="s")
        driver.submit(generate("a", prompt, 40, session=turn, stop_token_ids=(stop,)))
        driver.run()
        lease = driver.scheduler.ranks[0].memory.sessions.idle_lease("s")
        num_kept.append(0 if lease is None else lease.kv_committed_len)
        driver.submit(generate("b", numbers(2, 3), 4, session=turn), prompt + driver.tokens["a"])
        driver.run()
        assert driver.cached["b"] == num_kept[-1]
    assert max(num_kept) > len(prompt)


def test_a_retracted_request_goes_on_from_its_last_whole_page():
    driver = make_driver()
    driver.submit(generate("a", numbers(1, 9), 20))
    for _ in range(12):
        driver.step()
    driver.retract("a")
    driver.run()
    driver.check_tokens("a")
    cached = [rank.num_cached_tokens for rank in driver.scheduler.ranks]
    assert cached == [0]  # counted once, at the first admission
    assert driver.scheduler.counters()["requests_retracted"] == 1
    starts = [plan.ranks[0].kv_starts.tolist() for plan in driver.plans]
    assert [0] in starts
    assert [16] in starts[12:]


def test_without_slots_nothing_is_kept_and_everything_is_right():
    driver, prompt = make_driver(num_snapshots=1), numbers(7, 40)
    assert run(driver, "first", prompt) == 0
    # The last whole page found the only slot locked by the row itself.
    assert run(driver, "second", prompt) == 32
    assert run(driver, "third", numbers(8, 40), num_new=30) == 0


def test_refused_drafts_leave_no_trace():
    driver = make_driver(max_draft_tokens=4, num_pages=120)
    for i in range(6):
        driver.submit(generate(f"r{i}", numbers(i, 9 + i), 40))
    driver.run()
    for i in range(6):
        driver.check_tokens(f"r{i}")
    history = numbers(0, 9) + driver.tokens["r0"]
    assert run(driver, "again", history) >= len(history) - 2 * PAGE


def test_waiting_for_the_last_page_of_a_prefix_saves_all_of_it_where_no_state_was_kept():
    """But for that page what both begin with is published, and nothing can go on from it."""
    driver = make_driver(multiple=64, max_chunk_tokens=64, num_pages=100)
    shared = numbers(3, 68)
    driver.submit(generate("first", shared + numbers(4, 10), 3))
    driver.step()
    driver.submit(generate("second", shared + numbers(5, 10), 3))
    driver.run()
    for rid in ("first", "second"):
        driver.check_tokens(rid)
    assert driver.cached["second"] == 68


def make_gap_driver(groups, states):
    """Of a driver whose tree has a prompt and cannot resume its first 36 tokens, the driver, those
    tokens, and how many of them it can resume."""
    sizes = make_sizes(
        page_size=PAGE,
        groups=groups,
        states=states,
        num_pages=200,
        num_rows=5,
        max_chunk_tokens=128,
    )
    driver, prompt = Driver(sizes, SchedulerArgs(radix_eviction_policy="lru")), numbers(3, 58)
    run(driver, "first", prompt)
    memory = driver.scheduler.ranks[0].memory
    cursor = follow(memory, np.array(prompt[:36], np.int32))
    for i in range(9):
        if cursor.length < cursor.matched:
            break
        run(driver, f"other {i}", numbers(10 + i, 58))
    length = cursor.length
    assert length < cursor.matched == 36
    memory.waiting.unfollow(cursor.prefix)
    return driver, prompt[:36], length


@pytest.mark.parametrize(
    ("groups", "states"),
    [
        pytest.param(HYBRID, (40, 64, 1), id="states"),
        pytest.param((*FULL_ATTENTION, CacheGroup(8, 1)), None, id="windows"),
    ],
)
@pytest.mark.parametrize("num_shared", [36, 40])
def test_a_gap_is_computed_once_by_those_that_arrive_together(groups, states, num_shared):
    """With 40 tokens shared, the gap and tokens that the tree lacks."""
    driver, shared, length = make_gap_driver(groups, states)
    Liveness(driver.scheduler)
    shared += [49, 48, 49, 48][: num_shared - 36]
    for i in range(4):
        driver.submit(generate(f"r{i}", shared + numbers(20 + i, 8), 3))
    driver.step()
    assert driver.scheduler.num_running == 1
    driver.run()
    assert [driver.cached[f"r{i}"] for i in range(4)] == [length, *[num_shared] * 3]
    for i in range(4):
        driver.check_tokens(f"r{i}")


def test_a_state_is_kept_where_one_that_waits_for_a_gap_branches_off():
    driver, shared, _ = make_gap_driver(HYBRID, (40, 64, 1))
    driver.submit(generate("first to come", shared + numbers(20, 8), 3))
    driver.submit(generate("shorter", shared[:24] + numbers(21, 8), 3))
    driver.run()
    assert driver.cached["shorter"] == 24
    driver.check_tokens("shorter")


def test_nothing_waits_for_a_state_that_cannot_be_kept():
    driver, shared = make_driver(num_snapshots=1, multiple=64, max_chunk_tokens=128), numbers(3, 24)
    driver.submit(generate("holds the slot", numbers(1, 9), 20))
    driver.step()
    for i in range(3):
        driver.submit(generate(f"r{i}", shared + numbers(4 + i, 3), 3))
    driver.step()
    assert driver.scheduler.num_running == 4
    driver.run()


def test_nothing_waits_for_a_prompt_of_which_only_what_is_scored_is_left():
    """There is no state to go on from after what the tree has, and none will come of waiting."""
    driver, prompt = make_driver(multiple=64, max_prompt_logprob_tokens=2), numbers(3, 30)
    Liveness(driver.scheduler)
    driver.submit(generate("scored", prompt, 3, logprob_start_len=8))
    for _ in range(3):
        driver.step()
    driver.submit(generate("late", [*prompt[:26], 1, 2], 3))
    driver.run()
    driver.check_tokens("late")
