"""Turns with a grammar wait at the gate: until they pass, they change nothing that others see."""

from typing import Any

import pytest

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    ListSessions,
    OpenSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.scheduler.events import GrammarReady, Rebuild
from tests.scheduler.driver import Driver, generate, make_sizes

REFUSALS = [
    FinishReason("abort", message="json_schema: no", status_code=400, param="json_schema"),
    FinishReason("abort", message="full", status_code=429, code="tenant_queue_full"),
]


class Rig:
    """A session with the finished turns a and, behind it, b."""

    def __init__(self, **settings: Any) -> None:
        self.driver = Driver(make_sizes(num_pages=80), SchedulerArgs(**settings))
        self.driver.session(OpenSession(rid="open", session_id="s"))
        self.a = self.turn("a", [1, 2, 3], [])
        self.b = self.turn("b", [4, 5], self.a, rid="a")

    def send(self, name: str, new: list[int], history: list[int], **turn: Any) -> None:
        grammar = turn.pop("regex", None)
        num_tokens = turn.pop("num_tokens", 3)
        session = SessionTurn(id="s", name=name, **turn)
        message = generate(name, new, num_tokens, regex=grammar, session=session)
        self.driver.submit(message, history)

    def turn(self, name: str, new: list[int], history: list[int], **turn: Any) -> list[int]:
        """Run a turn to its end; returns the session's tokens after it."""
        self.send(name, new, history, **turn)
        for _ in range(100):  # others may wait at the gate
            self.driver.step()
        return self.whole(name)

    def whole(self, name: str) -> list[int]:
        assert self.driver.finish[name].type != "abort", self.driver.finish[name].message
        self.driver.check_tokens(name)
        return self.driver.prompts[name] + self.driver.tokens[name]

    def ready(self, rid: str, refusal: FinishReason | None = None) -> None:
        self.driver.scheduler.handle(GrammarReady(rid, refusal))
        self.driver.collect()

    def sessions(self) -> dict[str, Any]:
        reply = self.driver.session(ListSessions(rid="list"))
        return {each["session_id"]: each for each in reply.data["sessions"]}

    def refused(self, name: str) -> str:
        finish = self.driver.finish[name]
        assert (finish.type, finish.status_code) == ("abort", 400)
        return finish.message or ""

    def end(self) -> None:
        self.driver.run()
        self.driver.scheduler.audit()
        self.driver.check_replay()


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("parent", ["a", None])
def test_a_refused_turn_replaces_nothing(refusal: FinishReason, parent: str | None) -> None:
    rig = Rig()
    rig.send("running", [6], rig.a, rid="a", num_tokens=12)
    rig.driver.step()
    before = rig.sessions()["s"]
    rig.send("c", [7], rig.a if parent else [], rid=parent, replace=True, regex="(")
    rig.ready("c", refusal)
    assert rig.driver.finish["c"] == refusal
    assert rig.sessions()["s"] == before
    assert "running" not in rig.driver.finish
    rig.turn("d", [8], rig.b, rid="b")
    assert len(rig.driver.tokens["running"]) == 12
    assert rig.sessions()["s"]["num_turns"] == 4
    rig.end()


def test_an_aborted_turn_at_the_gate_replaces_nothing() -> None:
    rig = Rig()
    rig.send("c", [7], rig.a, rid="a", replace=True, regex="a+")
    rig.driver.abort("c")
    rig.turn("d", [8], rig.b, rid="b")
    rig.send("e", [7], rig.a, rid="a", replace=True, regex="a+")
    rig.driver.scheduler.handle(AbortRequest(abort_all=True))
    rig.driver.collect()
    assert rig.sessions()["s"]["num_turns"] == 3
    rig.end()


def test_a_turn_replaces_others_when_it_passes() -> None:
    rig = Rig()
    rig.send("running", [6], rig.a, rid="a", num_tokens=12)
    rig.driver.step()
    rig.send("c", [7], rig.a, rid="a", replace=True, regex="a+")
    for _ in range(3):
        rig.driver.step()
    rig.ready("c")
    assert "replaced" in (rig.driver.finish["running"].message or "")
    rig.driver.run()
    rig.whole("c")
    assert rig.sessions()["s"]["num_turns"] == 2
    rig.send("d", [8], rig.b, rid="b")
    assert "no turn 'b'" in rig.refused("d")
    rig.end()


