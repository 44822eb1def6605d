"""The benchmark of scheduling: its reference, its clock, and ten of its loads."""

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling.__main__ import main
from benchmarks.scheduling.clients import Tail, closed_loop, draw, open_loop, requests, sessions
from benchmarks.scheduling.drawn_loads import drawn_load
from benchmarks.scheduling.loads import LOADS, SHORT_LOADS
from benchmarks.scheduling.reference import Reference
from benchmarks.scheduling.report import counts
from benchmarks.scheduling.run import compare, new_engine
from benchmarks.scheduling.simulation import Simulation
from benchmarks.scheduling.traffic import STOP_ID, Load, LoadRequest
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.events import PlanStep
from tests.support.long import long_but

COUNTS = Path(__file__).parent / "scheduling_counts.json"


def load(clients, **changes) -> Load:
    fields = {"seconds": 10.0, "pool_tokens": 512, "num_rows": 8, "chunk_tokens": 64} | changes
    return Load("one", "", lambda: clients, **fields)


def request(seed: int, prompt_len: int, output: int, **fields) -> LoadRequest:
    prompt = np.arange(prompt_len, dtype=np.int32) + 1000 * seed
    return LoadRequest("all", seed, prompt, output, **{"limit": 100} | fields)


def reference(**changes) -> Reference:
    return Reference(load([], **changes).engine_sizes())


def run_to_end(engine: Reference) -> tuple[list[int], list[int]]:
    """Steps without overlap: the prompt tokens of each, and the requests in order of their ends."""
    chunks, ended = [], []
    while (step := engine.plan(0.0)) is not None:
        chunks.append(sum(each.prefill_tokens for each in step.loads))
        ended += [number for number, _, is_end in engine.read(step, 0.0) if is_end]
    return chunks, ended


# -- the reference --------------------------------------------------------------------------


def test_prompt_tokens_go_to_the_oldest_first() -> None:
    engine = reference(chunk_tokens=8)
    engine.submit(0, request(0, 20, 1))
    engine.submit(1, request(1, 6, 1))
    first, second, third, fourth = (engine.plan(0.0) for _ in range(4))
    assert [each.loads[0].prefill_tokens for each in (first, second, third, fourth)] == [8, 8, 8, 2]
    assert third.started == [1]
    assert [(job.number, len(held)) for job, held in third.gains] == [(0, 2)]
    assert [output.number for output in engine.read(third, 0.0)] == [0]


def test_nothing_passes_the_head_of_the_queue() -> None:
    engine = reference(pool_tokens=64)
    for number, prompt_len in enumerate((30, 40, 8)):
        engine.submit(number, request(number, prompt_len, 4))
    assert engine.plan(0.0).started == [0]
    assert [job.number for job in engine.waiting] == [1, 2]


def test_the_youngest_is_retracted_and_becomes_the_head() -> None:
    engine = reference(pool_tokens=64)
    for number in range(3):
        engine.submit(number, request(number, 15, 20))
    engine.submit(3, request(3, 15, 1))
    chunks, ended = run_to_end(engine)
    # Of four pages, two requests may hold two each, and then one holds three.
    assert ended == [3, 0, 1, 2]
    assert engine.counts()["retracts"] == 2
    assert sum(chunks) == 4 * 15 + engine.counts()["recomputed"] + 2


def test_equal_pages_are_computed_once_and_the_least_recently_used_are_evicted() -> None:
    engine = reference(pool_tokens=96)
    assert run_to_end(with_request(engine, request(0, 40, 1))) == ([40], [0])
    assert run_to_end(with_request(engine, request(0, 40, 1))) == ([8], [0])
    assert run_to_end(with_request(engine, request(1, 40, 1))) == ([40], [0])
    assert run_to_end(with_request(engine, request(0, 40, 1))) == ([8], [0])
    # Of six pages, these five leave one: request 1's pages were used before those of 0.
    assert run_to_end(with_request(engine, request(2, 64, 1))) == ([64], [0])
    assert run_to_end(with_request(engine, request(0, 17, 1))) == ([1], [0])


