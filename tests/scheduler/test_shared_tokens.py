"""The division of a step's prompt tokens, against a count of each token."""

from copy import copy

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.shared_tokens import SHORT_PART, SharedTokens
from sgl_jax.scheduler.step_builder import StepBuilder
from tests.scheduler.driver import Driver, generate, make_sizes

NO_TENANTS = np.zeros(100, np.int32)


def divide(needs: list[int], num_tokens: int, num_short: int) -> SharedTokens:
    rows = dict(enumerate(needs))
    return SharedTokens(0, rows, num_tokens, num_short, NO_TENANTS, None, {})


def random_needs(rng: np.random.Generator) -> tuple[list[int], int, int]:
    num_tokens = int(rng.integers(4, 64))
    needs = (2 ** rng.uniform(0, 10, rng.integers(1, 8))).astype(int).tolist()
    needs.append(num_tokens)  # so that they use up the step
    return rng.permutation(needs).tolist(), num_tokens, int(rng.integers(0, num_tokens // 2 + 1))


@pytest.mark.parametrize("seed", range(200))
def test_a_further_prompt_gets_tokens_if_it_is_no_longer_than_the_most(seed: int) -> None:
    needs, num_tokens, num_short = random_needs(np.random.default_rng(seed))
    most = divide(needs, num_tokens, num_short).most_tokens()
    lengths = [n for n in range(1, 1500) if is_short(needs, num_tokens, num_short, n)]
    assert lengths == list(range(1, most + 1))
    for length in {1, most // 2, most} - {0} if most else ():
        shared = divide(needs, num_tokens, num_short)
        assert shared.num_left(length, 0) > 0
        shared.add(len(needs), length, 0)
        assert shared.serves(len(needs))
        further = shared.most_tokens()
        assert further <= most
        assert not further or shared.num_left(further, 0) > 0
        again = divide([*needs, length], num_tokens, num_short)
        assert again.serves(len(needs))


def is_short(needs: list[int], num_tokens: int, num_short: int, length: int) -> bool:
    """Whether the youngest prompt, of that length, gets any of the short part."""
    shared = divide([*needs, length], num_tokens, num_short)
    before = 0
    for row in shared.short_rows:
        if before >= num_short:
            return False
        if row == len(needs):
            return True
        before += needs[row]
    return False


@pytest.mark.parametrize("seed", range(50))
def test_a_short_prompt_would_be_completed_later_by_age(seed: int) -> None:
    needs, num_tokens, num_short = random_needs(np.random.default_rng(seed))
    shared, num_shorter = divide(needs, num_tokens, num_short), 0
    for row in shared.short_rows:
        num_shorter += needs[row]
        assert SHORT_PART * num_shorter < sum(needs[: row + 1])
        assert sum(needs[:row]) > (2 - 1 / SHORT_PART) * num_tokens


def test_tenants_share_by_weight_and_leave_the_rest_to_the_oldest() -> None:
    weights, tenants = np.array([1.0, 3.0, 4.0]), np.array([1, 1, 2, 0], np.int32)
    needs = {0: 100, 1: 100, 2: 10, 3: 100}
    shared = SharedTokens(0, needs, 80, 0, tenants, weights, {})
    parts = [(list(rows), most) for rows, most in shared.parts()]
    assert parts == [([0, 1], 30), ([2], 40), ([3], 10)]
    assert [shared.serves(row) for row in needs] == [True, False, True, True]


def test_no_more_than_four_tenants_start_to_share_a_step() -> None:
    weights = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.01])
    shared = SharedTokens(0, {0: 100, 1: 100}, 32, 8, np.array([2, 3], np.int32), weights, {})
    is_open = shared.open_tenants()
    assert is_open is not None
    assert is_open.tolist() == [True, True, False, False, True, False]  # the last would get nothing
    shared.add(2, 100, 0)
    shared.add(3, 100, 1)
    assert shared.open_tenants() is None


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_is_filled_and_the_oldest_prompt_gets_most_of_it(
    seed: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    chunk = int(rng.choice([4, 8, 32, 64]))
    sizes = make_sizes(
        page_size=page_size,
        num_pages=6000 // page_size,
        num_rows=17,
        max_context_len=1100,
        max_chunk_tokens=chunk,
    )
    driver = Driver(sizes, overlap=bool(seed % 2))
    received: list[tuple[int, int]] = []  # tokens of the oldest prompt, and that it could take
    choose_rows = StepBuilder.choose_rows

    def watched(builder: StepBuilder) -> None:
        wanted = {row: builder._needs[row][0] for row in builder._prefilling}
        choose_rows(builder)
        assert sum(builder.chunks.values()) == min(sum(wanted.values()), chunk)
        for row in list(wanted)[:1]:
            received.append((builder.chunks[row], min(wanted[row], chunk)))

    monkeypatch.setattr(StepBuilder, "choose_rows", watched)
    for number in range(40):
        length = int(2 ** rng.uniform(0, 10))
        driver.submit(generate(f"r{number}", rng.integers(0, 50, length).tolist(), 1))
        for _ in range(rng.integers(0, 8)):
            driver.step()
    driver.run()
    assert len(received) > 20
    assert all(got >= min(wanted, chunk // 2) for got, wanted in received)
    most = sum(wanted for _, wanted in received)
    assert sum(got for got, _ in received) >= most * (1 - 1 / SHORT_PART)


def test_no_limit_of_a_step_rises_as_requests_start_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are chosen by the limits at the beginning of a step."""
    sizes = make_sizes(num_pages=400, num_rows=17, max_context_len=1100, max_chunk_tokens=64)
    driver = Driver(sizes, SchedulerArgs(enable_priority_scheduling=True))
    num_cut = 0
    admit, plan = StepBuilder.admit, StepBuilder._plan_tokens

    def limits(builder: StepBuilder) -> tuple[int, int]:
        return -builder.priority_floor, builder.most_tokens

    def watched(builder: StepBuilder, request: Request, cursor: PrefixCursor) -> int:
        nonlocal num_cut
        before = limits(builder)
        row = admit(builder, request, cursor)
        now = limits(builder)
        assert now <= before
        probe = copy(builder)
        probe._levels = []
        plan(probe)
        num_cut += limits(probe)[0] > before[0]
        return row

    monkeypatch.setattr(StepBuilder, "admit", watched)
    rng = np.random.default_rng(3)
    for number in range(400):
        tokens = rng.integers(0, 50, int(2 ** rng.uniform(0, 10))).tolist()
        driver.submit(generate(f"r{number}", tokens, 1, priority=int(rng.integers(3))))
        for _ in range(rng.integers(0, 6)):
            driver.step()
    driver.run()
    assert num_cut > 0


def test_no_tokens_are_divided_among_requests_that_were_retracted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = make_sizes(
        page_size=4, num_pages=60, num_rows=17, max_context_len=120, max_chunk_tokens=8
    )
    driver = Driver(sizes, SchedulerArgs(schedule_conservativeness=0.0))
    num_divided = 0
    choose_rows = StepBuilder.choose_rows

    def watched(builder: StepBuilder) -> None:
        nonlocal num_divided
        if builder.retracted and builder._shared is not None:
            num_divided += 1
            assert set(builder._shared._needs) <= set(builder._prefilling)
        choose_rows(builder)

    monkeypatch.setattr(StepBuilder, "choose_rows", watched)
    rng = np.random.default_rng(1)
    for number in range(200):
        tokens = rng.integers(0, 50, int(rng.integers(4, 60))).tolist()
        driver.submit(generate(f"r{number}", tokens, int(rng.integers(20, 50))))
        for _ in range(rng.integers(0, 6)):
            driver.step()
    driver.run()
    assert num_divided > 0