def test_a_turn_continues_what_its_running_parent_had_when_it_arrived() -> None:
    rig = Rig()
    rig.send("p", [6], rig.a, rid="a", num_tokens=12)
    for _ in range(5):
        rig.driver.step()
    known = rig.driver.prompts["p"] + rig.driver.tokens["p"]
    rig.send("c", [7], known, rid="p", replace=True, regex="a+")
    for _ in range(3):
        rig.driver.step()
    rig.ready("c")
    assert "replaced" in (rig.driver.finish["p"].message or "")
    rig.driver.run()
    longer = rig.driver.prompts["p"] + rig.driver.tokens["p"]
    assert len(longer) > len(known)
    whole = rig.whole("c")
    rig.turn("d", [8], whole, rid="c")
    rig.turn("e", [9], longer, rid="p")
    rig.end()


def test_turns_that_arrived_later_stay() -> None:
    rig = Rig()
    rig.send("c", [7], rig.a, rid="a", replace=True, regex="a+")
    later = rig.turn("later", [8], rig.a, rid="a")
    rig.turn("behind b", [9], rig.b, rid="b")
    rig.ready("c")
    rig.driver.run()
    rig.whole("c")
    rig.turn("d", [9], later, rid="later")
    rig.send("e", [9], rig.b, rid="b")
    assert "no turn 'b'" in rig.refused("e")
    assert rig.sessions()["s"]["num_turns"] == 4  # a, c, later, d
    rig.end()


@pytest.mark.parametrize("first", ["c", "d"])
def test_the_last_of_two_that_replace_stays_in_whatever_order_they_pass(first: str) -> None:
    rig = Rig()
    for name in ("c", "d"):
        rig.send(name, [7], rig.a, rid="a", replace=True, regex="a+")
    for name in (first, "d" if first == "c" else "c"):
        rig.ready(name)
        rig.driver.step()
    assert "replaced" in (rig.driver.finish["c"].message or "")
    rig.driver.run()
    rig.whole("d")
    assert rig.sessions()["s"]["num_turns"] == 2
    rig.end()


@pytest.mark.parametrize("passes_first", [True, False])
def test_a_turn_may_have_the_name_of_one_at_the_gate_that_it_replaces(passes_first: bool) -> None:
    rig = Rig()
    for rid in ("1", "2"):
        turn = SessionTurn(id="s", rid="a", name="b", replace=True)
        rig.driver.submit(generate(rid, [7], 3, regex="a+", session=turn), rig.a)
    if passes_first:
        rig.ready("1")
    rig.ready("2")
    assert "replaced" in (rig.driver.finish["1"].message or "")
    rig.driver.run()
    rig.turn("e", [8], rig.whole("2"), rid="b")
    assert rig.sessions()["s"]["num_turns"] == 3
    rig.end()


def test_a_turn_without_a_grammar_replaces_one_at_the_gate() -> None:
    rig = Rig()
    rig.send("c", [7], rig.b, rid="b", regex="a+")
    rig.turn("d", [8], rig.a, rid="a", replace=True)
    assert "replaced" in (rig.driver.finish["c"].message or "")
    rig.ready("c")
    rig.end()


def test_a_turn_whose_parent_is_gone_when_it_passes_is_refused() -> None:
    rig = Rig()
    rig.send("c", [7], rig.a, rid="a", replace=True, regex="a+")
    rig.send("d", [8], rig.b, rid="b", regex="a+")
    rig.ready("c")
    rig.ready("d")
    assert "no turn 'b'" in rig.refused("d")
    rig.end()


def test_a_defect_that_a_replaced_turn_shows_at_its_end_leaves_no_turn_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.send("running", [6], rig.a, rid="a", num_tokens=12)
    rig.driver.step()

    def finish(*args: Any, **options: Any) -> None:
        raise LedgerError("the records are wrong")

    monkeypatch.setattr(rig.driver.scheduler.ranks[0], "finish", finish)
    with pytest.raises(LedgerError):
        rig.send("c", [7], rig.a, rid="a", replace=True)
    rig.driver.scheduler.handle(Rebuild("rebuilt"))
    rig.driver.collect()
    assert rig.driver.finish["c"].status_code == 500
    assert rig.sessions()["s"]["num_running"] == 0


