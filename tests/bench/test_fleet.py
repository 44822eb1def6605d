"""A fleet of engines behind a router, on a logical clock."""

import json
import multiprocessing

import numpy as np
import pytest

from sgl_jax.bench.fleet.command import main
from sgl_jax.bench.fleet.engine import BURST_STEPS, FleetEngine, fleet_sizes
from sgl_jax.bench.fleet.policies import POLICIES, RouterView
from sgl_jax.bench.fleet.report import Target, run_values
from sgl_jax.bench.fleet.run import FleetRouter, run_fleet
from sgl_jax.bench.fleet.traffic import Traffic
from sgl_jax.bench.fleet.workers import EngineGroup, FleetShape, Interval, Workers
from sgl_jax.bench.trace.reading import VOCAB_SIZE, prompt_tokens, read_trace
from sgl_jax.bench.trace.step_time import LinearStepTime
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.eviction.ghost_pages import PrefixHasher
from tests.bench.traced import EXCERPT, request
from tests.support.long import long_but

PAGE_SIZE = 128
# Without a cost for each KV token: a burst has the mean of its steps.
STEPS = LinearStepTime(10.0, 20.0, 30.0, 0.0).seconds


@pytest.fixture(scope="module")
def excerpt():
    return read_trace(EXCERPT, 150)


