"""Sessions of the offline Engine on the demonstration model."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation, GenerationError

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "context_length": 256,
    "max_running_requests": 4,
    "warmup": "none",
    "check_memory": "busy",
}
# Drafts have their turn on a live server, whose shapes are compiled only once.
VARIANTS: dict[str, dict[str, Any]] = {
    "page 1, no overlap": {"page_size": 1, "disable_overlap_schedule": True},
    "retract, no tree": {"test_retract": True, "disable_radix_cache": True},
}


@pytest.fixture(scope="module")
def running_engine() -> Iterator[Engine]:
    with Engine(DEMO, **SETTINGS) as engine:
        yield engine


@pytest.fixture
def engine(running_engine: Engine) -> Iterator[Engine]:
    yield running_engine
    for session in running_engine.list_sessions():
        running_engine.close_session(session["session_id"])


def turn(
    engine: Engine, session_id: str, ids: list[int], sampling: Any = GREEDY, **params: Any
) -> Generation:
    (result,) = engine.generate(
        input_ids=[ids], sampling_params=sampling, session_params={"id": session_id, **params}
    )
    return result


def whole(engine: Engine, ids: list[int], sampling: Any = GREEDY) -> list[int]:
    """What the model says to `ids` outside of any session."""
    return engine.generate(input_ids=[ids], sampling_params=sampling)[0].output_ids


def entry(engine: Engine, session_id: str) -> dict[str, Any]:
    (found,) = [e for e in engine.list_sessions() if e["session_id"] == session_id]
    return found


def assert_nothing_held(engine: Engine) -> None:
    """No session is open: all pages are free or the tree's."""
    assert engine.list_sessions() == []
    for rank in engine.server_info()["ranks"]:
        assert rank["leased_pages"] == rank["session_held_pages"] == rank["protected_pages"] == 0
        assert rank["session_rows"] == 0
        assert rank["free_rows"] == rank["total_rows"]


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 700) for _ in range(rng.randrange(1, 20))] for _ in range(count)]


def converse(engine: Engine) -> None:
    """Six turns, each compared with the same conversation sent whole."""
    session_id = engine.open_session(streaming=True)
    history: list[int] = []
    for new in prompts(1, 6):
        result = turn(engine, session_id, new)
        assert result.num_prompt_tokens == len(history) + len(new)
        # All of the last turn but its last token, which no step has written.
        assert result.cached_tokens == max(len(history) - 1, 0)
        assert result.output_ids == whole(engine, history + new)
        history += new + result.output_ids
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_turn_by_turn_is_the_same_as_all_at_once(engine: Engine) -> None:
    converse(engine)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_is_with_other_settings(variant: str) -> None:
    with Engine(DEMO, **{**SETTINGS, **VARIANTS[variant]}) as engine:
        converse(engine)


