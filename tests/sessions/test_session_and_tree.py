"""A turn reads the longer of what its session's lease holds and what the tree has of its tokens."""

import pytest

from sgl_jax.core.messages import SessionTurn, StopRequest
from tests.scheduler.driver import generate
from tests.sessions.conversations import Conversations
from tests.sessions.test_sessions import talk


def compute(s: Conversations, rid: str, tokens: list[int]) -> None:
    """A plain request has the KV of `tokens` computed, and leaves it to the tree."""
    s.driver.submit(generate(rid, tokens, 1))
    s.run()


def words(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(num_tokens)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_whose_tokens_a_plain_request_computed_reads_those_of_the_tree(
    page_size: int,
) -> None:
    s = talk(page_size=page_size, pool_tokens=400)
    s.say("s", words(16), 4)
    new = words(150, first=3)
    prompt = s.of["s"].tokens + new
    compute(s, "plain", prompt)
    rid = s.say("s", new)
    assert s.driver.cached[rid] >= (len(prompt) - 1) // page_size * page_size
    rid = s.say("s", [1])
    assert s.driver.cached[rid] == len(prompt) + 3
    s.close_all()


def start_in_the_tree(
    *, num_new: int = 30, max_new_tokens: int = 4, **kwargs: object
) -> tuple[Conversations, str, list[int]]:
    """Session "s" has 20 tokens; a turn that brings `num_new` more finds all of its prompt but the
    last token in the tree, of pages of one token, and has begun."""
    s = talk(page_size=1, **kwargs)  # type: ignore[arg-type]
    s.say("s", words(16), 4)
    history, new = s.of["s"].tokens, words(num_new, first=3)
    compute(s, "plain", history + new)
    rid = s.begin("s", new, max_new_tokens)
    s.driver.step()
    lease = s.driver.scheduler._requests[rid].lease
    assert lease is not None
    assert lease.cache_protected_len == len(history) + num_new - 1
    return s, rid, history


def test_only_tokens_behind_what_the_row_has_on_the_device_are_uploaded() -> None:
    s, rid, _ = start_in_the_tree()
    (admission,) = s.driver.plans[-1].ranks[0].admissions
    assert (admission.start, len(admission.tokens)) == (19, 31)
    s.run()
    assert s.driver.cached[rid] == 49
    s.close_all()


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_turn_whose_lease_has_as_much_as_the_tree_goes_on_in_its_own_pages(
    page_size: int,
) -> None:
    s = talk(page_size=page_size)
    s.say("s", words(2 * page_size + 1), 4)
    lease = s.lease("s")
    assert lease is not None
    compute(s, "plain", [*s.of["s"].tokens, 9])
    pages = lease.pages(page_size)[0].tolist()
    rid = s.begin("s", [5])
    s.driver.step()
    assert lease.pages(page_size)[0].tolist()[: len(pages)] == pages
    s.run()
    assert s.driver.cached[rid] == 2 * page_size + 4
    s.close_all()


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_turn_that_fails_leaves_the_history_to_the_tree_that_it_has_read(num_steps: int) -> None:
    s, rid, history = start_in_the_tree(max_new_tokens=40)
    for _ in range(num_steps):
        s.driver.step()
    s.driver.abort(rid)
    s.run()
    assert s.of["s"].tokens == history
    assert s.lease("s") is None
    rid = s.say("s", [9])
    assert s.driver.cached[rid] == len(history)
    s.check()
    s.close_all()


def test_a_turn_that_ends_before_the_device_was_told_of_it_leaves_no_lease_with_untold_tokens() -> (
    None
):
    """The row lacks tokens which the tree has the KV of: the history's last was never computed."""
    s = talk(page_size=1)
    s.say("s", words(16), 4)
    history = s.of["s"].tokens
    compute(s, "plain", [*history, 1])
    s.begin("s", [2])
    rank = s.driver.scheduler.ranks[0]
    (request,) = s.driver.scheduler._waiting
    waiting = s.driver.scheduler._waiting
    row = rank.admit(request, waiting.cursor(request, 0))
    waiting.remove(request)
    assert rank.memory.leases[row].kv_committed_len == len(history)
    rank.end(row)
    assert s.lease("s") is None
    rank.memory.cache.reset()


@pytest.mark.parametrize("num_kept", [1, 2, 4])
def test_a_stop_found_late_cuts_a_turn_that_has_read_the_tree(num_kept: int) -> None:
    s, rid, history = start_in_the_tree(max_new_tokens=6)
    s.run()
    assert s.driver.finish[rid].type == "length"
    assert not s.stop_late("s", num_kept)
    assert len(s.of["s"].tokens) == len(history) + 30 + num_kept
    s.say("s", [9])
    s.check()
    s.close_all()


@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_a_session_that_has_read_the_tree_goes_back_and_forks(num_turns: int) -> None:
    s, _, history = start_in_the_tree()
    s.run()
    s.fork("s", "fork")
    s.roll_back("s", num_turns)
    assert s.driver.cached[s.say("fork", [8])] >= len(history) + 30
    rid = s.say("s", [9])
    # The fork has computed the last token of the history, too.
    assert s.driver.cached[rid] == [0, len(history), len(history) + 34][num_turns]
    s.check()
    s.close_all()


def test_a_retracted_turn_that_has_read_the_tree_finds_it_again() -> None:
    s, rid, _ = start_in_the_tree(max_new_tokens=6)
    s.driver.retract(rid)
    s.run()
    assert s.driver.finish[rid].type == "length"
    assert s.driver.cached[rid] == 49
    s.check()
    s.close_all()


def test_prompt_log_probabilities_are_computed_though_the_tree_has_more() -> None:
    s = talk(page_size=1)
    s.say("s", words(16), 4)
    history, new = s.of["s"].tokens, words(30, first=3)
    compute(s, "plain", history + new)
    rid = s.say("s", new, logprob_start_len=30)
    assert s.driver.cached[rid] == 29
    s.driver.check_prompt_logprobs(rid, history + new)
    s.close_all()


def test_a_whole_conversation_reads_the_tree_behind_what_it_keeps_of_its_session() -> None:
    s = talk(page_size=1)
    s.say("s", words(16), 4)
    whole = s.of["s"].tokens + words(30, first=3)
    compute(s, "plain", whole)
    rid = s.say("s", whole, turn=SessionTurn(id="s", is_whole=True))
    assert s.driver.cached[rid] == len(whole) - 1
    s.check()
    s.close_all()


def test_a_turn_fits_where_it_shares_what_a_running_request_has_computed() -> None:
    """Alone it would need more pages than are left beside that request."""
    s = talk(page_size=4, pool_tokens=160, schedule_conservativeness=0.0)
    s.say("s", words(16), 4)
    new = words(60, first=3)
    prompt = s.of["s"].tokens + new
    s.driver.submit(generate("running", prompt, 60))
    while len(s.driver.tokens["running"]) < 20:
        s.driver.step()
    rid = s.begin("s", new, 4)
    for _ in range(6):
        s.driver.step()
    assert rid in s.driver.finish
    assert "running" not in s.driver.finish
    assert s.driver.cached[rid] == 76
    assert s.driver.scheduler.counters()["requests_retracted"] == 0
    s.run()
    s.close_all()


def test_a_stop_while_a_turn_runs_in_pages_of_the_tree_keeps_what_its_client_saw() -> None:
    s, rid, history = start_in_the_tree(max_new_tokens=40)
    while len(s.driver.tokens[rid]) < 4:
        s.driver.step()
    s.driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=2))
    s.stopped(rid, 2)
    s.run()
    assert len(s.of["s"].tokens) == len(history) + 32
    s.say("s", [9])
    s.check()
    s.close_all()
