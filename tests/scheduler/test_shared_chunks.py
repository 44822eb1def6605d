"""The prompt tokens of a step are shared by long and short prompts, and by tenants."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.core.step_plan import StepPlan
from tests.scheduler.driver import Driver, generate, make_sizes

LONG, SHORT, CHUNK = 4000, 8, 32
MOST_SLOWER = 1.35


def make_driver(
    *,
    chunk: int = CHUNK,
    page_size: int = 16,
    args: SchedulerArgs | None = None,
    num_tokens: int = 20_000,
    num_rows: int = 33,
    max_scored: int | None = None,
    dp_size: int = 1,
) -> Driver:
    sizes = make_sizes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=num_tokens // page_size + 1,
        num_rows=num_rows,
        max_context_len=max(LONG, 100 * chunk) + page_size,
        max_chunk_tokens=chunk,
        max_prompt_logprob_tokens=max_scored,
    )
    return Driver(sizes, args, overlap=False)


def prompt(number: int, length: int) -> list[int]:
    """Tokens of `length`, a prefix of no other number's."""
    return np.random.default_rng(number).integers(0, 50, length).tolist()


def steps_to_first_tokens(driver: Driver, most_steps: int = 20_000) -> dict[str, int]:
    """Step until every request has a token; return the steps that each took."""
    steps: dict[str, int] = {}
    for number in range(1, most_steps):
        driver.step()
        for rid in driver.prompts:
            if driver.tokens[rid]:
                steps.setdefault(rid, number)
        if len(steps) == len(driver.prompts):
            return steps
    raise AssertionError(f"{driver.prompts.keys() - steps.keys()} got no token")


def run_flood(driver: Driver, length: int, every: int) -> tuple[int, dict[str, int], int]:
    """Run a prompt `long` and short ones of `length` tokens, one every `every` steps, until it has
    a token: its steps, the steps of each short one, and all prompt tokens computed."""
    submitted: dict[str, int] = {}
    waits: dict[str, int] = {}
    step = 0
    while not driver.tokens["long"]:
        if step % every == 0:
            submitted[f"s{step}"] = step
            driver.submit(generate(f"s{step}", prompt(1000 + step, length), 1))
        driver.step()
        step += 1
        for rid, start in submitted.items():
            if driver.tokens[rid]:
                waits.setdefault(rid, step - start)
    num_tokens = sum(count_chunks(plan) for plan in driver.plans)
    return step, waits, num_tokens


def count_chunks(plan: StepPlan) -> int:
    return sum(int(rank.q_lens[rank.num_decode :].sum()) for rank in plan.ranks)


def test_a_short_prompt_starts_beside_a_long_one() -> None:
    driver = make_driver()
    driver.submit(generate("long", prompt(0, LONG), 1))
    driver.step()
    driver.submit(generate("short", prompt(1, SHORT), 4))
    steps = steps_to_first_tokens(driver)
    assert steps["short"] == 1
    assert steps["long"] <= LONG // CHUNK + 1
    driver.check_tokens("long")
    driver.check_tokens("short")


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("chunk", [8, 16, 32, 128, 512])
def test_a_flood_of_short_prompts_takes_a_quarter_of_a_long_one(chunk: int, page_size: int) -> None:
    length = chunk // 4
    driver = make_driver(chunk=chunk, page_size=page_size, num_tokens=200 * chunk + 64 * page_size)
    driver.submit(generate("long", prompt(0, 100 * chunk), 1))
    steps, waits, num_tokens = run_flood(driver, length, every=1)
    assert steps <= MOST_SLOWER * 100
    assert len(waits) >= steps - 3
    assert max(waits.values()) <= 3
    assert num_tokens >= 0.99 * chunk * steps
    driver.run()


@pytest.mark.parametrize("num_alike", [2, 5])
def test_more_short_prompts_than_their_part_holds_delay_the_long_one_no_further(
    num_alike: int,
) -> None:
    driver = make_driver(num_tokens=8_000)
    driver.submit(generate("long", prompt(0, LONG), 1))
    number = 0
    while not driver.tokens["long"]:
        for _ in range(num_alike):
            number += 1
            if driver.scheduler.num_waiting < 64:
                driver.submit(generate(f"s{number}", prompt(number, SHORT), 2))
        driver.step()
    assert driver.scheduler._steps <= MOST_SLOWER * LONG / CHUNK + 1
    driver.run()


def test_one_of_equal_long_prompts_is_computed_at_a_time() -> None:
    driver = make_driver()
    for i in range(4):
        driver.submit(generate(f"r{i}", prompt(i, 1000), 1))
    steps = steps_to_first_tokens(driver)
    assert [steps[f"r{i}"] for i in range(4)] == [32, 63, 94, 125]


def test_a_short_prompt_waits_for_none_of_several_long_ones() -> None:
    driver = make_driver()
    for i in range(4):
        driver.submit(generate(f"r{i}", prompt(i, 1000), 1))
    driver.step()
    driver.submit(generate("short", prompt(9, SHORT), 1))
    assert steps_to_first_tokens(driver)["short"] == 1