def with_request(engine: Reference, added: LoadRequest) -> Reference:
    engine.submit(0, added)
    return engine


def test_ranks_are_chosen_by_their_pages_unless_pinned() -> None:
    engine = reference(pool_tokens=128, dp_size=2)
    engine.submit(0, request(0, 40, 9))
    engine.submit(1, request(1, 40, 9))
    engine.submit(2, request(2, 8, 9, dp_rank=1))
    engine.submit(3, request(3, 8, 9))
    assert engine.plan(0.0).started == [0, 1, 2, 3]
    running = [[job.number for job in rank.running] for rank in engine.ranks]
    assert running == [[0, 3], [1, 2]]


def test_outputs_end_by_stop_limit_and_abort_and_all_pages_return() -> None:
    engine = reference()
    engine.submit(0, request(0, 20, 5))
    engine.submit(1, request(1, 20, 50, limit=7))
    engine.submit(2, request(2, 20, 50))
    gained = [0, 0, 0]
    for _ in range(12):
        for number, num_tokens, _ in engine.read(engine.plan(0.0), 0.0):
            gained[number] += num_tokens
    assert gained == [5, 7, 12]
    engine.abort(2)
    assert engine.plan(0.0) is None
    assert engine.utilization == 0


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_pages_of_the_reference_balance(page_size: int, dp_size: int) -> None:
    made = requests("all", (1, 300), (1, 200), 256, prefixes=(3, 150), abort_after=120)
    busy = load(
        closed_loop(12, made, most=6),
        pool_tokens=1_024,
        page_size=page_size,
        dp_size=dp_size,
        seconds=1e9,
    )
    engine = Reference(busy.engine_sizes())
    simulation = Simulation(busy, engine)
    assert simulation.run().requests == 72
    assert engine.counts()["retracts"] > 0
    check_outputs(simulation)
    for rank in engine.ranks:
        assert not rank.running
        assert not any(rank.readers.values())
        assert rank.readers.keys() == rank.unread.keys()
        assert rank.num_available == 1_024 // page_size


def check_outputs(simulation: Simulation) -> None:
    """Each request has as many tokens as its load says."""
    for each in simulation.requests:
        own = each.request
        most = min(own.output_len, own.limit)
        expected = min(most, own.abort_after) if own.abort_after else most
        assert each.num_output == expected


# -- the scheduler under the same clock -----------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{}, {"max_draft_tokens": 3, "max_step_tokens": 64 + 4 * 8}], ids=["plain", "drafts"]
)
def test_outputs_of_ours_have_their_lengths(sizes: dict[str, int]) -> None:
    made = requests("all", (1, 100), (1, 90), 80)
    busy = load(closed_loop(12, made, most=4), seconds=1e9, sizes=sizes)
    simulation = Simulation(busy, new_engine(busy))
    assert simulation.run().requests == 48
    check_outputs(simulation)


def test_turns_of_a_session_begin_with_what_was_generated() -> None:
    made = requests("turn", 40, 30, 64)
    busy = load(sessions(1, made, turns=3), seconds=0.5)
    engine = new_engine(busy)
    simulation = Simulation(busy, engine)
    simulation.run()
    first, second = (each.request for each in simulation.requests[:2])
    assert second.prompt[:70].tolist() == first.tokens().tolist()
    assert first.tokens()[-1] == STOP_ID
    # All whole pages of the first turn are found; its last token has no KV.
    assert engine.scheduler.counters()["cached_tokens"] >= 64


def test_a_session_begins_anew_before_it_has_too_many_tokens() -> None:
    (client,) = sessions(1, requests("turn", 40, 30, 64), turns=5, most_tokens=150)
    prompts = [len(each.prompt) for each in islice(client.requests, 5)]
    assert prompts == [40, 110, 40, 110, 40]


