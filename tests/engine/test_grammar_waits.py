"""The engine loop never waits for a grammar: only the requests that have it do.

The real engine loop, scheduler and executor. Compilations are held up until the test lets them go.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.messages import AbortRequest, FrontMessage, GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.grammar import compile_queue, compiler
from sgl_jax.replay.__main__ import main as replay
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.loop_waits import watching
from tests.engine.scripted_channel import ScriptedChannel
from tests.support.waiting import TIMEOUT_S

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
SLOW_S = 10 * TIMEOUT_S


class Held:
    """llguidance, held up while `may_run` is not set; `num_begun` counts its compilations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.num_begun = 0
        self._make = compiler.LLMatcher  # type: ignore[attr-defined]
        monkeypatch.setattr(compiler, "LLMatcher", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_begun += 1
        assert self.may_run.wait(SLOW_S)
        return self._make(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make, name)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.may_run.set()


@pytest.fixture
def make_core() -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def make(**settings: Any) -> EngineCore:
        args: dict[str, Any] = {
            "model_path": DEMO,
            "device": "cpu",
            "context_length": 128,
            "max_total_tokens": 512,
            "max_running_requests": 2,
            "chunked_prefill_size": 2,  # few shapes
            "check_memory": "busy",
            "warmup": "none",
        }
        cores.append(EngineCore(ServerArgs(**args | settings)))
        return cores[-1]

    yield make
    for core in cores:
        core._close()


def plain(rid: str, num_tokens: int = 20) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=[5, 6, 7], sampling=sampling)


def structured(rid: str, regex: str = "[0-9]{3}", **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, regex=regex)
    return GenerateRequest(rid=rid, input_ids=[5, 6, 7], sampling=sampling, **fields)


def turns_until(condition: Callable[[], object], what: str) -> Iterator[list[FrontMessage]]:
    """Empty polls, until it holds."""
    deadline = time.monotonic() + SLOW_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
        yield []


def run(core: EngineCore, script: Iterator[list[FrontMessage]]) -> ScriptedChannel:
    """Serve the script, shut down; nothing may be left."""
    channel = ScriptedChannel(script)
    core.run(channel, close=False)
    core.scheduler.audit()
    for view in core.scheduler.memory_views():
        assert view.leased_pages == 0
        assert view.free_rows == view.total_rows
    return channel


def num_finished(core: EngineCore) -> int:
    return core.scheduler.counters()["requests_finished"]


def test_the_loop_never_waits_for_another_thread(
    make_core: Callable[..., EngineCore], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the compiled grammar was evicted before its request came."""
    monkeypatch.setattr(compile_queue, "_MAX_KEPT", 1)
    with watching(monkeypatch) as waits:
        core = make_core()

        def script() -> Iterator[list[FrontMessage]]:
            waits.thread = threading.current_thread()
            yield [plain("first"), structured("early")]
            yield from turns_until(lambda: num_finished(core) == 2, "they end")
            held.may_run.clear()
            for number in range(8):
                yield [structured(f"flood {number}", f"a{{{number + 2}}}")]
            yield [plain("a"), structured("x", "[0-9]{5}"), structured("bad", "(a")]
            yield [plain("b", 60), structured("compiled before")]
            yield from turns_until(lambda: num_finished(core) == 5, "others end meanwhile")
            assert core.state()["waiting_for"]["grammar"] == 10
            held.may_run.set()
            yield from turns_until(lambda: core.scheduler.is_idle, "all end")
            waits.thread = None  # the end of the loop may wait for threads

        channel = run(core, script())
    assert waits.found == [], waits.found[0]
    ends = channel.ends()
    assert (ends["bad"].status_code, ends["bad"].param) == (400, "regex")
    others = {rid: end.type for rid, end in ends.items() if rid != "bad"}
    assert set(others.values()) <= {"stop", "length"}, others


def test_a_matcher_stays_with_its_request_until_the_end(
    make_core: Callable[..., EngineCore],
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Through retracts and evictions, with one compilation for each grammar."""
    monkeypatch.setattr(compile_queue, "_MAX_KEPT", 1)
    recording = tmp_path / "engine.events"
    settings: dict[str, Any] = {
        "test_retract": True,
        "test_retract_interval": 3,
        "record_events": str(recording),
    }
    core = make_core(**settings)
    requests = [structured(str(n), f"[0-9]{{{n + 4}}}") for n in range(4)]

    def script() -> Iterator[list[FrontMessage]]:
        yield list(requests)
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    channel, tokenizer = run(core, script()), Tokenizer.load(DEMO)
    for request in requests:
        text = tokenizer.decode(channel.tokens()[request.rid])
        assert re.fullmatch(request.sampling.regex or "", text), text
    assert held.num_begun == len(requests)
    assert core.scheduler.counters()["requests_force_retracted"] > 0
    core._recording.close()
    assert replay([str(recording)]) == 0


def test_what_clients_have_left_is_not_compiled(
    make_core: Callable[..., EngineCore], held: Held
) -> None:
    core = make_core()
    held.may_run.clear()
    rids = [f"gone {number}" for number in range(20)]

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured(rid, f"a{{{i + 2}}}") for i, rid in enumerate(rids)]
        yield from turns_until(lambda: held.num_begun, "one begins")
        yield [AbortRequest(rid=rid) for rid in rids]
        held.may_run.set()
        yield [structured("x")]
        yield from turns_until(lambda: core.scheduler.is_idle, "it ends")

    channel = run(core, script())
    assert channel.ends()["x"].type == "stop"
    assert held.num_begun == 2


def test_no_full_walk_of_the_memory_runs_in_front_of_a_new_grammar(
    make_core: Callable[..., EngineCore], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    audits: list[None] = []
    audit = core.scheduler.audit
    monkeypatch.setattr(core.scheduler, "audit", lambda: audits.append(audit()))

    def script() -> Iterator[list[FrontMessage]]:
        yield [plain("first")]
        yield from turns_until(lambda: audits, "the engine rests")
        audits.clear()
        held.may_run.clear()
        yield [structured("x")]
        for _ in range(5):
            yield []
        assert core.state()["waiting_for"]["grammar"] == 1
        assert len(audits) == 0
        held.may_run.set()
        yield from turns_until(lambda: audits, "the engine rests again")
        yield []
        assert len(audits) == 1

    assert run(core, script()).ends()["x"].type == "stop"


def test_a_key_that_floods_is_refused_and_others_are_served(
    make_core: Callable[..., EngineCore], held: Held
) -> None:
    core = make_core(max_queued_requests=8)
    held.may_run.clear()
    flood, other = Tenant(name="flood"), Tenant(name="other")

    def script() -> Iterator[list[FrontMessage]]:
        yield [structured(f"f{i}", f"a{{{i + 2}}}", tenant=flood) for i in range(6)]
        yield [structured("x", tenant=other)]
        held.may_run.set()
        yield from turns_until(lambda: core.scheduler.is_idle, "all end")

    ends = run(core, script()).ends()
    refused = {rid for rid, end in ends.items() if end.status_code is not None}
    assert refused == {"f4", "f5"}
    assert (ends["f4"].status_code, ends["f4"].code) == (429, "tenant_queue_full")
    assert "grammars of tenant 'flood'" in (ends["f4"].message or "")