def test_the_prompt_with_the_fewest_tokens_left_comes_first() -> None:
    driver = make_driver(page_size=1)
    driver.submit(generate("long", prompt(0, LONG), 1))
    driver.step()
    driver.submit(generate("middle", prompt(1, 400), 1))
    for _ in range(3):
        driver.step()
    driver.submit(generate("short", prompt(2, SHORT), 1))
    steps = steps_to_first_tokens(driver)
    assert steps["short"] == 1
    assert steps["middle"] == 1 + 400 // 8 - 3


def test_prompts_with_too_few_tokens_for_each_other_start_only_to_compute() -> None:
    """Requests that would get no token of the step hold no memory."""
    driver = make_driver()
    driver.submit(generate("long", prompt(0, LONG), 1))
    driver.step()
    for i in range(20):
        driver.submit(generate(f"s{i}", prompt(1 + i, SHORT), 1))
    driver.step()
    plan = driver.plans[-1].ranks[0]
    assert len(driver.scheduler.ranks[0].running) == 1
    assert len(plan.rows) == 3
    assert driver.scheduler.num_waiting == 18
    assert {reason.kind for _, reason in driver.scheduler.waiting_for(18)} == {"step"}


def test_a_prompt_starts_on_no_rank_where_it_is_too_long() -> None:
    driver = make_driver(dp_size=2)
    driver.submit(generate("long", prompt(0, LONG), 1, dp_rank=0))
    driver.submit(generate("middle", prompt(1, 400), 1, dp_rank=1))
    driver.step()
    driver.submit(generate("shorter", prompt(2, 200), 1))
    for _ in range(3):
        driver.step()
        running = driver.scheduler.ranks[1].running
        assert [running.columns.rids[row] for row in running.active.tolist()] == ["middle"]
    driver.run()


def test_no_prompt_waits_for_the_prefix_of_one_that_gets_no_tokens() -> None:
    driver = make_driver()
    driver.submit(generate("long", prompt(0, LONG), 1))
    driver.step()
    driver.submit(generate("started", prompt(1, 100), 1))
    driver.step()
    driver.submit(generate("next", prompt(2, 60), 1))
    driver.step()  # the short part is made up for
    driver.step()
    assert chunks_of(driver).keys() == {"long", "next"}
    driver.submit(generate("follows", prompt(1, 48) + prompt(3, 8), 1))
    driver.step()
    driver.step()
    assert "follows" in chunks_of(driver)
    driver.run()
    driver.check_tokens("follows")


def test_priorities_are_strict_in_both_parts() -> None:
    driver = make_driver(args=SchedulerArgs(enable_priority_scheduling=True))
    driver.submit(generate("long", prompt(0, LONG), 1, priority=1))
    driver.step()
    driver.submit(generate("lower", prompt(1, SHORT), 1, priority=0))
    driver.submit(generate("equal", prompt(2, SHORT), 1, priority=1))
    driver.submit(generate("higher", prompt(3, 100), 1, priority=2))
    steps = steps_to_first_tokens(driver)
    assert steps["higher"] == 4
    assert steps["equal"] <= 4
    assert steps["lower"] >= steps["long"]


def test_scored_short_prompts_leave_a_scored_long_one_most_of_the_scores() -> None:
    driver = make_driver(max_scored=8)
    scored = {"logprob_start_len": 0, "return_logprob": True}
    driver.submit(generate("long", prompt(0, 800), 1, **scored))
    driver.submit(generate("unscored", prompt(1, LONG), 1))
    number = 1
    while not driver.tokens["long"]:
        number += 1
        driver.submit(generate(f"s{number}", prompt(number, SHORT), 1, **scored))
        driver.step()
    assert driver.scheduler._steps <= MOST_SLOWER * 100 + 2
    assert sum(bool(driver.tokens[f"s{i}"]) for i in range(2, number)) > 20
    for i in range(2, number + 1):
        driver.abort(f"s{i}")
    driver.run()


# -- tenants ------------------------------------------------------------------------------------


def of_tenant(name: str, rid: str, length: int, weight: float = 1.0) -> GenerateRequest:
    number = len(rid) * 1000 + sum(map(ord, rid))
    tenant = Tenant(name=name, weight=weight)
    return generate(rid, prompt(number, length), 1, tenant=tenant)


def chunks_of(driver: Driver) -> dict[str, int]:
    """Prompt tokens in the last step, by the request's id."""
    plan, rank = driver.plans[-1].ranks[0], driver.scheduler.ranks[0]
    rids = [rank.columns.rids[row] for row in plan.rows.tolist()]
    return dict(zip(rids, plan.q_lens.tolist(), strict=True))


def fair_driver(**settings: Any) -> Driver:
    return make_driver(args=SchedulerArgs(fair_share="tokens"), **settings)