def test_the_ledger_balances_while_a_session_idles(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    history = turn(engine, session_id, list(range(300, 320))).num_prompt_tokens + 8
    info = engine.server_info()
    (rank,) = info["ranks"]
    assert info["num_sessions"] == 1
    assert rank["session_rows"] == 1
    assert rank["session_held_pages"] == -(-history // 16) - rank["protected_pages"]
    owned = ("free_pages", "leased_pages", "cached_pages", "session_held_pages", "reserved_pages")
    assert sum(rank[name] for name in owned) == rank["total_pages"]
    assert engine.flush_cache()
    assert engine.server_info()["ranks"][0]["session_rows"] == 0
    assert entry(engine, session_id)["num_tokens"] == history
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_a_turn_that_is_left_early_never_was(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    long = {**GREEDY, "max_new_tokens": 200}
    for history in ([], [301, 302, 303]):
        if history:
            history = history + turn(engine, session_id, history).output_ids
        before = entry(engine, session_id)["num_tokens"]
        for _ in engine.stream([310, 311], long, session_params={"id": session_id}):
            break
        assert entry(engine, session_id)["num_tokens"] == before
        if history:
            result = turn(engine, session_id, [320])
            assert result.num_prompt_tokens == len(history) + 1
            assert result.output_ids == whole(engine, [*history, 320])
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_nor_was_one_that_had_ended_when_it_was_left(engine: Engine) -> None:
    """In the engine, unseen: its output was there, and was not taken."""
    session_id = engine.open_session(streaming=True)
    first = [301, 302, 303]
    history = first + turn(engine, session_id, first).output_ids
    options = {**GREEDY, "max_new_tokens": 100}
    stream = engine.stream([310, 311], options, session_params={"id": session_id})
    assert next(stream).finish_reason is None
    deadline = time.monotonic() + 30
    while entry(engine, session_id)["num_turns"] == 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stream.close()  # type: ignore[attr-defined]
    assert entry(engine, session_id)["num_turns"] == 1
    result = turn(engine, session_id, [320])
    assert result.num_prompt_tokens == len(history) + 1
    assert result.output_ids == whole(engine, [*history, 320])
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_a_stop_string_ends_the_history_where_it_ends_the_text(engine: Engine) -> None:
    first = [301, 302, 303]
    free = turn(engine, session_id := engine.open_session(streaming=True), first)
    text = engine.tokenizer.decode(free.output_ids)
    stop = engine.tokenizer.decode(free.output_ids[2:4])
    assert stop
    assert stop in text
    engine.rollback_session(session_id, 0)
    for limit in (8, 5):  # the engine goes on past it, or has ended before it hears of it
        sampling = {**GREEDY, "max_new_tokens": limit, "stop": [stop]}
        result = turn(engine, session_id, first, sampling)
        assert result.finish_reason is not None
        assert result.finish_reason.type == "stop"
        history = first + result.output_ids
        assert entry(engine, session_id)["num_tokens"] == len(history)
        following = turn(engine, session_id, [320, 321])
        assert following.num_prompt_tokens == len(history) + 2
        assert following.output_ids == whole(engine, [*history, 320, 321])
        engine.rollback_session(session_id, 0)
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_a_prompt_is_scored_in_a_session_as_outside(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    first = list(range(300, 330))
    history = first + turn(engine, session_id, first).output_ids
    options = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 10}
    (got,) = engine.generate(  # type: ignore[call-overload]
        input_ids=[[400, 401]],
        sampling_params=GREEDY,
        session_params={"id": session_id},
        **options,
    )
    (expected,) = engine.generate(  # type: ignore[call-overload]
        input_ids=[[*history, 400, 401]], sampling_params=GREEDY, **options
    )
    assert [e.token_id for e in got.prompt_logprobs] == [*history, 400, 401][10:]
    for ours, theirs in zip(
        got.prompt_logprobs + got.logprobs,
        expected.prompt_logprobs + expected.logprobs,
        strict=True,
    ):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    engine.close_session(session_id)


def test_back_to_an_earlier_turn_and_on_from_there(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    histories: list[list[int]] = [[]]
    for new in prompts(2, 4):
        histories.append(histories[-1] + new + turn(engine, session_id, new).output_ids)
    for num_turns in (4, 3, 1):
        told = engine.rollback_session(session_id, num_turns)
        assert told == {"num_turns": num_turns, "num_tokens": len(histories[num_turns])}
    result = turn(engine, session_id, [350, 351])
    assert result.output_ids == whole(engine, [*histories[1], 350, 351])
    with pytest.raises(InvalidRequestError, match="it cannot go back to 9"):
        engine.rollback_session(session_id, 9)
    engine.close_session(session_id)


def test_a_fork_shares_the_past_and_not_the_future(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    first = list(range(300, 340))
    history = first + turn(engine, session_id, first).output_ids
    fork = engine.fork_session(session_id, "the fork")
    assert fork == "the fork"
    ours, theirs = turn(engine, session_id, [350]), turn(engine, fork, [351])
    assert ours.output_ids == whole(engine, [*history, 350])
    assert theirs.output_ids == whole(engine, [*history, 351])
    assert theirs.cached_tokens == len(history) // 16 * 16  # the other wrote the last token
    engine.close_session(session_id)
    again = turn(engine, fork, [352])
    assert again.num_prompt_tokens == len(history) + 1 + 8 + 1
    engine.close_session(fork)
    assert_nothing_held(engine)


def test_a_regular_session_is_a_tree_of_turns(engine: Engine) -> None:
    session_id = engine.open_session()
    root = [301, 302, 303]
    first = turn(engine, session_id, root)
    history = root + first.output_ids
    for params, new, expected in (
        ({}, [310], [*history, 310]),
        ({"offset": 5}, [311], [*history[:5], 311]),
        ({"offset": -1}, [312], [*history[:-1], 312]),
        ({"drop_previous_output": True}, [313], [*root, 313]),
        ({"replace": True}, [314], [*history, 314]),
    ):
        result = turn(engine, session_id, new, rid=first.rid, **params)
        assert result.output_ids == whole(engine, expected), params
        assert result.num_prompt_tokens == len(expected)
    alone = turn(engine, session_id, [316])
    assert alone.num_prompt_tokens == 1
    turn(engine, session_id, [317], replace=True)
    with pytest.raises(GenerationError, match="has no turn"):
        turn(engine, session_id, [318], rid=first.rid)
    engine.close_session(session_id)
    assert_nothing_held(engine)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_turn_without_output_adds_its_prompt_alone(engine: Engine, streaming: bool) -> None:
    session_id = engine.open_session(streaming=streaming)
    prefill = {"temperature": 0.0, "max_new_tokens": 0}
    first = turn(engine, session_id, [301, 302, 303], prefill)
    assert (first.text, first.output_ids, first.num_prompt_tokens) == ("", [], 3)
    assert first.finish_reason == FinishReason("length")
    assert entry(engine, session_id)["num_tokens"] == 3
    then = {} if streaming else {"rid": first.rid}
    second = turn(engine, session_id, [304], **then)
    assert second.num_prompt_tokens == 4
    assert second.output_ids == whole(engine, [301, 302, 303, 304])
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_prompt_log_probabilities_from_beyond_the_history_are_refused(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    turn(engine, session_id, [301])
    scored = {"return_logprob": True, "logprob_start_len": 11}
    with pytest.raises(GenerationError, match=r"logprob_start_len must be in \[-1, 10\]"):
        engine.generate(  # type: ignore[call-overload]
            input_ids=[[302]],
            sampling_params=GREEDY,
            session_params={"id": session_id},
            **scored,
        )
    engine.close_session(session_id)


def test_what_a_session_cannot_take_is_refused_and_changes_nothing(engine: Engine) -> None:
    session_id = engine.open_session(40, streaming=True)
    turn(engine, session_id, [301])
    before = engine.list_sessions()[0]["num_tokens"]
    for params, reason in (
        ({"replace": True}, "without replace"),
        ({"offset": 1}, "without offset"),
        ({"drop_previous_output": True}, "without drop_previous_output"),
        ({"rid": "missing"}, "not to 'missing'"),
    ):
        with pytest.raises(GenerationError, match=reason):
            turn(engine, session_id, [302], **params)
    with pytest.raises(GenerationError, match="exceed the 40 tokens that the session can hold"):
        turn(engine, session_id, [302] * 40)
    with pytest.raises(GenerationError, match="there is no session"):
        turn(engine, "missing", [302])
    with pytest.raises(InvalidRequestError, match="one prompt at a time, got 2"):
        engine.generate([[1], [2]], GREEDY, session_params={"id": session_id})
    with pytest.raises(InvalidRequestError, match="unknown field `branch`"):
        turn(engine, session_id, [302], branch=1)
    with pytest.raises(InvalidRequestError, match="exists already"):
        engine.open_session(session_id=session_id)
    with pytest.raises(InvalidRequestError, match="timeout above 0"):
        engine.open_session(timeout=0)
    assert entry(engine, session_id)["num_tokens"] == before
    engine.close_session(session_id)
    assert_nothing_held(engine)


def test_one_request_at_a_time_and_a_close_waits_for_it(engine: Engine) -> None:
    session_id = engine.open_session(streaming=True)
    params = {"id": session_id}
    stream = engine.stream([301], {**GREEDY, "max_new_tokens": 100}, session_params=params)
    next(stream)
    with pytest.raises(GenerationError, match="in flight"):
        turn(engine, session_id, [302])
    engine.close_session(session_id)
    with pytest.raises(GenerationError, match="it was closed"):
        turn(engine, session_id, [302])
    last = list(stream)[-1]
    assert last.finish_reason is not None
    assert (last.finish_reason.type, len(last.output_ids)) == ("length", 100)
    assert_nothing_held(engine)


def test_an_idle_session_is_closed_by_the_clock_though_nothing_runs(engine: Engine) -> None:
    timed, patient = engine.open_session(timeout=0.5, streaming=True), engine.open_session()
    turn(engine, timed, [301])
    assert entry(engine, timed)["timeout_s"] == 0.5
    deadline = time.monotonic() + 30
    while len(engine.list_sessions()) == 2:
        assert time.monotonic() < deadline, engine.list_sessions()
        time.sleep(0.1)
    assert [e["session_id"] for e in engine.list_sessions()] == [patient]
    with pytest.raises(GenerationError, match="there is no session"):
        turn(engine, timed, [302])
    engine.close_session(patient)
    assert_nothing_held(engine)


def test_sessions_of_many_tasks_run_side_by_side(engine: Engine) -> None:
    async def run_turns(seed: int) -> None:
        session_id = engine.open_session(streaming=True)
        history: list[int] = []
        for new in prompts(seed, 3):
            params = {"id": session_id}
            result = await engine.async_generate(new, GREEDY, session_params=params)
            history += new + result.output_ids
        histories.append((session_id, history))

    async def all_of_them() -> None:
        await asyncio.gather(*(run_turns(seed) for seed in range(8)))

    histories: list[tuple[str, list[int]]] = []
    asyncio.run(all_of_them())
    assert len(engine.list_sessions()) == 8  # though only four have rows
    for session_id, history in histories:
        assert turn(engine, session_id, [350]).output_ids == whole(engine, [*history, 350])
        engine.close_session(session_id)
    assert_nothing_held(engine)


def test_no_more_sessions_than_the_setting_allows() -> None:
    with Engine(DEMO, **SETTINGS, max_sessions=2) as engine:
        engine.open_session()
        fork_of = engine.open_session(streaming=True)
        for open_third in (engine.open_session, lambda: engine.fork_session(fork_of)):
            with pytest.raises(GenerationError, match="2 sessions are open"):
                open_third()


# By default tests/sessions has it, without a device.
@pytest.mark.long
def test_idle_sessions_hold_no_more_than_their_share() -> None:
    with Engine(DEMO, **SETTINGS, session_memory_fraction=0.0) as engine:
        session_id = engine.open_session(streaming=True)
        history = [301, 302, *turn(engine, session_id, [301, 302]).output_ids]
        assert engine.server_info()["ranks"][0]["session_rows"] == 0
        assert engine.server_info()["counters"]["sessions_evicted"] == 1
        result = turn(engine, session_id, [303])
        assert result.cached_tokens == 0
        assert result.output_ids == whole(engine, [*history, 303])


def test_records_found_wrong_by_a_close_are_repaired_and_sessions_go_on(tmp_path: Path) -> None:
    with Engine(DEMO, **SETTINGS, memory_dump_dir=str(tmp_path)) as engine:
        doomed, survivor = engine.open_session(streaming=True), engine.open_session(streaming=True)
        for session_id in (doomed, survivor):
            turn(engine, session_id, [301, 302])
        allocator = engine._engine.core.scheduler.ranks[0].memory.allocator
        lease = engine._engine.core.scheduler.ranks[0].memory.sessions.idle_lease(doomed)
        assert lease is not None
        # As no code may: the lease still has them.
        allocator.free(lease.pages(16)[0], owner=lease.row)
        with pytest.raises(GenerationError, match="started afresh"):
            engine.close_session(doomed)
        assert engine.server_info()["counters"]["memory_errors"] == 1
        assert [e["session_id"] for e in engine.list_sessions()] == [survivor]
        assert turn(engine, survivor, [303]).num_prompt_tokens == 2 + 8 + 1
        engine.close_session(survivor)
        assert_nothing_held(engine)


@pytest.mark.parametrize("num_new", [40, 90])
def test_a_turn_that_reads_the_tree_beyond_its_lease_says_what_the_whole_conversation_says(
    engine: Engine, num_new: int
) -> None:
    rng = random.Random(num_new)
    first, new = ([rng.randrange(300, 700) for _ in range(n)] for n in (21, num_new))
    session_id = engine.open_session(streaming=True)
    history = first + turn(engine, session_id, first).output_ids
    expected = whole(engine, history + new)
    result = turn(engine, session_id, new)
    assert result.cached_tokens > len(history) + num_new - 20
    assert result.output_ids == expected
    again = history + new + expected + new[:5]
    assert turn(engine, session_id, new[:5]).output_ids == whole(engine, again)
