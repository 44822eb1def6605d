"""A run of a scheduler in which everything happens once or more, to be recorded."""

from sgl_jax.core.messages import (
    CloseSession,
    ForkSession,
    ListSessions,
    OpenSession,
    RollbackSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Flush, Rebuild
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.faults import FaultyExecutor


def eventful_driver() -> Driver:
    """Everything a scheduler can be told, once or more."""
    sizes = make_sizes(dp_size=2, num_pages=24, max_draft_tokens=3)
    config = SchedulerArgs(
        schedule_conservativeness=0.0,
        test_retract=True,
        test_retract_interval=7,
        request_timeout=50.0,
        max_queued_requests=20,
    )
    driver = Driver(sizes, config)
    driver.executor = FaultyExecutor(driver.oracle, failing_results={60})
    driver.tick(10.0)
    for i in range(12):
        wanted = {"logprob_start_len": i - 3, "return_logprob": i > 3, "token_ids_logprob": [i, 8]}
        driver.submit(generate(f"r{i}", list(range(i, i + 20)), 30, **wanted))
        driver.step()
    driver.submit(generate("refused", [], 3))
    driver.abort("r3")
    driver.scheduler.handle(StopRequest(rid="r0", num_output_tokens=1))
    driver.scheduler.handle(Flush())
    driver.run()
    driver.submit(generate("late", [1, 2, 3], 80))
    driver.step()
    driver.tick(61.0)
    driver.run()
    assert driver.finish["late"].status_code == 504
    assert driver.executor.num_failed == 1
    driver.submit(generate("lost", [1, 2, 3], 20))
    driver.step()
    driver.in_flight.clear()
    driver.scheduler.handle(Rebuild("the records were wrong"))
    driver.collect()
    driver.submit(generate("after", [1, 2, 3], 20))
    driver.run()
    converse(driver)
    assert driver.scheduler.handle(Flush())
    return driver


def converse(driver: Driver) -> None:
    """Everything a session can be asked; all are closed afterwards, one of them by the clock."""
    driver.session(OpenSession(rid="q0", session_id="s", streaming=True, timeout_s=5.0))
    driver.session(OpenSession(rid="q1", session_id="tree"))
    assert not driver.session(OpenSession(rid="q2", session_id="s")).ok
    for i in range(3):
        turn = SessionTurn(id="s", name="turn")
        driver.submit(generate(f"turn#{i}", [i, i], 9, session=turn))
        driver.submit(generate(f"branch#{i}", [i, i], 9, session=SessionTurn(id="tree")))
        driver.run()
    driver.scheduler.handle(StopRequest(rid="turn#2", num_output_tokens=4, session=turn))
    driver.session(RollbackSession(rid="q3", session_id="s", num_turns=1))
    driver.session(ForkSession(rid="q4", session_id="s", new_session_id="fork"))
    driver.submit(generate("aborted", [3], 9, session=turn))
    driver.step()
    driver.abort("aborted")
    driver.run()
    for session_id in ("tree", "fork"):
        driver.session(CloseSession(rid="q5", session_id=session_id))
    driver.tick(70.0)
    assert len(driver.session(ListSessions(rid="q6")).data["sessions"]) == 1
    driver.tick(80.0)
    assert driver.session(ListSessions(rid="q7")).data == {"sessions": []}
