"""Groups: many samples of one prompt, as trainers send them, compute it once."""

from collections.abc import Sequence

import pytest

from tests.scheduler.driver import Driver, generate, make_sizes

GROUP_SIZE = 16


def prompt(number: int, length: int) -> list[int]:
    return [(7 * j + number) % 49 + 1 for j in range(length)]


def make_driver(
    *, dp_size: int = 1, num_rows: int = 2 * GROUP_SIZE, num_pages: int = 200
) -> Driver:
    return Driver(
        make_sizes(
            dp_size=dp_size,
            page_size=4,
            num_pages=num_pages,
            num_rows=num_rows + 1,
            max_chunk_tokens=64,
        )
    )


def submit_group(driver: Driver, name: str, tokens: list[int], num_outputs: int = 8) -> list[str]:
    rids = [f"{name}{i}" for i in range(GROUP_SIZE)]
    for rid in rids:
        driver.submit(generate(rid, tokens, num_outputs))
    return rids


def steps_to_start(driver: Driver, rids: Sequence[str]) -> dict[str, int]:
    """Step until all of `rids` have a token; return the step of each one's first."""
    steps = dict[str, int]()
    for step in range(1, 200):
        driver.step()
        for rid in rids:
            if driver.tokens[rid]:
                steps.setdefault(rid, step)
        if len(steps) == len(rids):
            return steps
    raise AssertionError(f"{len(rids) - len(steps)} samples did not start")


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("length", [37, 80, 203])
@pytest.mark.parametrize("runs_already", [False, True])
def test_a_prompt_is_computed_once_on_each_rank(
    dp_size: int, length: int, runs_already: bool
) -> None:
    """All ranks compute it in the same steps, so no sample waits for another rank's."""
    driver = make_driver(dp_size=dp_size)
    if runs_already:
        for dp_rank in range(dp_size):
            driver.submit(generate(f"other {dp_rank}", prompt(9, 9), 60, dp_rank=dp_rank))
            driver.step()
    rids = submit_group(driver, "r", prompt(0, length))
    steps = steps_to_start(driver, rids)
    assert max(steps.values()) - min(steps.values()) <= 1, "the samples start together"
    driver.run()
    computed = sum(length - driver.cached[rid] for rid in rids)
    most_of_a_page = 4
    assert computed <= dp_size * length + GROUP_SIZE * most_of_a_page
    for rid in rids:
        driver.check_tokens(rid)


def test_a_group_starts_before_the_next() -> None:
    """Except the sample that computes the next group's prompt, in the rest of a step."""
    driver = make_driver(num_rows=GROUP_SIZE + 4)
    first = submit_group(driver, "a", prompt(0, 50), num_outputs=20)
    second = submit_group(driver, "b", prompt(1, 50), num_outputs=20)
    steps = steps_to_start(driver, first + second)
    assert max(steps[rid] for rid in first) <= sorted(steps[rid] for rid in second)[1]
    driver.run()


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_other_samples_go_on_after_the_abort_of_one(num_steps: int) -> None:
    """Also if the aborted sample computes the prompt that the others wait for."""
    driver = make_driver()
    rids = submit_group(driver, "r", prompt(0, 100))
    for _ in range(num_steps):
        driver.step()
    driver.abort(rids[0])
    driver.run()
    assert driver.finish[rids[0]].type == "abort"
    for rid in rids[1:]:
        assert driver.finish[rid].type == "length"
        driver.check_tokens(rid)
    assert sum(100 - driver.cached[rid] for rid in rids[1:]) <= 2 * 100 + GROUP_SIZE * 4
