"""Tenants on one engine: equal prompts, nothing shared but the pool."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.core.messages import ForkSession, OpenSession, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.admission_order import Offer
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.sessions.conversations import Conversations

PROMPT = list(range(1, 25))  # six pages of four tokens
PLAIN = SchedulerArgs(schedule_conservativeness=0.0)


def make_driver(num_pages: int = 64, dp_size: int = 1, config: SchedulerArgs = PLAIN) -> Driver:
    return Driver(make_sizes(num_pages=num_pages, dp_size=dp_size), config)


def run(driver: Driver, rid: str, namespace: str, prompt: list[int] = PROMPT) -> int:
    """Serve a request by itself; answers its cached tokens."""
    driver.submit(generate(rid, prompt, 2, namespace=namespace))
    driver.run()
    driver.check_tokens(rid)
    return driver.cached[rid]


def test_cached_tokens_are_those_of_the_own_namespace() -> None:
    driver = make_driver()
    assert run(driver, "red 1", "red") == 0
    assert run(driver, "red 2", "red") == 20
    assert run(driver, "blue 1", "blue") == 0
    assert run(driver, "none 1", "") == 0
    assert run(driver, "blue 2", "blue") == 20
    assert run(driver, "none 2", "") == 20


def test_requests_of_several_namespaces_run_side_by_side_on_the_same_prompt() -> None:
    driver = make_driver()
    for rid, namespace in (("red", "red"), ("blue", "blue"), ("none", "")):
        driver.submit(generate(rid, PROMPT, 8, namespace=namespace))
    driver.run()
    assert driver.cached == {"red": 0, "blue": 0, "none": 0}
    for rid in ("red", "blue", "none"):
        driver.check_tokens(rid)


def test_a_request_taken_off_its_rank_comes_back_to_its_own_namespace() -> None:
    driver = make_driver()
    run(driver, "blue", "blue")
    driver.submit(generate("red", PROMPT, 8, namespace="red"))
    for _ in range(5):
        driver.step()
    driver.check_namespaces()
    driver.retract("red")
    driver.step()
    driver.check_namespaces()
    driver.run()
    driver.check_tokens("red")
    assert driver.cached["red"] == 0


def in_order(driver: Driver) -> list[Request]:
    """The waiting requests as they would be tried, were there room for all."""
    rooms = driver.scheduler._all_ranks.rooms()
    rooms["total"], rooms["is_open"] = 10_000, True
    may_preempt = np.zeros(len(rooms), np.bool_)
    offer = Offer(
        rooms, may_preempt, np.zeros((len(rooms), 2), np.bool_), passed_by=[], started_on=[]
    )
    return [request for request, _ in driver.scheduler._waiting.candidates(offer, 0, [], 0)]


def test_the_queue_prefers_no_request_for_what_another_namespace_has_cached() -> None:
    """Else the order would tell a tenant what others have sent."""
    driver = make_driver()
    run(driver, "red", "red")
    other = [40, *PROMPT[1:]]
    driver.submit(generate("first", other, 2, namespace="blue"))
    driver.submit(generate("second", PROMPT, 2, namespace="blue"))
    driver.submit(generate("third", PROMPT, 2, namespace="red"))
    order = in_order(driver)
    assert [request.rid for request in order] == ["third", "first", "second"]
    driver.run()


def test_a_rank_is_not_chosen_for_what_it_has_of_another_namespace() -> None:
    driver = make_driver(dp_size=2)
    driver.submit(generate("red", PROMPT, 2, namespace="red", dp_rank=1))
    driver.run()
    for rid, namespace in (("blue", "blue"), ("red again", "red")):
        driver.submit(generate(rid, PROMPT, 2, namespace=namespace))
        driver.run()
    assert driver.dp_rank["blue"] == 0
    assert driver.dp_rank["red again"] == 1


def test_what_others_have_cached_is_not_counted_as_room_for_a_request() -> None:
    driver = make_driver(num_pages=1 + 10)
    driver.submit(generate("none", PROMPT, 12))
    for _ in range(4):
        driver.step()
    assert driver.scheduler.num_running == 1
    driver.submit(generate("blue", PROMPT, 2, namespace="blue"))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] == 0
    driver.check_tokens("blue")


def test_no_idle_session_loses_its_memory_for_what_others_have_cached() -> None:
    driver = make_driver(num_pages=1 + 12)
    talk = Conversations(driver)
    talk.open("s")
    talk.say("s", [45, 46, 47], 2)
    driver.submit(generate("none", PROMPT, 12))
    for _ in range(4):
        driver.step()
    driver.submit(generate("blue", PROMPT, 2, namespace="blue"))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    assert driver.scheduler.counters()["sessions_evicted"] == 0
    driver.run()
    driver.check_tokens("blue")


# -- sessions -----------------------------------------------------------------------------------


def test_the_turns_of_a_session_are_of_its_namespace() -> None:
    driver = make_driver()
    run(driver, "red", "red")
    run(driver, "none", "")
    talk = Conversations(driver)
    talk.open("s", namespace="red")
    assert driver.cached[talk.say("s", PROMPT)] == 20
    talk.say("s", [40, 41], namespace="red")
    history = talk.of["s"].tokens
    talk.close("s")
    assert run(driver, "blue", "blue", history) == 0
    assert run(driver, "none again", "", history) == 24  # the prompt that it had sent itself
    assert run(driver, "red again", "red", history) > 24


def test_what_a_session_leaves_is_found_in_its_namespace_alone() -> None:
    driver = make_driver()
    talk = Conversations(driver)
    talk.open("s", namespace="red")
    talk.say("s", PROMPT)
    assert run(driver, "red", "red") == 20
    assert run(driver, "none", "") == 0


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("opened", "named"), [("red", "blue"), ("", "blue")])
def test_a_turn_that_names_another_namespace_than_its_session_is_refused(
    streaming: bool, opened: str, named: str
) -> None:
    driver = make_driver()
    message = OpenSession(rid="", session_id="s", streaming=streaming, namespace=opened)
    assert driver.session(message).ok
    turn = SessionTurn(id="s")
    driver.submit(generate("other", PROMPT, 2, session=turn, namespace=named))
    finish = driver.finish["other"]
    assert finish.status_code == 400
    assert "another cache_salt or extra_key" in (finish.message or "")
    assert named not in (finish.message or "")
    for i, allowed in enumerate(("", opened)):
        rid = f"allowed {i}"
        driver.submit(generate(rid, PROMPT, 2, session=turn, namespace=allowed))
        driver.run()
        assert driver.finish[rid].type == "length"


def test_a_regular_session_finds_and_leaves_its_namespace() -> None:
    driver = make_driver()
    run(driver, "red", "red")
    for session_id, namespace, expected in (("r", "red", 20), ("b", "blue", 0), ("n", "", 0)):
        message = OpenSession(rid="", session_id=session_id, namespace=namespace)
        assert driver.session(message).ok
        driver.submit(generate(f"{session_id}1", PROMPT, 2, session=SessionTurn(id=session_id)))
        driver.run()
        assert driver.cached[f"{session_id}1"] == expected
    assert run(driver, "blue", "blue") == 20


def test_a_fork_is_of_the_namespace_of_its_origin() -> None:
    driver = make_driver()
    talk = Conversations(driver)
    talk.open("s", namespace="red")
    talk.say("s", PROMPT)
    talk.fork("s", "t")
    assert driver.cached[talk.say("t", [40, 41, 42, 43])] == 24
    refused = talk.begin("t", [44], namespace="blue")
    assert driver.finish[refused].status_code == 400
    talk.fork("t", "u")
    message = ForkSession(rid="", session_id="u", new_session_id="v")
    assert driver.session(message).ok
    driver.submit(generate("v1", [45], 2, session=SessionTurn(id="v"), namespace="red"))
    driver.run()
    assert driver.finish["v1"].type == "length"
    driver.check_namespaces()


def test_a_session_that_lost_its_memory_matches_its_own_namespace_again() -> None:
    driver = make_driver()
    talk = Conversations(driver)
    talk.open("s", namespace="red")
    talk.say("s", PROMPT)
    known = len(talk.of["s"].tokens) // 4 * 4
    assert driver.scheduler.ranks[0].idle_sessions.evict_oldest()
    assert driver.cached[talk.say("s", [40, 41])] >= known - 4
    talk.close_all()


# -- priorities ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enabled", "low_first", "expected"), [(False, False, 0), (True, False, 7), (True, True, -7)]
)
def test_larger_is_more_important_inside_by_either_convention(
    enabled: bool, low_first: bool, expected: int
) -> None:
    config = replace(
        PLAIN, enable_priority_scheduling=enabled, schedule_low_priority_values_first=low_first
    )
    driver = make_driver(config=config)
    driver.submit(generate("a", PROMPT, 2, priority=7))
    assert driver.scheduler._requests["a"].priority == expected
    driver.submit(generate("b", PROMPT, 2))
    assert driver.scheduler._requests["b"].priority == 0
    driver.run()


def test_without_priority_scheduling_a_priority_changes_no_order() -> None:
    driver = make_driver()
    for i, priority in enumerate((0, 2**31 - 1, -(2**31))):
        driver.submit(generate(f"r{i}", [i, *PROMPT], 2, priority=priority))
    order = [request.rid for request in in_order(driver)]
    assert order == ["r0", "r1", "r2"]
    driver.run()


def test_a_replay_has_the_same_namespaces_and_priorities() -> None:
    driver = make_driver(config=replace(PLAIN, enable_priority_scheduling=True))
    talk = Conversations(driver)
    talk.open("s", namespace="red")
    talk.say("s", PROMPT)
    run(driver, "red", "red")
    run(driver, "blue", "blue")
    driver.submit(generate("important", PROMPT, 2, namespace="blue", priority=5))
    driver.run()
    assert driver.cached["important"] == driver.cached["red"] == 20
    driver.check_replay()
