"""Regular sessions: a tree of turns, each of them computed like any other request."""

import pytest

from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    ForkSession,
    ListSessions,
    OpenSession,
    RollbackSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.sessions.tree import RegularSession
from tests.scheduler.driver import Driver, generate, make_sizes


class Tree:
    """A regular session "t" of a driver, and its turns as they must be."""

    def __init__(self, **kwargs: object) -> None:
        config = SchedulerArgs()
        self.driver = Driver(make_sizes(num_pages=200), config)
        opened = OpenSession(rid="q", session_id="t", **kwargs)  # type: ignore[arg-type]
        reply = self.driver.session(opened)
        assert (reply.ok, reply.data) == (True, {"session_id": "t"})

    def begin(self, name: str, new: list[int], history: list[int], /, **turn: object) -> None:
        message = generate(name, new, 3, session=SessionTurn(id="t", **turn))  # type: ignore[arg-type]
        self.driver.submit(message, history)

    def say(self, name: str, new: list[int], history: list[int], /, **turn: object) -> list[int]:
        """A turn whose whole prompt must be `history` and `new`; answers all of its tokens."""
        self.begin(name, new, history, **turn)
        self.driver.run()
        assert self.driver.finish[name].type == "length", self.driver.finish[name].message
        assert self.driver.prompt_tokens[name] == len(history) + len(new)
        self.driver.check_tokens(name)
        return [*history, *new, *self.driver.tokens[name]]

    def refused(self, name: str, words: str, new: list[int], /, **turn: object) -> None:
        before = self.described()
        self.begin(name, new, [], **turn)
        assert self.driver.finish[name].status_code == 400
        assert words in (self.driver.finish[name].message or "")
        assert self.described() == before

    def amend(self, name: str, num_output_tokens: int | None) -> None:
        """Its client saw that turn end there, or (None) saw nothing of its end."""
        turn = SessionTurn(id="t", name=name)
        if num_output_tokens is None:
            self.driver.scheduler.handle(AbortRequest(rid=name, session=turn))
        else:
            stop = StopRequest(rid=name, num_output_tokens=num_output_tokens, session=turn)
            self.driver.scheduler.handle(stop)
        self.driver.collect()

    def session(self) -> RegularSession:
        session = self.driver.scheduler._sessions.store.find("t")
        assert isinstance(session, RegularSession)
        return session

    def described(self) -> dict[str, object]:
        (entry,) = self.driver.session(ListSessions(rid="q")).data["sessions"]
        return dict(entry)


def test_a_turn_appends_to_the_one_it_names() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3, 4, 5], [])
    second = tree.say("b", [6], first, rid="a")
    third = tree.say("c", [7], second, rid="b")
    branch = tree.say("d", [8], first, rid="a")
    root = tree.say("e", [9], [])
    assert len({tuple(each) for each in (first, second, third, branch, root)}) == 5
    entry = tree.described()
    assert (entry["streaming"], entry["num_turns"], entry["num_tokens"]) == (False, 5, len(third))
    # What was computed before is found in the tree: regular sessions hold no memory themselves.
    assert tree.driver.cached["d"] >= (len(first) - 1) // 4 * 4
    assert tree.driver.scheduler.memory_views()[0].session_rows == 0
    tree.driver.check_idle()


def test_an_offset_cuts_the_history_and_an_output_may_be_dropped() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3, 4, 5], [])
    tree.say("b", [6], first[:4], rid="a", offset=4)
    tree.say("c", [6], [1, 2, 3, 4, 5], rid="a", drop_previous_output=True)
    tree.say("d", [6], [1, 2], rid="a", drop_previous_output=True, offset=2)
    tree.say("e", [6], first, rid="a", offset=99)


def test_replacing_drops_what_followed() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    second = tree.say("b", [4], first, rid="a")
    tree.say("c", [5], second, rid="b")
    tree.say("d", [6], first, rid="a", replace=True)
    assert tree.described()["num_turns"] == 2
    tree.refused("e", "has no turn 'b'", [7], rid="b")
    tree.refused("f", "has no turn 'c'", [7], rid="c")
    tree.say("b2", [7], first, rid="a", name="b")  # its name is free again
    tree.say("g", [8], [], replace=True)
    assert tree.described()["num_turns"] == 1
    tree.refused("h", "has no turn 'a'", [7], rid="a")


def test_a_turn_may_take_the_name_of_one_that_it_replaces() -> None:
    """So an answer is generated anew under the name that it has."""
    tree = Tree()
    first = tree.say("1", [1, 2, 3], [], name="a")
    tree.say("2", [4], first, rid="a", name="b")
    again = tree.say("3", [5], first, rid="a", name="b", replace=True)
    tree.say("4", [6], again, rid="b", name="c")
    tree.refused("5", "has a turn 'a'", [7], rid="a", name="a", replace=True)
    tree.refused("6", "has a turn 'c'", [7], rid="a", name="c")
    tree.begin("7", [8], first, rid="a", name="b", replace=True)
    tree.begin("8", [9], first, rid="a", name="b", replace=True)  # the other is aborted
    tree.driver.run()
    assert tree.described()["num_turns"] == 2
    tree.say("9", [1], [*first, 9, *tree.driver.tokens["8"]], rid="b")


