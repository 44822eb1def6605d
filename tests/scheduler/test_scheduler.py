"""The scheduler with an executor that checks what every fake page holds."""

import random

import msgspec
import pytest

from sgl_jax.core.messages import StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import FailAll, Flush, TakeOutputs
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.long import long_half


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_request_runs_to_its_length_limit(page_size: int, overlap: bool) -> None:
    driver = Driver(make_sizes(page_size=page_size, num_pages=40), overlap=overlap)
    driver.submit(generate("a", list(range(10, 31)), 9))
    driver.run()
    driver.check_tokens("a")
    assert len(driver.tokens["a"]) == 9
    assert driver.finish["a"].type == "length"


def test_a_request_stops_at_a_stop_token_and_drops_the_token_in_flight() -> None:
    driver = Driver(make_sizes())
    prompt = [1, 2, 3]
    expected = driver.oracle.expected_output(prompt, 20)
    stop_at = next(i for i in range(3, 20) if expected[i] not in expected[:i])
    driver.submit(generate("a", prompt, 20, stop_token_ids=(expected[stop_at],)))
    driver.run()
    assert driver.tokens["a"] == expected[: stop_at + 1]
    assert driver.finish["a"].type == "stop"
    assert driver.finish["a"].matched == expected[stop_at]


def test_min_new_tokens_postpones_a_stop() -> None:
    driver = Driver(make_sizes())
    expected = driver.oracle.expected_output([5], 6)
    driver.submit(generate("a", [5], 6, stop_token_ids=tuple(set(expected)), min_new_tokens=3))
    driver.run()
    assert driver.tokens["a"] == expected[:4]


def test_overlap_plans_the_next_step_before_the_last_was_read() -> None:
    driver = Driver(make_sizes(), overlap=True)
    driver.submit(generate("a", [1, 2], 4))
    driver.step()
    driver.step()
    assert len(driver.plans) == 2
    assert driver.plans[1].ranks[0].kv_starts.tolist() == [2]
    assert driver.tokens["a"] == driver.oracle.expected_output([1, 2], 1)


def test_long_prompts_are_prefilled_in_chunks_beside_decodes() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.submit(generate("short", [1], 30))
    driver.step()
    driver.submit(generate("long", list(range(40)), 2))
    driver.run()
    mixed = [p.ranks[0] for p in driver.plans if p.ranks[0].num_decode and len(p.ranks[0].rows) > 1]
    assert [int(plan.q_lens[1]) for plan in mixed[:5]] == [8, 8, 8, 8, 8]
    driver.check_tokens("short")
    driver.check_tokens("long")


def test_a_step_never_exceeds_its_token_limit() -> None:
    sizes = make_sizes(max_chunk_tokens=10, num_pages=100)
    driver = Driver(sizes, SchedulerArgs())
    for i in range(8):
        driver.submit(generate(f"r{i}", list(range(i, i + 20)), 5))
    driver.run()
    chunks = [int(p.q_lens[p.num_decode :].sum()) for (p,) in (s.ranks for s in driver.plans)]
    assert max(chunks) == 10
    assert 10 < max(plan.ranks[0].num_tokens for plan in driver.plans) <= sizes.max_step_tokens


def test_a_step_leaves_a_few_tokens_for_later_rather_than_pad_by_many() -> None:
    sizes = make_sizes(max_chunk_tokens=56)._replace(step_token_shapes=(8, 16, 64))
    driver = Driver(sizes, SchedulerArgs())
    driver.submit(generate("a", list(range(18)), 3))  # 16, then 2
    driver.submit(generate("b", list(range(20, 30)), 3))  # together 28: padded to 64, put off 12
    driver.run()
    assert [plan.ranks[0].num_tokens for plan in driver.plans[:2]] == [16, 12]
    for rid in ("a", "b"):
        driver.check_tokens(rid)


def test_a_step_is_not_trimmed_below_half_of_what_it_would_prefill() -> None:
    sizes = make_sizes(max_chunk_tokens=56)._replace(step_token_shapes=(8, 64))
    driver = Driver(sizes, SchedulerArgs())
    driver.submit(generate("a", list(range(30)), 3))
    driver.run()
    assert driver.plans[0].ranks[0].num_tokens == 30


def test_a_second_request_reuses_the_first_ones_prefix() -> None:
    driver = Driver(make_sizes())
    prompt = list(range(20))
    driver.submit(generate("a", prompt, 4))
    driver.run()
    driver.submit(generate("b", [*prompt, 40, 41], 4))
    driver.run()
    driver.check_tokens("b")
    assert driver.cached == {"a": 0, "b": 20}


