"""A conversation keeps its memory: what each turn finds, and that every answer is right."""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.messages import SessionTurn, StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.sessions.streaming import append_turn
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes
from tests.sessions.conversations import Conversations

PAGE_SIZES = [1, 16, 256]


def talk(
    *,
    page_size: int = 4,
    pool_tokens: int = 256,
    num_drafts: int = 0,
    overlap: bool = True,
    dp_size: int = 1,
    num_rows: int = 9,
    chunk: int = 8,
    groups: tuple[CacheGroup, ...] = FULL_ATTENTION,
    host_ratio: float = 0.0,
    **config: object,
) -> Conversations:
    """An engine with one streaming session, "s"."""
    sizes = make_sizes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=1 + max(pool_tokens // page_size, 4),
        num_rows=num_rows,
        max_chunk_tokens=chunk,
        max_draft_tokens=num_drafts,
        groups=groups,
        host_ratio=host_ratio,
    )
    config = {"session_memory_fraction": 1.0} | config
    settings = SchedulerArgs(**config)  # type: ignore[arg-type]
    talk = Conversations(Driver(sizes, settings, overlap=overlap))
    talk.open("s")
    return talk


# -- what a turn finds ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("radix", [False, True])
def test_a_turn_finds_all_of_the_last_one_but_the_token_that_no_step_has_written(
    page_size: int, overlap: bool, num_drafts: int, radix: bool
) -> None:
    s = talk(
        page_size=page_size, num_drafts=num_drafts, overlap=overlap, disable_radix_cache=not radix
    )
    for number, num_new in enumerate((5, 1, 11, 2, 16, 3)):
        history = s.of["s"].tokens
        rid = s.say("s", list(range(num_new)), 1 + number % 4)
        assert s.driver.prompt_tokens[rid] == len(history) + num_new
        assert s.driver.cached[rid] == max(len(history) - 1, 0)
    assert s.driver.scheduler.counters()["requests_retracted"] == 0
    s.close_all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("overlap", "num_unwritten"), [(False, 1), (True, 0)])
def test_after_a_stop_token_the_step_that_ran_ahead_has_written_even_that(
    page_size: int, overlap: bool, num_unwritten: int
) -> None:
    s = talk(page_size=page_size, overlap=overlap)
    stops = tuple(range(0, 50, 5))
    while len(s.of["s"].turn_ends) < 6:
        history = s.of["s"].tokens
        rid = s.say("s", [7, len(history) % 50], 40, stop_token_ids=stops)
        assert s.driver.finish[rid].type == "stop"
        assert s.driver.cached[rid] == max(len(history) - num_unwritten, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_tokens_accepted_past_a_stop_are_not_in_the_history(
    page_size: int, overlap: bool, radix: bool
) -> None:
    """Nor is their KV taken for that of the next turn's tokens."""
    s = talk(page_size=page_size, num_drafts=4, overlap=overlap, disable_radix_cache=not radix)
    stops = tuple(range(0, 50, 4))
    for number in range(8):
        history = s.of["s"].tokens
        rid = s.say("s", [number], 30 - 3 * number, stop_token_ids=stops)
        assert len(history) - 1 <= s.driver.cached[rid] <= len(history) or not history
    s.check()
    assert s.driver.scheduler.counters()["accepted_draft_tokens"] > 5
    s.close_all()


@pytest.mark.parametrize("num_kept", [1, 2, 3])
@pytest.mark.parametrize("page_size", [4, *PAGE_SIZES])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_retracted", [False, True])
def test_a_stop_string_cuts_the_history_where_it_was_found(
    num_kept: int, page_size: int, overlap: bool, is_retracted: bool
) -> None:
    s = talk(page_size=page_size, overlap=overlap)
    s.say("s", [1, 2, 3])
    rid = s.begin("s", [4, 5], 40)
    while len(s.driver.tokens[rid]) < 4:
        s.driver.step()
    if is_retracted:
        s.driver.retract(rid)
    s.driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=num_kept))
    s.stopped(rid, num_kept)
    s.check()
    rid = s.say("s", [6])
    assert s.driver.prompts[rid][-2] == s.driver.tokens["s.1"][num_kept - 1]
    # A retract leaves the session no lease: what the tree has of the history is found there.
    assert is_retracted or s.driver.cached[rid] >= len(s.driver.prompts[rid]) - 2
    s.close_all()


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_an_idle_session_holds_nothing_of_what_was_generated_past_a_stop_string(
    num_drafts: int,
) -> None:
    """However late the frontend has found it."""
    s = talk(page_size=1, num_drafts=num_drafts)
    rid = s.begin("s", [4, 5], 40)
    while len(s.driver.tokens[rid]) < 12:
        s.driver.step()
    s.driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=2))
    s.stopped(rid, 2)
    lease = s.lease("s")
    assert lease is not None
    assert lease.kv_committed_len == lease.kv_allocated_len == len(s.of["s"].tokens) == 4
    s.run()
    s.say("s", [6])
    s.close_all()