def test_a_chain_of_turns_keeps_no_token_twice() -> None:
    tree = Tree()
    history: list[int] = []
    parent: dict[str, object] = {}
    for number in range(12):
        history = tree.say(f"{number}", [number, 1], history, **parent)
        parent = {"rid": f"{number}"}
    branch = tree.say("branch", [7], history[:10], rid="11", offset=10)
    kept = [node.num_kept for node in tree.session()._nodes.values()]
    assert kept == [5] * 12 + [len(branch) - 10]
    assert tree.session().num_kept == sum(kept)
    tree.say("all gone", [7], [], replace=True)
    assert tree.session().num_kept == 4


def test_a_session_keeps_only_so_many_turns_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    tree.say("b", [4], first, rid="a")
    with monkeypatch.context() as patch:
        patch.setattr("sgl_jax.sessions.tree.MAX_TURNS", 2)
        tree.refused("c", "2 turns and", [5], rid="b")
        tree.say("b2", [5], first, rid="a", replace=True, name="c")
    with monkeypatch.context() as patch:
        patch.setattr("sgl_jax.sessions.tree.MAX_KEPT_TOKENS", 12)
        tree.refused("d", "2 turns that keep 10 tokens", [6] * 3, rid="c")
        tree.say("e", [6] * 2, [*first, 5, *tree.driver.tokens["b2"]], rid="c")
        tree.say("f", [6] * 12, [], replace=True)
    tree.say("g", [7], [], rid=None)


def test_a_bos_is_dropped_where_something_stands_before_it() -> None:
    tree = Tree()
    first = tree.say("a", [49, 1], [], bos_token_id=49)
    tree.begin("b", [49, 2], [], rid="a", bos_token_id=49)
    tree.driver.run()
    assert tree.driver.prompt_tokens["b"] == len(first) + 1
    assert tree.driver.tokens["b"] == tree.driver.oracle.expected_output([*first, 2], 3)


def test_a_turn_cannot_continue_what_has_not_finished() -> None:
    tree = Tree()
    tree.begin("a", [1, 2, 3], [])
    tree.driver.step()
    tree.refused("b", "'a' of session 't' has not finished", [4], rid="a")
    tree.begin("c", [5], [])  # but several may run side by side
    assert tree.described()["num_running"] == 2
    tree.driver.run()
    assert tree.described()["num_turns"] == 2


@pytest.mark.parametrize("parent", [None, "a"])
def test_a_turn_replaced_while_it_runs_is_aborted_and_no_part_of_the_session(
    parent: str | None,
) -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    tree.begin("b", [4], first, rid="a")
    tree.driver.step()
    tree.begin("c", [5], first if parent else [], rid=parent, replace=True)
    tree.driver.collect()
    assert tree.driver.finish["b"].type == "abort"
    assert "replaced" in (tree.driver.finish["b"].message or "")
    tree.driver.run()
    assert tree.driver.finish["c"].type == "length"
    tree.driver.check_tokens("c")
    assert tree.described()["num_turns"] == (2 if parent else 1)
    tree.refused("d", "has no turn 'b'", [6], rid="b")
    tree.driver.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_a_running_turn_that_another_replaces_and_continues_keeps_what_it_has(
    steps: int, drop: bool
) -> None:
    tree = Tree()
    tree.begin("a", [1, 2, 3], [])
    for _ in range(steps):
        tree.driver.step()
    assert "a" not in tree.driver.finish
    history = [1, 2, 3] + ([] if drop else tree.driver.tokens.get("a", []))
    tree.begin("b", [4], history, rid="a", replace=True, drop_previous_output=drop)
    tree.driver.collect()
    assert tree.driver.finish["a"].type == "abort"
    tree.driver.run()
    assert tree.driver.prompt_tokens["b"] == len(history) + 1
    tree.driver.check_tokens("b")
    assert tree.described()["num_turns"] == 2
    assert tree.session().num_kept == sum(n.num_kept for n in tree.session()._nodes.values())
    tree.driver.check_idle()


def test_a_stop_string_found_after_the_turn_had_ended_cuts_its_output() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [], name="first")
    turn = SessionTurn(id="t", name="first")
    tree.driver.scheduler.handle(StopRequest(rid="b", num_output_tokens=1, session=turn))
    assert tree.described()["num_tokens"] == 6
    tree.driver.scheduler.handle(StopRequest(rid="a", num_output_tokens=1, session=turn))
    assert tree.described()["num_tokens"] == 4
    tree.say("b", [4], first[:4], rid="first")


