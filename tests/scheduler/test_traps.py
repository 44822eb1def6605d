"""Where serving engines went wrong before: one test for each trap a scheduler can fall into.

The numbers are those of a list of such defects; the ones left out concern sessions, or the memory
alone (`tests/mem_cache`). Trap 9, speculation past a stop or a limit, is held off by
`test_speculation.py`: `test_a_stop_token_among_accepted_drafts_ends_the_output_there` and
`test_no_more_tokens_than_asked_for`.
"""

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from sgl_jax.core.messages import AbortRequest, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import RankResult, StepHandle, StepPlan
from sgl_jax.scheduler.events import TakeOutputs
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.faults import FaultyExecutor, no_more_pages

# -- 1: a retract is not an end ---------------------------------------------------------------


def test_a_retract_ends_nothing_and_says_nothing() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", [1, 2, 3], 20))
    for _ in range(5):
        driver.step()
    driver.retract("a")
    assert driver.scheduler.handle(TakeOutputs()) is None
    assert not driver.scheduler.is_idle
    assert driver.scheduler.num_waiting == 1
    counters = driver.scheduler.counters()
    assert (counters["requests_finished"], counters["requests_retracted"]) == (0, 1)
    driver.run()
    driver.check_tokens("a")
    assert len(driver.tokens["a"]) == 20
    assert driver.scheduler.counters()["requests_finished"] == 1


# -- 3: lengths grow at launch ----------------------------------------------------------------


@pytest.mark.parametrize("unread", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("steps_before", range(1, 8))
def test_an_aborted_request_leaves_no_more_in_the_cache_than_was_written_and_read(
    unread: int, num_drafts: int, steps_before: int
) -> None:
    """Neither slots reserved, nor those of tokens sampled but unknown."""
    sizes = make_sizes(page_size=1, num_pages=100, max_chunk_tokens=4, max_draft_tokens=num_drafts)
    driver = Driver(sizes, max_unread=unread)
    prompt = list(range(10))
    driver.submit(generate("a", prompt, 30))
    for _ in range(steps_before):
        driver.step()
    lease = driver.scheduler._requests["a"].lease
    assert lease is not None
    committed = lease.kv_committed_len
    driver.abort("a")
    known = len(prompt) + len(driver.tokens["a"])
    assert driver.scheduler.memory_views()[0].cached_pages == min(committed, known)
    driver.submit(generate("b", prompt + driver.tokens["a"], 10))
    driver.run()
    driver.check_tokens("b")


# -- 8: a row is kept between chunks ----------------------------------------------------------


def test_a_prompt_in_chunks_keeps_its_row_while_others_come_and_go() -> None:
    driver = Driver(make_sizes(num_pages=100, num_rows=4, max_chunk_tokens=5))
    driver.submit(generate("long", list(range(60)), 3))
    driver.step()
    lease = driver.scheduler._requests["long"].lease
    assert lease is not None
    row = lease.row
    for i in range(10):
        driver.submit(generate(f"r{i}", [i], 2))
    while not driver.tokens["long"]:
        driver.step()
    chunks = [
        (plan.ranks[0].kv_starts[i], plan.ranks[0].q_lens[i])
        for plan in driver.plans
        for i in np.flatnonzero(plan.ranks[0].rows == row)
        if plan.ranks[0].kv_starts[i] < 60
    ]
    assert len(chunks) > 6
    ends = [start + count for start, count in chunks]
    assert [start for start, _ in chunks] == [0, *ends[:-1]]
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)


# -- 11: every end states its reason, once ----------------------------------------------------


def end_in_the_queue(driver: Driver) -> None:
    driver.abort("waits")


def end_by_disconnect(driver: Driver) -> None:
    driver.scheduler.handle(AbortRequest(rid="runs", message="the client went away"))


def end_by_the_queue_limit(driver: Driver) -> None:
    driver.submit(generate("third", [3], 5))


def end_by_waiting(driver: Driver) -> None:
    driver.tick(6.0)


def end_by_age(driver: Driver) -> None:
    driver.tick(100.0)


def end_by_a_lack_of_memory(driver: Driver) -> None:
    with no_more_pages(driver.scheduler.ranks[0].memory):
        while "runs" not in driver.finish:
            driver.step()


def end_by_an_error(driver: Driver) -> None:
    driver.executor = FaultyExecutor(driver.oracle, failing_launches={0})
    driver.step()


def end_by_shutdown(driver: Driver) -> None:
    driver.scheduler.handle(AbortRequest(abort_all=True, message="the engine was shut down"))


ENDS: list[tuple[Callable[[Driver], None], dict[str, tuple[int | None, str]]]] = [
    (end_in_the_queue, {"waits": (None, "aborted by the client")}),
    (end_by_disconnect, {"runs": (None, "the client went away")}),
    (end_by_the_queue_limit, {"third": (503, "the queue is full")}),
    (end_by_waiting, {"waits": (503, "waited longer than 5 s")}),
    (end_by_age, {"runs": (504, "within 50 s"), "waits": (504, "within 50 s")}),
    (end_by_a_lack_of_memory, {"runs": (500, "needs more KV memory than rank 0 can free")}),
    (end_by_an_error, {"runs": (500, "made to fail"), "waits": (500, "made to fail")}),
    (end_by_shutdown, {"runs": (None, "shut down"), "waits": (None, "shut down")}),
]