def test_waiting_requests_that_fit_in_the_worst_case_are_counted_by_reason() -> None:
    engine = new_engine(load([]))
    tenant = Tenant(name="one", max_running=1)
    for rid in ("0", "1"):
        sampling = SamplingParams(max_new_tokens=40)
        message = GenerateRequest(rid=rid, input_ids=[5] * 40, sampling=sampling, tenant=tenant)
        engine.scheduler.handle(message)
    engine.worst_case.after(engine.scheduler.handle(PlanStep()))
    assert engine.worst_case.num_waiting == 1
    assert engine.worst_case.could_start == {"tenant": 1}


# -- loads ----------------------------------------------------------------------------------


def test_clients_are_the_same_each_time_and_seeds_are_unique() -> None:
    for each in LOADS.values():
        once, again = (
            [
                (client.start_s, own.seed, own.prompt.tolist(), own.output_len)
                for client in each.clients()[:3]
                for own in [next(client.requests)]
            ]
            for _ in range(2)
        )
        assert once == again
        seeds = [next(client.requests).seed for client in each.clients()]
        assert len(set(seeds)) == len(seeds), each.name


@pytest.mark.parametrize("seed", range(3))
def test_drawn_loads_are_the_same_each_time_and_run(seed: int) -> None:
    once, again = (replace(drawn_load(seed), seconds=0.3) for _ in range(2))
    assert once.about == again.about
    results = [
        asdict(Simulation(each, Reference(each.engine_sizes())).run()) for each in (once, again)
    ]
    assert results[0] == results[1]
    assert results[0]["steps"] > 0


def test_bursts_arrive_together_and_tails_are_bounded() -> None:
    clients = open_loop(40, requests("all", 5, 5), 10.0, burst=8)
    assert [len({c.start_s for c in clients[i : i + 8]}) for i in range(0, 40, 8)] == [1] * 5
    rng = np.random.default_rng(0)
    drawn = [draw(rng, Tail(50, 2.0, 400)) for _ in range(500)]
    assert min(drawn) >= 1
    assert max(drawn) == 400
    assert 30 < np.median(drawn) < 80


def test_there_are_forty_loads_of_all_kinds() -> None:
    assert len(LOADS) >= 40
    assert len(SHORT_LOADS) == 10
    assert {each.page_size for each in LOADS.values()} == {1, 16, 128}
    assert {each.dp_size for each in LOADS.values()} == {1, 2, 8}
    pools = [each.pool_tokens for each in LOADS.values()]
    assert (min(pools), max(pools)) == (2_048, 1_048_576)


SHORT_BY_DEFAULT = ("aborts-16", "preempted-stream", "shares", "full-rank-16")


@pytest.mark.parametrize("name", long_but(SHORT_LOADS, *SHORT_BY_DEFAULT))
def test_short_loads_have_their_exact_counts(name: str) -> None:
    """Update the file after a change of policy: `python -m benchmarks.scheduling --help`."""
    comparison = compare(SHORT_LOADS[name])
    assert not comparison.is_worse or LOADS[name].reason, (comparison.speed, comparison.wait)
    assert counts({name: comparison})[name] == json.loads(COUNTS.read_text())[name]


def test_the_command_prints_tables_and_writes_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADS, "light", replace(LOADS["light"], seconds=0.5))
    file, page = tmp_path / "figures.json", tmp_path / "table.md"
    assert main(["--loads", "light", "--json", str(file), "--markdown", str(page)]) == 0
    assert "| light | 1.00 | 1.00 |" in page.read_text()
    printed = capsys.readouterr().out
    assert "served worse than by a simple scheduler:\nnone" in printed
    figures = json.loads(file.read_text())["light"]
    assert figures["ours"]["steps"] == figures["reference"]["steps"] > 0
    assert main(["--loads", "light", "--against", str(file)]) == 0
    assert f"ours / ours in {file}" in capsys.readouterr().out
    assert main(["--list"]) == 0
    assert "lockstep" in capsys.readouterr().out