@pytest.mark.parametrize("num_kept", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [False, True])
def test_a_stop_string_found_after_the_turn_had_ended_cuts_the_history_all_the_same(
    num_kept: int, page_size: int, radix: bool
) -> None:
    s = talk(page_size=page_size, disable_radix_cache=not radix)
    first = s.say("s", [1, 2, 3])
    s.say("s", [4, 5], 4)
    assert not s.stop_late("s", num_kept)
    assert len(s.of["s"].tokens) == 9 + num_kept
    s.check()
    turn = SessionTurn(id="s")
    s.driver.scheduler.handle(StopRequest(rid=first, num_output_tokens=1, session=turn))
    s.check()  # too late: another turn has followed
    s.say("s", [6])
    s.close_all()


@pytest.mark.parametrize("start", [0, 1, 6, 9, 12])
@pytest.mark.parametrize("page_size", [4, *PAGE_SIZES])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_a_turn_reports_log_probabilities_of_its_history_too(
    start: int, page_size: int, overlap: bool, radix: bool
) -> None:
    """What is to be scored is computed again, though the tree may own more of it."""
    s = talk(page_size=page_size, overlap=overlap, disable_radix_cache=not radix)
    s.say("s", [1, 2, 3, 4, 5, 6, 7], 3)
    rid = s.say("s", [8, 9], 3, logprob_start_len=start, return_logprob=True, top_logprobs_num=2)
    s.driver.check_prompt_logprobs(rid, s.driver.prompts[rid])
    s.driver.check_logprobs(rid)
    s.say("s", [10])
    s.driver.check_tokens(rid)
    s.close_all()


def test_a_leading_bos_is_not_said_twice() -> None:
    s = talk()
    turn = SessionTurn(id="s", bos_token_id=49)
    message = generate("a", [49, 1], 2, session=turn)
    s.driver.submit(message)
    s.driver.run()
    s.of["s"].take("a", [49, 1], s.driver.tokens["a"])
    history = s.of["s"].tokens
    s.driver.submit(generate("b", [49, 2], 2, session=turn))
    s.driver.run()
    assert s.driver.prompt_tokens["b"] == len(history) + 1
    assert s.driver.tokens["b"] == s.driver.oracle.expected_output([*history, 2], 2)


@pytest.mark.parametrize(
    ("history", "new", "kept"),
    [
        ([49, 1], [49, 2], [2]),
        ([], [49, 2], [49, 2]),
        ([49, 1], [49, 2, 49, 3], [49, 2, 49, 3]),  # a message, and the mark of the answer
        ([49, 1, 49, 5], [49, 2], [49, 2]),
    ],
)
def test_a_bos_that_begins_each_message_stays(
    history: list[int], new: list[int], kept: list[int]
) -> None:
    message = generate("a", new, 2, session=SessionTurn(id="s", bos_token_id=49))
    assert append_turn(np.array(history, np.int32), message).tolist() == [*history, *kept]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_is_in_place_is_listed_while_a_turn_runs_too(dp_size: int) -> None:
    s = talk(dp_size=dp_size, overlap=False)

    def listed() -> tuple[object, object]:
        entry = s.listed()["s"]
        return entry["dp_rank"], entry["cached_tokens"]

    assert listed() == (None, 0)
    rid = s.begin("s", list(range(20)), 4)
    assert listed() == (None, 0)
    s.driver.step()
    home = s.driver.scheduler._requests[rid].dp_rank
    assert listed() == (home, 8)  # a chunk
    s.run()
    assert listed() == (home, 23)
    rid = s.begin("s", [1, 2], 20)
    assert listed() == (home, 23)
    s.driver.step()
    assert listed() == (home, 26)
    s.driver.retract(rid)
    assert listed() == (None, 0)
    s.run()
    assert listed() == (s.driver.dp_rank[rid], 45)
    s.close_all()


# -- whole conversations ----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 5, 7, 9, 11])
def test_of_a_whole_conversation_the_session_finds_what_it_has(
    page_size: int, radix: bool, kept: int
) -> None:
    s = talk(page_size=page_size, disable_radix_cache=not radix)
    whole = SessionTurn(id="s", is_whole=True)
    s.say("s", [1, 2, 3, 4, 5], 2)
    s.say("s", [6, 7], 2)
    history = s.of["s"].tokens
    assert len(history) == 11
    rid = s.say("s", [*history[:kept], 48, 48, 48], 3, turn=whole)
    assert s.driver.prompt_tokens[rid] == kept + 3
    written = min(kept, len(history) - 1)
    assert written // page_size * page_size <= s.driver.cached[rid] <= written
    if not radix or page_size == 256:  # nothing of it is the tree's: the lease has it all
        assert s.driver.cached[rid] == written
    assert [end for end in s.of["s"].turn_ends if end <= kept] == s.of["s"].turn_ends[:-1]
    s.check()
    s.say("s", [9])
    s.close_all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("radix", [False, True])