def test_the_last_prompt_token_is_always_recomputed() -> None:
    driver = Driver(make_sizes())
    prompt = list(range(16))
    for rid in ("a", "b"):
        driver.submit(generate(rid, prompt, 2))
        driver.run()
    assert driver.cached["b"] == 12
    driver.check_tokens("b")


def test_without_the_radix_cache_nothing_is_kept() -> None:
    driver = Driver(make_sizes(), SchedulerArgs(disable_radix_cache=True))
    for rid in ("a", "b"):
        driver.submit(generate(rid, list(range(20)), 3))
        driver.run()
        driver.check_tokens(rid)
    assert driver.cached["b"] == 0
    view = driver.scheduler.memory_views()[0]
    assert view.free_pages == view.total_pages - 1


def test_short_of_pages_the_request_with_the_fewest_output_tokens_is_retracted() -> None:
    driver = Driver(
        make_sizes(num_pages=12, page_size=4),
        SchedulerArgs(schedule_conservativeness=0.0),
    )
    driver.submit(generate("old", list(range(8)), 28))
    for _ in range(6):
        driver.step()
    driver.submit(generate("young", list(range(20, 28)), 28))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters["requests_retracted"] > 0
    for rid in ("old", "young"):
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 28
    first_end = next(iter(driver.finish))
    assert first_end == "old"


def test_prefills_that_block_each_other_are_resolved_by_retract() -> None:
    sizes = make_sizes(num_pages=12, page_size=4, max_chunk_tokens=6)
    driver = Driver(sizes, SchedulerArgs(schedule_conservativeness=0.0))
    for i in range(4):
        driver.submit(generate(f"r{i}", [i] * 30, 8))
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert driver.finish[rid].type == "length"


@pytest.mark.parametrize("steps_before", range(12))
@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state_frees_everything(steps_before: int, overlap: bool) -> None:
    driver = Driver(make_sizes(num_rows=3), overlap=overlap)
    for i in range(4):  # two run, two wait
        driver.submit(generate(f"r{i}", list(range(i, i + 20)), 10))
    for _ in range(steps_before):
        driver.step()
    for i in range(4):
        driver.abort(f"r{i}")
        driver.scheduler.check_balance()
        driver.scheduler.audit()
    driver.run()
    assert {reason.type for reason in driver.finish.values()} <= {"abort", "length"}
    assert len(driver.finish) == 4
    for rid in driver.prompts:
        driver.check_tokens(rid)


def test_a_stop_string_found_by_the_front_trims_what_is_kept() -> None:
    driver = Driver(make_sizes(page_size=1, num_pages=64))
    prompt = [1, 2, 3]
    driver.submit(generate("a", prompt, 20))
    while len(driver.tokens["a"]) < 8:
        driver.step()
    driver.scheduler.handle(StopRequest(rid="a", num_output_tokens=5))
    driver.run()
    assert "a" not in driver.finish  # the frontend knows already
    assert driver.scheduler.memory_views()[0].cached_pages == len(prompt) + 5


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = Driver(make_sizes(num_pages=5, page_size=4))
    driver.submit(generate("a", list(range(10)), 7))
    assert driver.finish["a"].status_code == 400
    assert "10 prompt tokens and 7" in driver.finish["a"].message
    assert "16 tokens" in driver.finish["a"].message
    driver.submit(generate("b", list(range(10)), 6))
    driver.run()
    assert driver.finish["b"].type == "length"


def test_a_full_queue_refuses_with_503() -> None:
    """Beside those that may wait, as many are taken as may run, though none has started yet."""
    driver = Driver(make_sizes(num_rows=4, dp_size=2), SchedulerArgs(max_queued_requests=2))
    for i in range(9):
        driver.submit(generate(f"r{i}", [1], 2))
    assert {rid: end.status_code for rid, end in driver.finish.items()} == {"r8": 503}
    driver.run()


def test_a_repeated_request_id_is_refused() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", [1], 2))
    driver.scheduler.handle(generate("a", [2], 2))
    outputs = driver.scheduler.handle(TakeOutputs())
    assert outputs is not None
    assert outputs.outputs[0].finish.status_code == 400
    driver.run()


def test_flush_is_refused_while_requests_are_in_flight() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", list(range(9)), 2))
    driver.step()
    assert not driver.scheduler.handle(Flush())
    driver.run()
    assert driver.scheduler.memory_views()[0].cached_pages > 0
    assert driver.scheduler.handle(Flush())
    assert driver.scheduler.memory_views()[0].cached_pages == 0


def test_a_failed_device_ends_every_request_and_trusts_no_page() -> None:
    driver = Driver(make_sizes(num_rows=3))
    for i in range(4):
        driver.submit(generate(f"r{i}", list(range(12)), 5))
    driver.step()
    driver.in_flight.clear()
    driver.scheduler.handle(FailAll("the device is gone"))
    driver.collect()
    assert {reason.status_code for reason in driver.finish.values()} == {500}
    driver.check_idle()
    assert driver.scheduler.memory_views()[0].cached_pages == 0


