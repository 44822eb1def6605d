"""What the host does for a request does not grow with the sessions that are idle beside it.

Work is counted, not timed: executed lines of the engine's code, and comparisons of session ids,
which a search through a dictionary's values would show up in.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import sgl_jax
from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    GenerateRequest,
    OpenSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.eviction.shadow_caches import ShadowCaches
from sgl_jax.scheduler.events import PlanStep, ResultRead, TakeOutputs
from sgl_jax.scheduler.scheduler import Scheduler
from tests.scheduler.driver import forecast_always, generate, make_sizes

PACKAGE = str(Path(sgl_jax.__file__).parent)
FEW, MANY = 40, 500
# Of calls to these the cost is the same only on average: a heap, a ring that is full or not, and
# pages that left, which are written down many at once.
NOT_COUNTED = ("EvictionQueue.", "GhostPages.")


@pytest.fixture(autouse=True)
def _every_step_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of outputs are otherwise counted anew in every eighth step, and shadows read paths
    once these have enough pages."""
    monkeypatch.setattr("sgl_jax.scheduler.scheduler.OUTPUT_LENGTHS_INTERVAL", 1)
    monkeypatch.setattr(ShadowCaches, "is_due", True)


class SessionId(str):
    """An id that counts how often one is compared."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        SessionId.num_compared += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


class Work:
    """How many lines of the package ran, and how many ids were compared."""

    num_lines = 0
    num_compared = 0


@contextmanager
def counted() -> Iterator[Work]:
    work = Work()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_qualname.startswith(NOT_COUNTED):
            return None
        work.num_lines += event == "line"
        return trace

    before, SessionId.num_compared = sys.gettrace(), 0
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before)
        work.num_compared = SessionId.num_compared


class Engine:
    """A scheduler with `num_idle` idle sessions of two pages each, called 0, 1, ..., which differ
    from the first token on. The proofs after each step, which walk everything, are off.

    With a short `max_context_len`, memory is ample for any request beside few sessions as well.
    """

    def __init__(
        self, num_idle: int, *, num_free: int = 100, max_context_len: int = 1024, **config: object
    ) -> None:
        sizes = make_sizes(
            num_rows=MANY + 50,
            num_pages=1 + 2 * num_idle + num_free,
            max_chunk_tokens=MANY + 50,
            max_context_len=max_context_len,
            vocab_size=2 * MANY,
            max_prompt_logprob_tokens=8,
        )
        config = {"session_memory_fraction": 1.0} | config
        settings = SchedulerArgs(
            schedule_policy="fcfs",
            schedule_conservativeness=0.0,
            max_sessions=2 * MANY,
            max_queued_requests=2 * MANY,
            **config,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(sizes, settings)
        self.executor = FakeExecutor(sizes)
        self.memory = self.scheduler.ranks[0].memory
        for number in range(num_idle):
            message = OpenSession(rid="", session_id=self.name(number), streaming=True)
            assert self.scheduler.handle(message).ok
        for number in range(num_idle):
            self.scheduler.handle(self.turn(number, [number] * 4))
        self.run()
        assert self.memory.sessions.num_idle == num_idle
        self.scheduler.audit()

    @staticmethod
    def name(number: int) -> SessionId:
        return SessionId(f"session {number}")

    def turn(self, number: int, new: list[int], rid: str = "", count: int = 2) -> GenerateRequest:
        turn = SessionTurn(id=self.name(number))
        return generate(rid or f"first of {number}", new, count, session=turn)

    def step(self) -> None:
        plan = self.scheduler.handle(PlanStep())
        assert plan is not None
        self.scheduler.handle(
            ResultRead(plan.step_id, self.executor.result(self.executor.launch(plan)))
        )
        self.scheduler.handle(TakeOutputs())

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()


def serve_a_plain_request(engine: Engine, rid: str) -> None:
    engine.scheduler.handle(generate(rid, [2 * MANY - 1] * 9, 3))
    engine.run()


def take_a_turn(engine: Engine, rid: str) -> None:
    engine.scheduler.handle(engine.turn(7, [1, 2, 3], rid))
    engine.run()


def abort_a_turn(engine: Engine, rid: str) -> None:
    engine.scheduler.handle(engine.turn(8, [1, 2, 3], rid, 9))
    engine.step()
    engine.scheduler.handle(AbortRequest(rid=rid))
    assert engine.scheduler.is_idle


def stop_a_turn_late(engine: Engine, rid: str) -> None:
    engine.scheduler.handle(engine.turn(9, [1, 2, 3], rid, 5))
    engine.run()
    turn = SessionTurn(id=engine.name(9))
    engine.scheduler.handle(StopRequest(rid=rid, num_output_tokens=1, session=turn))
    # The cut may have released its lease; the next turn opens another.
    engine.scheduler.handle(engine.turn(9, [4], f"{rid}, after"))
    engine.run()


def close_a_session_and_open_it_again(engine: Engine, rid: str) -> None:
    assert engine.scheduler.handle(CloseSession(rid="", session_id=engine.name(10))).ok
    message = OpenSession(rid="", session_id=engine.name(10), streaming=True)
    assert engine.scheduler.handle(message).ok
    engine.scheduler.handle(engine.turn(10, [10] * 4, rid))
    engine.run()


@pytest.mark.parametrize("radix", [True, False])
def test_a_request_costs_the_same_beside_forty_idle_sessions_and_five_hundred(
    radix: bool,
) -> None:
    acts = [
        serve_a_plain_request,
        take_a_turn,
        abort_a_turn,
        stop_a_turn_late,
        close_a_session_and_open_it_again,
    ]
    costs: dict[int, dict[str, tuple[int, int]]] = {FEW: {}, MANY: {}}
    for num_idle in (FEW, MANY):
        engine = Engine(
            num_idle,
            max_context_len=160,
            disable_radix_cache=not radix,
            session_memory_fraction=0.99,
        )
        for act in acts:
            act(engine, f"{act.__name__}, before")
            act(engine, f"{act.__name__}, once more before")
            with counted() as work:
                act(engine, act.__name__)
            assert engine.memory.sessions.num_idle == num_idle
            costs[num_idle][act.__name__] = work.num_lines, work.num_compared
        engine.scheduler.audit()
    assert costs[FEW] == costs[MANY]
    assert all(num_lines > 100 for num_lines, _ in costs[FEW].values())


@pytest.mark.parametrize("radix", [True, False])
def test_each_of_many_evicted_sessions_costs_the_same(
    radix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are evicted for one request, and however many stay."""
    # The memory of many is ample, which saves the forecast of a reserve.
    forecast_always(monkeypatch)
    costs = {}
    for num_idle in (FEW, MANY):
        engine = Engine(num_idle, num_free=2, disable_radix_cache=not radix)
        # The first request of a limit begins a class of output lengths.
        engine.scheduler.handle(generate("first", [2 * MANY - 1] * 3, 1))
        engine.run()
        for num_evicted in (5, 10, 15):
            # It needs the pages that are free now, and as many as those sessions have.
            num_pages = engine.memory.num_available_pages + 2 * num_evicted
            rid, before = f"evicts {num_evicted}", engine.memory.sessions.num_idle
            # Tokens of its own: of those of another that was evicted, the cache has a memory.
            prompt = [MANY + num_evicted] * (4 * num_pages - 1)
            engine.scheduler.handle(generate(rid, prompt, 1))
            with counted() as work:
                engine.step()
            assert engine.memory.sessions.num_idle == before - num_evicted
            costs[num_idle, num_evicted] = work.num_lines
            engine.run()
            engine.memory.cache.evict(engine.memory.cache.num_evictable[0])
            engine.scheduler.audit()
    for num_evicted in (5, 10, 15):
        assert costs[FEW, num_evicted] == costs[MANY, num_evicted], costs
    # Each costs the same, but the shadow caches read paths several at a time.
    first, second = (costs[FEW, k + 5] - costs[FEW, k] for k in (5, 10))
    assert abs(second - first) <= 0.02 * first, costs


def test_to_close_a_session_or_let_its_turn_move_costs_the_same_with_any_queue() -> None:
    costs = []
    for num_waiting in (FEW, MANY):
        engine = Engine(FEW, num_free=400)
        scheduler = engine.scheduler
        for number in range(num_waiting):
            scheduler.handle(generate(f"waits {number}", [MANY + number] * 9, 2))
        scheduler.handle(engine.turn(1, [1], "turn"))
        with counted() as closing:
            assert scheduler.handle(CloseSession(rid="", session_id=engine.name(1))).ok
        assert engine.memory.sessions.num_idle == FEW - 1
        costs.append(closing.num_lines)
        engine.run()
        scheduler.audit()
    assert costs[0] == costs[1]
    assert costs[0] > 5