def test_a_whole_conversation_may_be_no_longer_than_the_history(
    page_size: int, radix: bool
) -> None:
    s = talk(page_size=page_size, disable_radix_cache=not radix)
    whole = SessionTurn(id="s", is_whole=True)
    s.say("s", list(range(10)), 3)
    history = s.of["s"].tokens
    same = s.say("s", history, 2, turn=whole)
    assert s.of["s"].tokens[: len(history)] == history
    assert len(s.of["s"].turn_ends) == 2
    shorter = s.say("s", history[:4], 2, turn=whole)
    assert s.of["s"].turn_ends == [6]
    assert s.driver.tokens[same] != s.driver.tokens[shorter]
    s.say("s", [1])
    s.check()
    s.close_all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("kept", [0, 3, 8, 12])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_whole_turn_leaves_the_old_history(
    page_size: int, radix: bool, kept: int, num_steps: int
) -> None:
    """Though the row's pages, and the device's tokens, already hold something else."""
    s = talk(page_size=page_size, disable_radix_cache=not radix)
    s.say("s", list(range(10)), 3)
    history = s.of["s"].tokens
    turn = SessionTurn(id="s", is_whole=True)
    rid = s.begin("s", [*history[:kept], *[47] * 12], 20, turn=turn)
    for _ in range(num_steps):
        s.driver.step()
    s.driver.abort(rid)
    s.run()
    s.check()
    assert s.of["s"].tokens == history
    s.say("s", [5])
    s.close_all()


# -- the same answers as without a session -----------------------------------------------------


@pytest.mark.parametrize(("dp_size", "num_drafts"), [(1, 3), (3, 0)])
@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("radix", [False, True])
def test_many_conversations_at_once_in_a_small_pool_are_all_right(
    dp_size: int, num_drafts: int, interval: int, radix: bool
) -> None:
    """The pool holds about a quarter of it all; plain requests run beside them."""
    s = talk(
        dp_size=dp_size,
        pool_tokens=192 // dp_size,
        num_drafts=num_drafts,
        num_rows=5,
        disable_radix_cache=not radix,
        **forced_retract(interval),
        schedule_conservativeness=0.0,
    )
    for i in range(1, 10):
        s.open(f"s{i}")
    for number in range(6):
        rids = [s.begin(session_id, [i, number], 5) for i, session_id in enumerate(s.of)]
        s.driver.submit(generate(f"plain{number}", list(range(number, 30)), 6))
        s.run()
        s.check()
        for rid in (*rids, f"plain{number}"):
            s.driver.check_tokens(rid)
            assert s.driver.finish[rid].type == "length"
    assert s.driver.scheduler.counters()["sessions_evicted"] > 0
    s.driver.check_replay()
    s.close_all()


# -- back and aside ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("num_turns", range(5))
def test_a_session_goes_back_to_any_of_its_turns(
    page_size: int, radix: bool, num_turns: int
) -> None:
    s = talk(page_size=page_size, disable_radix_cache=not radix)
    for number in range(4):
        s.say("s", [number, number + 1], 3)
    s.roll_back("s", num_turns)
    s.check()
    kept = 5 * num_turns
    rid = s.say("s", [30, 31])
    assert s.driver.prompt_tokens[rid] == kept + 2
    written = min(kept, 19)
    least = written // page_size * page_size if radix else written
    assert least <= s.driver.cached[rid] <= written
    s.say("s", [32])
    s.close_all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_fork_shares_the_whole_pages_of_the_history_and_goes_on_by_itself(
    page_size: int, overlap: bool
) -> None:
    s = talk(page_size=page_size, overlap=overlap)
    s.say("s", list(range(20)), 3)
    s.say("s", [4], 3)
    history = s.of["s"].tokens
    s.fork("s", "fork")
    rid = s.say("fork", [8, 9], 3)
    assert s.driver.cached[rid] == (len(history) - 1) // page_size * page_size
    both = s.begin("s", [1], 5), s.begin("fork", [2], 5)
    s.run()
    assert s.driver.prompts[both[0]][:27] == s.driver.prompts[both[1]][:27] == history
    num_shared = (len(history) - 1) // page_size
    own, fork = s.lease("s"), s.lease("fork")
    assert own is not None
    assert fork is not None
    pages, pages_of_fork = own.pages(page_size)[0].tolist(), fork.pages(page_size)[0].tolist()
    assert pages[:num_shared] == pages_of_fork[:num_shared]
    assert set(pages[num_shared + 1 :]).isdisjoint(pages_of_fork[num_shared + 1 :])
    s.close("s")
    s.say("fork", [3])
    s.check()
    s.close_all()