def sizes_for(trace, *, num_tokens=400_000, burst_steps=BURST_STEPS):
    sizes = EngineSizes(
        dp_size=1,
        page_size=PAGE_SIZE,
        pool_pages=(1 + num_tokens // PAGE_SIZE,),
        num_rows=17,
        max_context_len=max(r.input_len + r.output_len for r in trace),
        max_step_tokens=2048 + 16,
        max_prompt_logprob_tokens=128,
        vocab_size=VOCAB_SIZE,
    )
    return fleet_sizes(sizes, burst_steps)


def engine_of(trace, *, logs_blocks=False, **sizes):
    args = SchedulerArgs(check_memory="busy")
    return FleetEngine(0, sizes_for(trace, **sizes), args, STEPS, logs_blocks=logs_blocks)


def shape_of(trace, num_engines, copies, **sizes):
    args = SchedulerArgs(max_queued_requests=100_000, check_memory="busy")
    return FleetShape(num_engines, sizes_for(trace, **sizes), args, STEPS, trace, copies, 1.0)


def serve(engine, traffic):
    for each in traffic:
        engine.submit(each)
    engine.run_until(float("inf"))
    engine.audit()
    return sorted(engine.take_served())


def shared_blocks(trace, one, other):
    return len({*trace[one].block_ids} & {*trace[other].block_ids})


# -- traffic --------------------------------------------------------------------------------------


def test_copies_share_the_system_prompt_alone(excerpt):
    traffic = Traffic(excerpt, 3)
    assert len(traffic) == 3 * len(excerpt)
    requests = list(traffic)
    assert [r.number for r in requests] == list(range(len(traffic)))
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    firsts = {r.traced.block_ids[0] for r in requests}
    assert firsts == {excerpt[0].block_ids[0]}
    recorded = {id for each in excerpt for id in each.block_ids}
    assert len({id for r in requests for id in r.traced.block_ids}) == 3 * len(recorded) - 2


def test_one_copy_is_the_record(excerpt):
    renumbered = [r.traced for r in Traffic(excerpt, 1)]
    assert [r.input_len for r in renumbered] == [r.input_len for r in excerpt]
    for one, other in ((0, 1), (1, 30), (3, 100)):
        assert shared_blocks(renumbered, one, other) == shared_blocks(excerpt, one, other) > 0
    faster = Traffic(excerpt, 1, speedup=4.0)
    assert np.allclose(faster.arrivals_s * 4, Traffic(excerpt, 1).arrivals_s)


# -- one engine -----------------------------------------------------------------------------------


@pytest.mark.long
def test_bursts_of_decode_steps_change_no_figure(excerpt):
    traffic = Traffic(excerpt, 1, speedup=0.3)
    one_by_one, in_bursts = engine_of(excerpt, burst_steps=1), engine_of(excerpt)
    wanted, got = serve(one_by_one, traffic), serve(in_bursts, traffic)
    assert [w.output_tokens for w in wanted] == [r.output_len for r in excerpt]
    for w, g in zip(wanted, got, strict=True):
        assert g._replace(first_token_s=0, end_s=0) == w._replace(first_token_s=0, end_s=0)
        assert g.first_token_s == pytest.approx(w.first_token_s, abs=1e-6)
        assert g.end_s == pytest.approx(w.end_s, abs=1e-6)
    assert in_bursts.num_steps == one_by_one.num_steps == one_by_one.num_plans
    assert in_bursts.num_plans < one_by_one.num_plans / 4


@pytest.mark.long
def test_bursts_change_little_when_memory_is_short(excerpt):
    """Engines with five to seven times the work that they can do, which retract requests.

    A burst takes its pages earlier, so some requests start in another order. One run's time then
    changes by up to two percent either way; that of several stays.
    """
    busy_s, waits_s, cached_tokens = np.zeros(2), np.zeros(2), np.zeros(2)
    for speedup in (3.5, 3.8, 4.0, 4.2, 4.5):
        traffic = Traffic(excerpt, 1, speedup=speedup)
        outputs = []
        for kind, burst_steps in enumerate((1, BURST_STEPS)):
            engine = engine_of(excerpt, burst_steps=burst_steps, num_tokens=130_000)
            served = serve(engine, traffic)
            outputs.append([each.output_tokens for each in served])
            busy_s[kind] += engine.busy_s
            waits_s[kind] += sum(each.first_token_s for each in served) - traffic.arrivals_s.sum()
            cached_tokens[kind] += sum(each.cached_tokens for each in served)
        assert outputs[0] == outputs[1]
    assert cached_tokens[1] == pytest.approx(cached_tokens[0], rel=0.01)
    assert waits_s[1] == pytest.approx(waits_s[0], rel=0.05)
    assert busy_s[1] == pytest.approx(busy_s[0], rel=0.01)


def test_an_arrival_ends_a_burst_at_the_next_step():
    trace = [request(0, 1, output_len=400), request(0, 2, output_len=2, arrival_ms=1000)]
    first, second = serve(engine_of(trace), Traffic(trace, 1))
    prompt_s = 0.010 + 512 * 20e-6  # the first block is cached
    assert second.first_token_s == pytest.approx(1.0 + prompt_s, abs=0.011)
    assert second.first_token_s < 1.1 < first.end_s
    assert second.cached_tokens == 512


def test_what_no_engine_can_hold_is_refused():
    trace = [request(*range(9), output_len=400), request(0, output_len=3, arrival_ms=5)]
    engine = engine_of(trace, num_tokens=2048)
    refused, served = serve(engine, Traffic(trace, 1))
    assert refused.is_refused
    assert (served.is_refused, served.output_tokens) == (False, 3)


# -- policies -------------------------------------------------------------------------------------


def policy_of(name, num_engines):
    view = RouterView(num_engines)
    return view, POLICIES[name](view, PAGE_SIZE)


def fleet_requests(*traced):
    return list(Traffic(traced, 1))


def test_round_robin_takes_each_in_turn(excerpt):
    _, policy = policy_of("round_robin", 4)
    assert [policy.choose(r)[0] for r in list(Traffic(excerpt, 1))[:6]] == [0, 1, 2, 3, 0, 1]


def test_least_load_heeds_what_ended(excerpt):
    view, policy = policy_of("least_load", 3)
    requests = list(Traffic(excerpt, 1))
    for each in requests[:3]:
        view.record_sent(each.number, policy.choose(each)[0], 100)
    assert view.in_flight.tolist() == [1, 1, 1]
    view.record_first_token(1)
    view.record_end(1)
    assert policy.choose(requests[3])[0] == 1
    assert view.waiting_tokens.tolist() == [100, 0, 100]


def test_a_conversation_stays_where_it_began(excerpt):
    _, policy = policy_of("sticky", 50)
    requests = list(Traffic(excerpt, 2))
    engines = {}
    for each in requests:
        engine, _ = policy.choose(each)
        assert engines.setdefault(each.traced.block_ids[1], engine) == engine
    assert len(set(engines.values())) > 40


def test_cache_aware_follows_a_long_prefix_until_engines_are_out_of_balance():
    view, policy = policy_of("cache_aware", 4)
    shared = range(1, 9)
    first, same, other = fleet_requests(
        request(0, *shared), request(0, *shared, 20), request(0, *range(30, 38))
    )
    home, num_matched = policy.choose(first)
    view.record_sent(first.number, home, 0)
    assert num_matched == 0
    assert policy.choose(same) == (home, 9 * 512)
    # One of nine blocks is below the threshold: an engine without requests gets it.
    elsewhere, num_matched = policy.choose(other)
    assert (elsewhere != home, num_matched) == (True, 0)
    for number in range(100, 164):
        view.record_sent(number, home, 0)
    assert policy.choose(same)[0] != home


def test_prefix_aware_finds_the_engine_by_its_events():
    trace = [request(*range(6), output_len=200), request(*range(5), 9, output_len=2)]
    first, same = fleet_requests(*trace)
    engine = engine_of(trace, logs_blocks=True)
    engine.submit(first)
    engine.run_until(float("inf"))
    view, policy = policy_of("prefix_aware", 3)
    for event in engine.take_block_events():
        policy.stored(1, event.hashes.tolist())
    assert policy.choose(same) == (1, 5 * 512)
    engine.submit(same._replace(arrival_s=100.0))
    engine.run_until(float("inf"))
    assert [served.cached_tokens for served in engine.take_served()] == [0, 5 * 512]
    # With more to compute there than the prefix saves, another engine is nearer.
    view.record_sent(50, 1, 6 * 512)
    assert policy.choose(same)[0] != 1


def pages_of(fleet_request):
    tokens = prompt_tokens(fleet_request.traced)
    return PrefixHasher(PAGE_SIZE).hashes(tokens).tolist()


def test_prefix_aware_forgets_what_is_evicted():
    _, policy = policy_of("prefix_aware", 40)
    (same,) = fleet_requests(request(*range(6), 7))
    pages = pages_of(same)
    for engine in (0, 3):
        policy.stored(engine, pages)
    policy.removed(3, pages[8:])
    assert policy.choose(same) == (0, (len(pages) - 1) * PAGE_SIZE)
    policy.removed(0, pages)
    assert policy.choose(same) == (3, 8 * PAGE_SIZE)
    policy.removed(3, pages[:8])
    assert policy.choose(same)[1] == 0


def test_prefix_aware_finds_the_least_loaded_of_many_holders():
    view, policy = policy_of("prefix_aware", 1000)
    (same,) = fleet_requests(request(*range(6)))
    for engine in range(100, 140):
        policy.stored(engine, pages_of(same))
        view.record_sent(engine, engine, 1000 + engine % 7)
    assert policy.choose(same)[0] == 105


# -- the fleet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", long_but(POLICIES, "cache_aware"))
def test_all_requests_are_served(policy, excerpt):
    shape = shape_of(excerpt[:60], num_engines=3, copies=2, num_tokens=200_000)
    run = run_fleet(policy, shape, num_processes=1)
    assert not run.is_refused.any()
    assert (run.first_token_s > 0).all()
    assert (run.end_s >= run.first_token_s).all()
    assert set(run.engines.tolist()) == {0, 1, 2}
    assert 0 < run.cached_tokens.sum() < run.prompt_tokens.sum()
    values = run_values(run, Target(5.0, 0.1))
    seconds = run.arrivals_s[-1]
    assert values["goodput"] * seconds == pytest.approx(values["good_share"] * 120)
    assert 0 < values["busy_mean"] <= values["busy_max"] <= 1


@pytest.mark.long
def test_figures_do_not_depend_on_the_number_of_processes(excerpt):
    shape = shape_of(excerpt[:60], num_engines=4, copies=2, num_tokens=100_000)
    one, two = (run_fleet("prefix_aware", shape, num) for num in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)  # type: ignore[arg-type]


def test_an_events_index_holds_just_the_cached_pages(excerpt):
    shape = shape_of(excerpt, num_engines=1, copies=1, num_tokens=60_000)
    group = EngineGroup(shape, True, 0, 1)
    numbers = list(range(40))
    report = group.run(Interval(2000.0, numbers, [0] * 40))
    assert len(report.served) == 40
    held: set[int] = set()
    for event in report.events:
        pages = set(event.page_hashes)
        assert len(pages) == len(event.page_hashes)
        if event.is_stored:
            assert not pages & held
            held |= pages
        else:
            assert pages <= held
            held -= pages
    assert any(not event.is_stored for event in report.events)
    (total,) = group.totals()
    assert len(held) == total.cached_pages


def test_the_routers_counts_return_to_zero(excerpt):
    shape = shape_of(excerpt, num_engines=2, copies=1)
    group, router = EngineGroup(shape, True, 0, 1), FleetRouter("prefix_aware", shape)
    traffic = Traffic(excerpt, 1)
    interval = router.route(traffic, 0, 30, 100.0)
    assert router.view.in_flight.sum() == 30
    assert router.view.waiting_tokens.sum() > 0
    router.take(group.run(interval))
    router.take(group.run(Interval(10_000.0, [], [])))
    assert not router.view.in_flight.any()
    assert not router.view.waiting_tokens.any()


def test_a_failed_process_ends_the_run(excerpt):
    shape = shape_of(excerpt[:5], num_engines=1, copies=1)
    broken = shape._replace(sizes=shape.sizes._replace(max_step_tokens=8))
    with pytest.raises(ValueError, match="a step"):
        run_fleet("sticky", broken, 1)


def run_interval(workers, end_s):
    workers.send(Interval(end_s, [], []))
    workers.receive()


def test_a_killed_process_ends_the_run(excerpt):
    shape = shape_of(excerpt[:5], num_engines=1, copies=1)
    workers = Workers(shape, False, 1)
    try:
        run_interval(workers, 0.05)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        with pytest.raises(RuntimeError, match="terminated abruptly"):
            run_interval(workers, 0.1)
    finally:
        workers.close()


# -- the command ----------------------------------------------------------------------------------

SHORT = [str(EXCERPT), "--num-requests", "20", "--num-engines", "2", "--copies", "2"]


@pytest.mark.long
def test_the_command_prints_a_line_for_each_policy(capsys, tmp_path):
    plot = tmp_path / "fleet.svg"
    assert main([*SHORT, "--policies", "sticky,prefix_aware", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40 requests to 2 engines of 1,536,000 KV tokens"
    assert [line.split()[0] for line in lines[6:8]] == ["sticky", "prefix_aware"]
    assert "first token" in plot.read_text()


def test_the_command_writes_values(capsys):
    assert main([*SHORT, "--policies", "least_load", "--json", "--processes", "1"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["policies"]["least_load"]["requests"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "sticky,best"], "got best"),
        (["--num-engines", "0"], "--num-engines must be at least 1"),
        (["--first-token-s", "0"], "--first-token-s must be positive"),
        (["--speedup", "0"], "--speedup must be positive"),
        (["--planner-model", "llama-3.1-8b"], "go together"),
        (["--quantization", "int8"], "--quantization needs --planner-model"),
        (["--plot", "x.txt"], "--plot must end in one of"),
    ],
)
def test_bad_words_are_refused(words, message, capsys):
    assert main([*SHORT, *words]) == 2
    assert message in capsys.readouterr().err