@pytest.mark.parametrize(("end", "reasons"), ENDS, ids=lambda part: getattr(part, "__name__", ""))
def test_every_end_before_its_time_states_its_reason_once(
    end: Callable[[Driver], None], reasons: dict[str, tuple[int | None, str]]
) -> None:
    """`Driver` fails on any output after the first end."""
    config = SchedulerArgs(
        max_queued_requests=1,
        waiting_timeout=5.0,
        request_timeout=50.0,
    )
    driver = Driver(make_sizes(num_rows=2), config)
    driver.tick(0.5)
    driver.submit(generate("runs", [1, 2, 3], 100))
    for _ in range(4):
        driver.step()
    driver.submit(generate("waits", [4, 5, 6], 5))
    end(driver)
    driver.collect()
    for rid, (status, words) in reasons.items():
        assert driver.finish[rid].type == "abort"
        assert driver.finish[rid].status_code == status
        assert words in driver.finish[rid].message
    early = set(driver.finish)
    driver.run()
    assert early == set(reasons)
    assert set(driver.finish) == set(driver.prompts)
    finished = driver.scheduler.counters()["requests_finished"]
    assert finished == driver.scheduler.counters()["requests_received"]


# -- 12: between chunks nothing is sampled ----------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_only_a_prompts_last_chunk_samples(chunk: int, overlap: bool) -> None:
    sizes = make_sizes(num_pages=100, max_chunk_tokens=chunk)
    driver = Driver(sizes, overlap=overlap)
    driver.submit(generate("a", list(range(23)), 6))
    driver.run()
    for plan in driver.plans:
        (rank,) = plan.ranks
        ends = rank.kv_starts + rank.q_lens
        assert rank.samples.tolist() == (ends >= 23).tolist()
    driver.check_tokens("a")
    assert len(driver.tokens["a"]) == 6


class TokensBetweenChunks:
    """An executor that answers tokens for rows that did not sample, as a careless one might."""

    def __init__(self, driver: Driver) -> None:
        self.oracle = driver.oracle

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.oracle.launch(plan), plan

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        inner, plan = handle
        results = self.oracle.result(inner)
        for result, rank in zip(results, plan.ranks, strict=True):
            result.tokens[~rank.samples] = 7
        return results


def test_what_is_answered_between_chunks_is_ignored() -> None:
    driver = Driver(make_sizes(num_pages=100, max_chunk_tokens=3))
    driver.executor = TokensBetweenChunks(driver)
    for i in range(3):
        driver.submit(generate(f"r{i}", list(range(i, i + 20)), 6))
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)


# -- 13: the token relay under small chunks and retracts --------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("unread", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_on_their_way_survive_small_chunks_and_retracts(
    chunk: int, interval: int, unread: int, num_drafts: int
) -> None:
    """Ranks of uneven load, so that each step is padded differently on each."""
    sizes = make_sizes(
        dp_size=3,
        page_size=4,
        num_pages=28,
        max_chunk_tokens=chunk,
        max_draft_tokens=num_drafts,
    )
    config = SchedulerArgs(
        test_retract=True,
        test_retract_interval=interval,
        schedule_conservativeness=0.0,
    )
    driver = Driver(sizes, config, max_unread=unread)
    for i in range(9):
        rank = (0, 0, 0, 0, 0, 1, 1, 1, 2)[i]
        driver.submit(generate(f"r{i}", [i, *range(i % 5 * 4)], 5 + i, dp_rank=rank))
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] > 5
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 5 + int(rid[1:])


# -- 14: a short rank keeps its trouble to itself ---------------------------------------------


def test_retract_on_a_short_rank_leaves_other_ranks_alone() -> None:
    sizes = make_sizes(dp_size=2, num_pages=12, page_size=4)
    driver = Driver(sizes, SchedulerArgs(schedule_conservativeness=0.0))
    driver.submit(generate("calm", [1, 2, 3], 30, dp_rank=1))
    for i in range(3):
        driver.submit(generate(f"busy{i}", list(range(i, i + 8)), 24, dp_rank=0))
    driver.run()
    assert driver.scheduler.ranks[0].num_retracted > 0
    assert driver.scheduler.ranks[1].num_retracted == 0
    for rid in driver.prompts:
        driver.check_tokens(rid)


# -- 16: what belongs to a request goes where it goes -----------------------------------------


def test_seeds_and_penalties_follow_their_own_request_from_rank_to_rank() -> None:
    """Every admission, after retracts too, on any rank and row. That the device applies them
    by row is shown in `tests/executor/test_model_executor.py` and `tests/layers/sampling`."""
    config = SchedulerArgs(
        test_retract=True, test_retract_interval=2, load_balance_method="round_robin"
    )
    driver = Driver(make_sizes(dp_size=3, num_pages=60, max_chunk_tokens=5), config)
    sampling = {
        f"r{i}": SamplingParams(
            max_new_tokens=10,
            temperature=0.5 + i,
            seed=None if i % 3 == 0 else 2**40 + i,
            frequency_penalty=i / 10,
            stop_token_ids=(40 + i,),
        )
        for i in range(8)
    }
    prompts = {rid: [int(rid[1:])] * 4 for rid in sampling}
    for rid, params in sampling.items():
        driver.submit(GenerateRequest(rid=rid, input_ids=prompts[rid], sampling=params))
    driver.run()
    seen: dict[str, set[int]] = {rid: set() for rid in sampling}
    for plan in driver.plans:
        for dp_rank, rank in enumerate(plan.ranks):
            for admission in rank.admissions:
                rid = f"r{int(admission.tokens[0])}"
                seed = sampling[rid].seed
                drawn = zlib.crc32(rid.encode(), 0)
                assert admission.seed == (drawn if seed is None else seed)
                assert admission.sampling == sampling[rid]
                assert admission.stop_token_ids == sampling[rid].stop_token_ids
                assert admission.prompt_len == 4
                known = [*prompts[rid], *driver.tokens[rid]]
                assert admission.tokens.tolist() == known[: len(admission.tokens)]
                seen[rid].add(dp_rank)
    assert any(len(ranks) > 1 for ranks in seen.values())
    assert all(seen.values())