def test_what_continues_a_turn_that_is_cut_late_keeps_what_it_has_read() -> None:
    """If it has ended: its client has the answer. In flight it is refused, as if it had come
    before the end. One that read no more than what stands is none of that."""
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    second = tree.say("b", [4], first, rid="a")
    tree.begin("wrong", [5], first, rid="a")
    tree.begin("right", [6], first[:4], rid="a", offset=4)
    tree.begin("also right", [7], first[:3], rid="a", drop_previous_output=True)
    tree.amend("a", 1)
    assert tree.driver.finish["wrong"].status_code == 400
    tree.driver.run()
    for name in ("right", "also right"):
        assert tree.driver.finish[name].type == "length"
        tree.driver.check_tokens(name)
    assert tree.described()["num_turns"] == 4
    tree.say("c", [8], second, rid="b")
    tree.say("d", [8], first[:4], rid="a")
    assert tree.session().num_kept == sum(n.num_kept for n in tree.session()._nodes.values())


def test_a_turn_whose_end_was_not_delivered_is_undone_unless_continued() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    second = tree.say("b", [4], first, rid="a")
    tree.say("c", [5], second, rid="b")
    tree.begin("d", [6], second, rid="b")
    tree.amend("b", None)  # too late
    tree.driver.run()
    assert tree.driver.finish["d"].type == "length"
    tree.begin("e", [7], [1], rid="c", offset=1)
    tree.amend("c", None)
    assert tree.driver.finish["e"].status_code == 400
    tree.amend("d", None)
    tree.driver.abort("b")  # a client that aborts by name is there, and sees the end
    assert tree.described()["num_turns"] == 2
    tree.say("c2", [5], second, rid="b", name="c")


def test_a_turn_that_fails_leaves_the_tree_as_it_was() -> None:
    tree = Tree()
    first = tree.say("a", [1, 2, 3], [])
    tree.begin("b", [4], first, rid="a")
    tree.driver.step()
    tree.driver.abort("b")
    assert tree.described()["num_turns"] == 1
    tree.refused("c", "has no turn 'b'", [5], rid="b")
    tree.say("b2", [4], first, rid="a")


def test_a_refused_turn_that_would_replace_others_replaces_nothing() -> None:
    tree = Tree(capacity_of_str_len=20)
    first = tree.say("a", [1, 2, 3], [])
    tree.say("b", [4], first, rid="a")
    tree.refused("c", "exceed the 20 tokens that the session can hold", [5] * 21, replace=True)
    tree.refused(
        "d", "exceed the 20 tokens that the session can hold", [5] * 20, rid="a", replace=True
    )
    tree.refused("e", "the prompt is empty", [], replace=True)
    message = generate("f", [1], 500, session=SessionTurn(id="t", replace=True))
    tree.driver.submit(message)
    assert tree.driver.finish["f"].status_code == 400
    assert tree.described()["num_turns"] == 2


def test_what_only_streaming_sessions_can_is_refused() -> None:
    tree = Tree()
    tree.say("a", [1, 2, 3], [])
    tree.refused("b", "is a regular one", [1, 2, 3], is_whole=True)
    tree.refused("a2", "has a turn 'a'", [1], name="a")
    for message in (
        RollbackSession(rid="q", session_id="t", num_turns=0),
        ForkSession(rid="q", session_id="t", new_session_id="u"),
    ):
        reply = tree.driver.session(message)
        assert not reply.ok
        assert "is a regular one" in reply.message


def test_it_closes_when_the_last_of_its_turns_has_ended() -> None:
    tree = Tree()
    tree.begin("a", [1, 2, 3], [])
    tree.begin("b", [4], [])
    tree.driver.step()
    assert tree.driver.session(CloseSession(rid="q", session_id="t")).ok
    assert tree.described()["is_closing"] is True
    tree.begin("c", [5], [])
    assert tree.driver.finish["c"].status_code == 400
    tree.driver.abort("a")
    assert tree.described()["num_running"] == 1
    tree.driver.run()
    assert tree.driver.finish["b"].type == "length"
    assert tree.driver.session(ListSessions(rid="q")).data == {"sessions": []}


def test_a_session_opened_anew_knows_nothing_of_a_turn_of_the_one_before() -> None:
    tree = Tree()
    tree.begin("a", [1, 2, 3], [])
    tree.driver.step()
    tree.begin("b", [4], [], replace=True)
    tree.driver.abort("b")
    assert tree.driver.session(CloseSession(rid="q", session_id="t")).ok
    assert tree.driver.session(OpenSession(rid="q", session_id="t")).ok
    tree.driver.run()
    assert tree.driver.finish["a"].type == "abort"
    assert tree.described()["num_turns"] == 0
    tree.say("c", [5], [])
