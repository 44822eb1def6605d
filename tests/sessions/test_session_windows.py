"""Sessions of models with windows: what a window has passed is neither read nor listed again."""

import pytest

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.messages import SessionTurn
from tests.sessions.conversations import Conversations
from tests.sessions.test_session_and_tree import compute, words
from tests.sessions.test_sessions import talk

WINDOW = 6
GROUPS = {
    "shared pool": (CacheGroup(None), CacheGroup(WINDOW)),
    "own pool": (CacheGroup(None), CacheGroup(WINDOW, 1)),
    "alone": (CacheGroup(WINDOW),),
}
PAGE_SIZES = [1, 4]


def talk_with_windows(layout: str, page_size: int, **kwargs: object) -> Conversations:
    """An engine of a model with a window, and one streaming session, "s"."""
    pool_tokens = 512 if layout == "shared pool" else 256
    return talk(
        groups=GROUPS[layout],
        page_size=page_size,
        pool_tokens=pool_tokens,
        **kwargs,  # type: ignore[arg-type]
    )


def check_listed(s: Conversations, page_size: int) -> None:
    """The lease of "s" lists nothing that its windows have passed, and all that they see."""
    lease = s.lease("s")
    assert lease is not None
    for pages, first in zip(lease.pages(page_size), lease.first_pages.tolist(), strict=True):
        assert not pages[:first].any()
        assert pages[first:].all()


@pytest.mark.parametrize("layout", GROUPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_answer_that_the_tree_has_is_listed_without_what_its_window_has_passed(
    layout: str, page_size: int
) -> None:
    """The tree has windows there, since for it the same tokens were a prompt."""
    s = talk_with_windows(layout, page_size)
    prompt = words(9)
    answer = s.driver.oracle.expected_output(prompt, 40)
    compute(s, "plain", prompt + answer)
    s.say("s", prompt, 40)
    assert s.of["s"].tokens == prompt + answer
    check_listed(s, page_size)
    s.say("s", words(5), 20)
    check_listed(s, page_size)
    s.check()
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("layout", GROUPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_turn_that_scores_what_a_window_has_passed_computes_it_anew(
    layout: str, page_size: int, radix: bool
) -> None:
    s = talk_with_windows(layout, page_size, disable_radix_cache=not radix)
    s.say("s", words(9), 40)
    lease = s.lease("s")
    assert lease is not None
    assert lease.first_pages[-1] * page_size > 20
    history, new = s.of["s"].tokens, words(3)
    rid = s.say("s", new, return_logprob=True, logprob_start_len=20)
    assert s.driver.cached[rid] <= 19
    s.driver.check_prompt_logprobs(rid, history + new)
    s.check()
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("layout", GROUPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_session_goes_back_within_and_behind_its_window(
    layout: str, page_size: int, num_drafts: int, radix: bool
) -> None:
    """By a stop that is found late, a roll-back and a fork."""
    s = talk_with_windows(layout, page_size, disable_radix_cache=not radix, num_drafts=num_drafts)
    for first in range(3):
        s.say("s", words(9, first), 20)
    s.fork("s", "fork")
    for num_kept in (19, 18, 3):
        s.stop_late("s", num_kept)
        s.say("s", words(4), 6)
        s.roll_back("s", 2)
        s.say("s", words(9, 2), 20)
    s.roll_back("s", 1)
    for session_id in ("s", "fork"):
        s.say(session_id, words(5), 12)
    s.check()
    s.close_all()


@pytest.mark.parametrize("layout", GROUPS)
def test_a_retracted_turn_finds_or_computes_what_its_window_sees(layout: str) -> None:
    s = talk_with_windows(layout, 4)
    s.say("s", words(20), 20)
    rid = s.begin("s", words(5), 30, turn=SessionTurn(id="s"))
    for _ in range(12):
        s.driver.step()
    s.driver.retract(rid)
    s.run()
    assert len(s.driver.tokens[rid]) == 30
    s.check()
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sessions_leave_room_in_a_window_s_own_pool_for_the_rows_that_run(
    page_size: int, radix: bool
) -> None:
    """A turn of one long chunk and one token has no later step that frees the chunk's pages."""
    s = talk_with_windows(
        "own pool",
        page_size,
        chunk=64,
        num_rows=5,
        overlap=False,
        disable_radix_cache=not radix,
    )
    for session_id in ("b", "c", "d"):
        s.open(session_id)
    for number, session_id in enumerate(("s", "b", "c", "d", "s", "b")):
        s.say(session_id, words(40, number), 1)
    s.check()
    s.close_all()


@pytest.mark.parametrize("num_drafts", [0, 1])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_turn_holds_of_a_window_no_more_than_its_chunk_and_what_that_sees(
    page_size: int, num_drafts: int
) -> None:
    s = talk_with_windows("own pool", page_size, num_drafts=num_drafts, disable_radix_cache=True)
    sizes, memory = s.driver.scheduler.sizes, s.driver.scheduler.ranks[0].memory
    for turn in range(4):
        s.begin("s", words(8, turn), 2)
        while not s.driver.scheduler.is_idle:
            s.driver.step()
            listed = (memory.rows.pages[:, 1] > 0).sum(axis=1)
            assert listed.max() <= sizes.row_pages(sizes.groups[1])
        s.settle()
    s.close_all()