def test_a_turn_whose_running_parent_is_aborted_is_refused() -> None:
    rig = Rig()
    rig.send("p", [6], rig.a, rid="a", num_tokens=12)
    rig.driver.step()
    known = rig.driver.prompts["p"] + rig.driver.tokens["p"]
    rig.send("c", [7], known, rid="p", replace=True, regex="a+")
    rig.driver.abort("p")
    rig.ready("c")
    assert "no turn 'p'" in rig.refused("c")
    rig.end()


def test_a_turn_whose_parent_is_cut_is_refused() -> None:
    rig = Rig()
    rig.send("c", [7], rig.b, rid="b", regex="a+")
    rig.driver.scheduler.handle(
        StopRequest(rid="b", num_output_tokens=1, session=SessionTurn(id="s", name="b"))
    )
    rig.driver.collect()
    assert "send it again" in rig.refused("c")
    rig.send("p", [6], rig.a, rid="a", num_tokens=12)
    for _ in range(6):
        rig.driver.step()
    known = rig.driver.prompts["p"] + rig.driver.tokens["p"]
    rig.send("d", [7], known, rid="p", replace=True, regex="a+")
    rig.driver.scheduler.handle(
        StopRequest(rid="p", num_output_tokens=1, session=SessionTurn(id="s", name="p"))
    )
    rig.ready("d")
    assert "was cut" in rig.refused("d")
    rig.end()


def test_a_name_and_a_turn_at_the_gate_are_taken() -> None:
    rig = Rig()
    rig.send("c", [7], rig.a, rid="a", regex="a+")
    message = generate("other", [7], 3, session=SessionTurn(id="s", rid="a", name="c"))
    rig.driver.submit(message, rig.a)
    assert "has a turn 'c'" in rig.refused("other")
    for replace in (False, True):
        rig.send(f"d {replace}", [8], [], rid="c", replace=replace)
        assert "has not finished" in rig.refused(f"d {replace}")
    rig.ready("c")
    rig.driver.run()
    rig.turn("e", [8], rig.whole("c"), rid="c")
    rig.end()


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_session_that_is_closed_waits_for_its_turn_at_the_gate(is_streaming: bool) -> None:
    rig = Rig()
    opened = OpenSession(rid="o", session_id="t", streaming=is_streaming, timeout_s=5.0)
    rig.driver.session(opened)
    rig.driver.tick(1.0)
    rig.driver.submit(generate("x", [5, 6], 3, regex="a+", session=SessionTurn(id="t")))
    rig.driver.tick(100.0)
    assert not rig.sessions()["t"]["is_closing"]
    rig.driver.session(CloseSession(rid="close", session_id="t"))
    assert rig.sessions()["t"]["is_closing"]
    rig.ready("x")
    rig.driver.run()
    rig.whole("x")
    assert "t" not in rig.sessions()
    rig.end()


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_turn_displaces_sessions_only_when_it_passes(
    is_streaming: bool, is_refused: bool
) -> None:
    driver = Driver(
        make_sizes(num_pages=80), SchedulerArgs(max_session_tokens=40, tenant_share=0.75)
    )
    ann, bob = Tenant(name="ann"), Tenant(name="bob")
    for number in range(3):
        driver.session(OpenSession(rid="o", session_id=f"ann{number}", tenant=ann))
        turn = SessionTurn(id=f"ann{number}")
        driver.submit(generate(f"a{number}", [1] * 8, 2, session=turn, tenant=ann))
        driver.run()
    driver.session(OpenSession(rid="o", session_id="bob", streaming=is_streaming, tenant=bob))

    def names() -> list[str]:
        reply = driver.session(ListSessions(rid="list"))
        return [each["session_id"] for each in reply.data["sessions"]]

    everyone = ["ann0", "ann1", "ann2", "bob"]
    session = SessionTurn(id="bob")
    driver.submit(generate("x", [2] * 9, 2, regex="a+", session=session, tenant=bob))
    assert names() == everyone
    driver.scheduler.handle(GrammarReady("x", REFUSALS[0] if is_refused else None))
    driver.collect()
    assert names() == (everyone if is_refused else everyone[1:])
    driver.run()
    assert (driver.finish["x"].status_code == 400) == is_refused
    driver.scheduler.audit()
    driver.check_replay()