def test_requests_spread_over_ranks_and_return_to_their_prefix() -> None:
    driver = Driver(make_sizes(dp_size=2))
    driver.submit(generate("a", list(range(16)), 3))
    driver.submit(generate("b", list(range(20, 36)), 3))
    driver.run()
    assert driver.dp_rank["a"] != driver.dp_rank["b"]
    driver.submit(generate("b2", [*range(20, 36), 1], 3))
    driver.run()
    assert driver.dp_rank["b2"] == driver.dp_rank["b"]


def test_round_robin_goes_around() -> None:
    driver = Driver(make_sizes(dp_size=3), SchedulerArgs(load_balance_method="round_robin"))
    for i in range(6):
        driver.submit(generate(f"r{i}", [i] * (5 if i == 1 else 2), 2))  # rank 1 costs the most
    driver.run()
    assert [driver.dp_rank[f"r{i}"] for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    driver = Driver(make_sizes(num_rows=2), SchedulerArgs(schedule_policy="lpm"))
    shared = list(range(16))
    driver.submit(generate("seed", shared, 2))
    driver.run()
    driver.submit(generate("cold", [40] * 8, 2))
    driver.submit(generate("warm", [*shared, 7], 2))
    driver.run()
    assert list(driver.finish) == ["seed", "warm", "cold"]


MATRIX = long_half((1, 2), (1, 4, 16), (False, True), (False, True), (3, 16))


@pytest.mark.parametrize(("dp_size", "page_size", "overlap", "radix", "chunk"), MATRIX)
def test_outputs_do_not_depend_on_how_they_were_scheduled(
    dp_size: int, page_size: int, overlap: bool, radix: bool, chunk: int
) -> None:
    """Random load in a small pool: evictions, retracts and aborts, the content checked."""
    rng = random.Random(f"{dp_size}{page_size}{overlap}{radix}{chunk}")
    sizes = make_sizes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=1 + 96 // page_size,
        max_chunk_tokens=chunk,
    )
    config = SchedulerArgs(disable_radix_cache=not radix, schedule_conservativeness=0.2)
    driver = Driver(sizes, config, overlap=overlap)
    shared_prefixes = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    for i in range(30):
        stem = rng.choice(shared_prefixes)[: rng.randrange(25)]
        prompt = stem + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        driver.submit(generate(f"r{i}", prompt, rng.randrange(1, 40)))
        for _ in range(rng.randrange(4)):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(f"r{rng.randrange(i + 1)}")
    driver.run()
    assert len(driver.finish) == 30
    for rid in driver.prompts:
        driver.check_tokens(rid)


def test_a_probe_is_beside_the_limit_of_the_queue() -> None:
    driver = Driver(make_sizes(num_rows=4, dp_size=1), SchedulerArgs(max_queued_requests=2))

    def submit(rid: str, *, is_probe: bool = False) -> None:
        driver.submit(msgspec.structs.replace(generate(rid, [1, 2], 4), is_probe=is_probe))

    for i in range(4):
        submit(f"r{i}")
    submit("probe", is_probe=True)
    submit("second probe", is_probe=True)
    for rid in ("r4", "r5"):  # the probe takes no place of theirs
        submit(rid)
    driver.run()
    ends = {rid: finish.status_code for rid, finish in driver.finish.items()}
    assert {rid for rid, status in ends.items() if status == 503} == {"second probe", "r5"}
    assert len(driver.tokens["probe"]) == 4
    submit("third probe", is_probe=True)
    driver.run()
    assert len(driver.tokens["third probe"]) == 4


@pytest.mark.parametrize(("num_end_tokens", "num_stops"), [(20, 0), (20, 16), (9, 8)])
def test_every_end_token_of_model_and_request_ends_it(num_end_tokens: int, num_stops: int) -> None:
    sizes = make_sizes()
    for last in (num_end_tokens - 1, num_end_tokens + num_stops - 1):
        # Ids beyond those that the model draws, and one that it draws.
        expected = Driver(sizes).oracle.expected_output([5], 9)
        ids = [10_000 + number for number in range(num_end_tokens + num_stops)]
        ids[last] = expected[-1]
        own, asked = tuple(ids[:num_end_tokens]), tuple(ids[num_end_tokens:])
        driver = Driver(sizes._replace(eos_token_ids=own))
        driver.submit(generate("a", [5], 40, stop_token_ids=asked))
        driver.run()
        assert driver.tokens["a"] == expected[: expected.index(expected[-1]) + 1]
        assert driver.finish["a"].type == "stop"