def test_tenants_share_the_prompt_tokens_of_a_step() -> None:
    driver = fair_driver()
    driver.submit(of_tenant("a", "first", LONG))
    driver.step()
    driver.submit(of_tenant("b", "second", LONG))
    for _ in range(100):
        driver.step()
        assert chunks_of(driver) == {"first": CHUNK // 2, "second": CHUNK // 2}
    driver.run()


def test_a_tenants_weight_is_its_share_of_a_step() -> None:
    driver = fair_driver()
    driver.submit(of_tenant("a", "first", LONG, weight=3.0))
    driver.step()
    driver.submit(of_tenant("b", "second", LONG))
    for _ in range(20):
        driver.step()
        assert chunks_of(driver) == {"first": 24, "second": 8}
    driver.run()


def test_a_tenants_short_prompts_take_nothing_of_anothers_share() -> None:
    driver = fair_driver()
    driver.submit(of_tenant("a", "first", LONG))
    driver.submit(of_tenant("b", "second", LONG))
    for number in range(60):
        driver.submit(of_tenant("a", f"s{number}", SHORT))
        driver.step()
        if number > 2:
            assert chunks_of(driver)["second"] == CHUNK // 2
    driver.run()


def test_few_tenants_share_a_step_and_others_take_no_memory() -> None:
    driver = fair_driver(num_tokens=40_000)
    for name in "abcdefgh":
        driver.submit(of_tenant(name, name, LONG))
    counts: Counter[str] = Counter()
    for step in range(20):
        driver.step()
        assert driver.scheduler.num_running <= 5  # four, and one by the short part
        assert sum(chunks_of(driver).values()) == CHUNK
        counts.update(chunks_of(driver) if step >= 18 else {})
    assert min(counts.values()) >= CHUNK // 8
    driver.run()


def test_a_tenants_own_prompts_are_computed_one_after_another() -> None:
    driver = fair_driver()
    for rid in ("first", "second"):
        driver.submit(of_tenant("a", rid, 1000))
    driver.submit(of_tenant("b", "third", 1000))
    steps = steps_to_first_tokens(driver)
    assert steps["first"] in (62, 63)
    assert steps["third"] in (62, 63)
    assert steps["second"] in (94, 95)


def test_without_shares_tenants_are_computed_by_age() -> None:
    driver = make_driver()
    driver.submit(of_tenant("a", "first", 1000))
    driver.submit(of_tenant("b", "second", 1000))
    steps = steps_to_first_tokens(driver)
    assert steps == {"first": 32, "second": 63}


def test_nothing_waits_for_a_less_important_prompt_that_gets_no_tokens() -> None:
    """Two important prompts share the steps of rank 0; rank 1 has tokens for the other request."""
    driver = make_driver(args=SchedulerArgs(enable_priority_scheduling=True), dp_size=2)
    driver.submit(generate("low", prompt(0, 1000), 2, dp_rank=0))
    driver.step()
    for number in (1, 2):
        driver.submit(generate(f"high {number}", prompt(number, 1000), 2, priority=8, dp_rank=0))
    driver.step()
    driver.step()
    driver.submit(generate("alike", [*prompt(0, 1000), 7], 2))
    driver.step()
    assert driver.scheduler._requests["alike"].lease is not None
    driver.run()
    assert driver.dp_rank["alike"] == 1


@pytest.mark.parametrize(
    ("fair_share", "names", "most"),
    [
        ("tokens", ("reader", "flooder"), -(-CHUNK // 8)),
        ("tokens", ("reader", "reader"), CHUNK),
        ("off", ("reader", "flooder"), CHUNK),
    ],
)
def test_prompts_of_a_tenant_take_an_eighth_of_a_step_while_another_decodes(
    fair_share: str, names: tuple[str, str], most: int
) -> None:
    driver = make_driver(args=SchedulerArgs(fair_share=fair_share))
    reader, flooder = (Tenant(name=name) for name in names)
    driver.submit(generate("reader", prompt(0, SHORT), 20, tenant=reader))
    driver.step()
    driver.submit(generate("flooder", prompt(1, LONG), 1, tenant=flooder))
    for _ in range(15):
        driver.step()
    # The first step after the prompt has arrived does not share yet: it was planned before.
    assert {count_chunks(plan) for plan in driver.plans[2:]} == {most}
    driver.run()
    assert count_chunks(driver.plans[-3]) == CHUNK  # no one decodes
    for rid in ("reader", "flooder"):
        driver.check_tokens(rid)


def test_prompts_of_another_rank_take_an_eighth_of_a_step_too() -> None:
    """A step ends when its slowest rank has ended."""
    driver = make_driver(args=SchedulerArgs(fair_share="tokens"), dp_size=2)
    driver.submit(generate("reader", prompt(0, SHORT), 20, tenant=Tenant(name="a"), dp_rank=0))
    driver.step()
    driver.submit(generate("flooder", prompt(1, LONG), 1, tenant=Tenant(name="b"), dp_rank=1))
    for _ in range(15):
        driver.step()
    assert {count_chunks(plan) for plan in driver.plans[2:]} == {-(-CHUNK // 8)}
