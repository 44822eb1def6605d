"""Thousands of waiting requests end in bounded parts, so that no turn of the loop takes long."""

from typing import Any

from sgl_jax.core.messages import AbortRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.tenants import MAX_TENANTS, NO_TENANT, Tenants
from tests.scheduler.driver import Driver, generate, make_sizes

NUM_WAITING = 2000
# So many requests end within one event.
MOST = 256


def waiting_driver(**settings: Any) -> Driver:
    """One request runs, and the others wait."""
    args = SchedulerArgs(max_queued_requests=2 * NUM_WAITING, **settings)
    driver = Driver(make_sizes(num_pages=60, num_rows=2), args)
    driver.tick(100.0)
    driver.submit(generate("runs", [1], 200))
    driver.step()
    for i in range(NUM_WAITING):
        driver.submit(generate(str(i), [i % 50], 4))
    driver.step()
    assert driver.scheduler.num_running == 1
    return driver


def end_all(driver: Driver, now_s: float) -> list[int]:
    """Tick as long as the scheduler asks for it; return how many requests ended each time."""
    counts = []
    while driver.scheduler.needs_tick(now_s):
        before = len(driver.finish)
        driver.tick(now_s)
        counts.append(len(driver.finish) - before)
        driver.step()
    return counts


def test_an_abort_of_all_ends_those_that_run_at_once_and_the_others_in_parts() -> None:
    driver = waiting_driver()
    driver.scheduler.handle(AbortRequest(abort_all=True, message="enough"))
    driver.collect()
    assert driver.scheduler.num_running == 0
    first = len(driver.finish)
    assert 0 < first <= 1 + MOST
    driver.submit(generate("later", [3], 4))
    driver.step()
    assert driver.scheduler.num_running == 0
    counts = end_all(driver, 100.0)
    assert first + sum(counts) == 1 + NUM_WAITING
    assert max(counts) <= MOST
    # In order of arrival, each once (`Driver.collect`), and none started meanwhile.
    assert list(driver.finish) == ["runs", *map(str, range(NUM_WAITING))]
    assert {finish.type for finish in driver.finish.values()} == {"abort"}
    assert {finish.message for finish in driver.finish.values()} == {"enough"}
    assert not any(driver.tokens[str(i)] for i in range(NUM_WAITING))
    driver.run()
    driver.check_tokens("later")
    driver.check_replay()


def test_a_request_that_takes_the_id_of_an_aborted_one_is_not_aborted() -> None:
    driver = waiting_driver()
    last = str(NUM_WAITING - 1)
    driver.scheduler.handle(AbortRequest(abort_all=True))
    driver.abort(last)
    assert driver.finish.pop(last).type == "abort"
    driver.submit(generate(last, [7], 4))
    end_all(driver, 100.0)
    driver.run()
    assert driver.finish[last].type == "length"
    driver.check_tokens(last)


def test_an_abort_of_one_request_during_an_abort_of_all_ends_it_once() -> None:
    driver = waiting_driver()
    driver.scheduler.handle(AbortRequest(abort_all=True))
    driver.abort("1999")
    driver.scheduler.handle(AbortRequest(abort_all=True, message="again"))
    end_all(driver, 100.0)
    assert len(driver.finish) == 1 + NUM_WAITING
    assert driver.scheduler.is_idle
    driver.check_replay()


def test_requests_that_wait_too_long_end_in_parts_while_others_run() -> None:
    driver = waiting_driver(waiting_timeout=5.0)
    num_tokens = len(driver.tokens["runs"])
    counts = end_all(driver, 106.0)
    assert sum(counts) == NUM_WAITING
    assert max(counts) <= MOST
    assert len(driver.tokens["runs"]) >= num_tokens + len(counts) - 1
    assert list(driver.finish) == [str(i) for i in range(NUM_WAITING)]
    assert {finish.status_code for finish in driver.finish.values()} == {503}
    driver.run()
    driver.check_tokens("runs")
    driver.check_replay()


def test_requests_that_take_too_long_end_in_parts() -> None:
    driver = waiting_driver(request_timeout=5.0)
    counts = end_all(driver, 106.0)
    assert sum(counts) == NUM_WAITING + 1
    assert max(counts) <= MOST
    assert {finish.status_code for finish in driver.finish.values()} == {504}
    driver.check_idle()


class Unscanned(dict[str, int]):
    """A dictionary that nothing may walk through."""

    def items(self) -> Any:
        raise AssertionError("a new tenant costs a look at all remembered ones")

    values = keys = __iter__ = items


def test_a_new_tenant_takes_the_place_of_the_least_served_idle_one() -> None:
    """Without a look at the others, however many have come before."""
    tenants = Tenants(make_sizes(), is_fair=True)
    numbers = [tenants.enter(Tenant(name=str(i))) for i in range(MAX_TENANTS)]
    assert NO_TENANT not in numbers
    tenants._numbers = Unscanned(tenants._numbers)
    assert tenants.enter(Tenant(name="all have requests")) == NO_TENANT
    tenants.leave(NO_TENANT)
    for i, number in enumerate(numbers):
        tenants.serve_prompt(number, 10 + (i * 7919) % MAX_TENANTS, 0)
    for number in numbers:
        tenants.leave(number)
    # The least served one is served after it left, and the next one has another request.
    order = sorted(range(MAX_TENANTS), key=lambda i: (i * 7919) % MAX_TENANTS)
    tenants.serve_prompt(numbers[order[0]], 10**6, 0)
    assert tenants.enter(Tenant(name=str(order[1]))) == numbers[order[1]]
    for i in order[2:50]:
        assert tenants.enter(Tenant(name=f"new {i}")) == numbers[i]
    tenants.leave(numbers[order[1]])
    for i in range(3 * MAX_TENANTS):
        number = tenants.enter(Tenant(name=f"passing {i}"))
        assert number != NO_TENANT
        tenants.leave(number)
    assert len(tenants._idle) <= MAX_TENANTS
