"""Schedulers under load, whose recordings the page of the memory view shows."""

from collections.abc import Callable

from sgl_jax.core.messages import ForkSession, OpenSession, RollbackSession, SessionTurn
from tests.memory_view.test_reader import shared_prompts, with_host, with_windows
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.test_states import make_driver as make_driver_with_states

HOSTILE = "<img src=x onerror=\"document.title='run'\">"


def busy_driver() -> Driver:
    """Two ranks short of pages: retracts, evictions, waiting requests; and sessions with a
    rollback, a fork and a branch."""
    driver = Driver(make_sizes(dp_size=2, num_pages=24, num_rows=6))
    driver.tick(5.0)
    driver.session(OpenSession(rid="q0", session_id="chat", streaming=True))
    driver.session(OpenSession(rid="q1", session_id=HOSTILE))
    for i in range(3):
        turn = SessionTurn(id="chat")
        driver.submit(generate(f"chat{i}", [i, i], 4, session=turn))
        driver.submit(generate(f"tree{i}", [i, i], 4, session=SessionTurn(id=HOSTILE)))
        driver.run()
    branch = SessionTurn(id=HOSTILE, rid="tree0")
    driver.submit(generate("branch", [9], 4, session=branch))
    driver.run()
    driver.session(RollbackSession(rid="q2", session_id="chat", num_turns=2))
    driver.session(ForkSession(rid="q3", session_id="chat", new_session_id="fork"))
    driver.submit(generate("forked", [8], 4, session=SessionTurn(id="fork")))
    driver.run()
    for i in range(14):
        driver.tick(6.0 + i)
        driver.submit(generate(f"{HOSTILE}{i}", [i % 4] * 20 + [i], 24))
        for _ in range(2):
            driver.step()
    driver.run()
    return driver


def large_driver() -> Driver:
    """Two ranks of 65,536 pages."""
    sizes = make_sizes(
        dp_size=2, page_size=1, num_pages=65_536, max_context_len=2048, max_chunk_tokens=1024
    )
    driver = Driver(sizes)
    for i in range(8):
        driver.submit(generate(f"r{i}", [i % 3] * 700 + [i], 3 if i < 4 else 12))
    for _ in range(10):
        driver.step()
    return driver


DRIVERS: dict[str, Callable[[], Driver]] = {
    "two ranks": busy_driver,
    "windows": with_windows,
    "host": with_host,
    "states": lambda: shared_prompts(make_driver_with_states(num_pages=24)),
    "65,536 pages": large_driver,
}
