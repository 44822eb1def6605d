"""Grammars of requests between the queue that compiles them and the scheduler, both scripted."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.shares import Tenant
from sgl_jax.engine.loop.request_grammars import RequestGrammars
from sgl_jax.scheduler.events import GrammarReady
from tests.grammar.test_compile_queue import Compiler
from tests.support.waiting import until

KEY = Tenant(name="key")


class Rig:
    """Requests, and the events that end their wait for a grammar."""

    def __init__(self, *, has_shares: bool = False, max_queued: int = 8) -> None:
        self.compiler = Compiler()
        self.compiler.queue.close()
        self.waiting: dict[str, Any] = {}
        self.ready: list[str] = []
        self.refusals: dict[str, FinishReason] = {}
        compiler: Any = SimpleNamespace(compile=self.compiler.compile, follow=str)
        scheduler: Any = self
        self.grammars = RequestGrammars(scheduler, compiler, max_queued, has_shares=has_shares)

    def awaits_grammar(self, rid: str) -> Any:
        return self.waiting.get(rid)

    def handle(self, event: GrammarReady) -> None:
        del self.waiting[event.rid]
        if event.refusal is None:
            self.ready.append(event.rid)
        else:
            self.refusals[event.rid] = event.refusal

    def submit(self, rid: str, regex: str, tenant: Tenant | None = None) -> None:
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, regex=regex)
        message = GenerateRequest(rid=rid, input_ids=[1], sampling=sampling, tenant=tenant)
        self.waiting[rid] = SimpleNamespace(message=message, matcher=None)
        self.grammars.begin(message)

    def hand_out_all(self) -> None:
        def has_all() -> bool:
            self.grammars.hand_out()
            return not self.waiting

        self.compiler.go(100)
        until(has_all, "all grammars are compiled")


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.grammars.queue.close()
        rig.compiler.go(100)


def invented(number: int) -> Tenant:
    """A tenant by the name that a client sent with a request."""
    return Tenant(name=f"user {number}", is_pooled=True)


def test_users_that_one_client_makes_up_have_one_turn_together(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(has_shares=True, max_queued=100))
    for number in range(20):
        rig.submit(str(number), f"a{number}", invented(number))
    rig.compiler.begins()
    rig.submit("x", "b", KEY)
    rig.hand_out_all()
    assert rig.compiler.compiled[:3] == ["a0", "b", "a1"]


@pytest.mark.parametrize("tenants", [[None] * 8, [invented(number) for number in range(8)]])
def test_clients_without_a_share_of_their_own_leave_places_to_keys(
    rigs: list[Rig], tenants: list[Tenant | None]
) -> None:
    rigs.append(rig := Rig(has_shares=True))
    for number, tenant in enumerate(tenants):
        rig.submit(str(number), f"a{number}", tenant)
    assert list(rig.refusals) == ["4", "5", "6", "7"]
    refusal = rig.refusals["4"]
    assert (refusal.status_code, refusal.code) == (429, "tenant_queue_full")
    assert "clients that share a key or have none" in (refusal.message or "")
    rig.submit("x", "b", KEY)
    rig.hand_out_all()
    assert "x" in rig.ready


def test_without_shares_clients_without_a_tenant_take_all_places(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    for number in range(9):
        rig.submit(str(number), f"a{number}")
    assert list(rig.refusals) == ["8"]
    assert (rig.refusals["8"].status_code, rig.refusals["8"].code) == (503, "queue_full")


def test_a_grammar_of_many_requests_is_handed_out_in_parts(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    for number in range(600):
        rig.submit(str(number), "a")
    rig.compiler.go()
    until(lambda: rig.grammars.queue.ended, "it is compiled")
    gained = []
    while rig.grammars.is_busy:
        before = len(rig.ready)
        rig.grammars.hand_out()
        gained.append(len(rig.ready) - before)
    assert gained == [256, 256, 88]
    assert rig.ready == [str(number) for number in range(600)]
