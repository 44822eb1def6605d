"""A server under load for as long as one likes, brought to rest again and again.

Owns the rounds (load, then rest and proof), the table, and the verdict. What clients do is in
`load.py` (a mixed load) and `conversations.py` (sessions), what befalls the server beside them in
`faults.py`. For the mixed load the server runs with everything that makes memory move: two ranks,
a small pool, forced retracts, drafts, and a ledger that is proved after every step.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import httpx
import openai
import psutil

from tests.live.live_server import WARM, LiveServer
from tests.soak.faults import Faults
from tests.soak.refusals import described
from tests.soak.resident_memory import ResidentMemory, is_growing
from tests.soak.watcher import Watcher

FLAGS = (
    *("--dp-size", "2", "--context-length", "1280", "--max-running-requests", "8"),
    *("--max-total-tokens", "1536", "--schedule-conservativeness", "0.3"),
    *("--chunked-prefill-size", "128", "--decode-log-interval", "0"),
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
    *("--test-retract", "--test-retract-interval", "5"),
    *("--check-memory", "busy", "--memory-error-action", "crash"),
    *WARM,
)
NUM_CLIENTS = 12
# After so many there is nothing more to learn.
MAX_FAILURES = 10
_ROUNDS = 20  # at least, so that there are samples enough
_ROUND_S = 15.0  # at most
_LINE_EVERY_S = 60.0
_FAILURE_CHARS = 500
HEADER = (
    f"{'minute':>6} {'requests':>9} {'retracts':>9} {'evicted':>8} {'accepted':>9} "
    f"{'server MiB':>11} {'engine MiB':>11} {'failures':>8}  answers"
)


class Load(Protocol):
    """What clients do: `Clients` or `Conversations`. A context manager."""

    counts: Counter[str]
    refusals: Counter[str]

    @property
    def kinds(self) -> Sequence[str]:
        """Of what is counted; all of it must happen."""

    async def learn(self) -> None:
        """Ask the server what is right, before the soak begins."""

    async def one(self, rng: random.Random) -> None:
        """What comes next; raises AssertionError for a wrong answer."""

    def progress(self) -> str:
        """For a line of the table."""

    def defects(self, counters: Mapping[str, int]) -> Iterator[str]:
        """What only the whole shows."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: object) -> None: ...


class Soak:
    """One soak of a running server; `failures` says what went wrong.

    Args:
        keeps_sessions: sessions stay open while the server is at rest, and are closed at the end.
    """

    def __init__(
        self,
        server: LiveServer,
        load: Load,
        minutes: float,
        seed: int,
        *,
        faults: Faults | None = None,
        keeps_sessions: bool = False,
    ) -> None:
        self.failures: list[str] = []
        self._server = server
        self._total_s = minutes * 60
        self._memory = ResidentMemory(server.process.pid)
        self._rng = random.Random(seed)
        self._load = load
        self._faults = faults
        # Faults stop the processes that answer it.
        self._watcher = None if faults else Watcher(server.url)
        self._keeps_sessions = keeps_sessions
        self._counters: dict[str, Any] = {}
        self._start_s = time.monotonic()

    def run(self) -> None:
        """Until the time is up, too much failed, or the server is gone."""
        print(HEADER, flush=True)
        asyncio.run(self._run())

    async def _run(self) -> None:
        line_at_s = _LINE_EVERY_S
        round_s = min(_ROUND_S, self._total_s / _ROUNDS)
        beside = self._faults or self._watcher or contextlib.nullcontext()
        async with self._load, beside:
            await self._load.learn()
            if self._faults:
                await self._faults.learn()
            self._start_s = time.monotonic()
            while self._now_s < self._total_s and len(self.failures) < MAX_FAILURES:
                until_s = min(self._now_s + round_s, self._total_s)
                clients = [self._client(until_s) for _ in range(NUM_CLIENTS)]
                await asyncio.gather(*clients, self._befall(until_s))
                if self._watcher:
                    for failure in self._watcher.failures:
                        self._fail(failure)
                    self._watcher.failures.clear()
                if not self._prove_at_rest():
                    return
                if self._now_s >= line_at_s:
                    line_at_s += _LINE_EVERY_S
                    print(self._line(), flush=True)

            if self._keeps_sessions:
                self._keeps_sessions = False
                self._server.close_sessions()
                self._prove_at_rest()

    async def _befall(self, until_s: float) -> None:
        if self._faults:
            await self._faults.run(self._rng.getrandbits(64), self._start_s + until_s)
            for failure in self._faults.failures:
                self._fail(failure)
            self._faults.failures.clear()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _client(self, until_s: float) -> None:
        rng = random.Random(self._rng.getrandbits(64))
        while self._now_s < until_s and len(self.failures) < MAX_FAILURES:
            try:
                await self._load.one(rng)
            except AssertionError as error:
                self._fail(str(error))
            except (httpx.HTTPError, openai.OpenAIError) as error:
                self._fail(described(error))

    def _fail(self, text: str) -> None:
        failure = " ".join(text.split())[:_FAILURE_CHARS]
        print(f"{self._now_s / 60:>6.1f} FAILED: {failure}", flush=True)
        self.failures.append(failure)

    def _prove_at_rest(self) -> bool:
        """Nothing runs now: is all memory accounted for? False if the server is gone."""
        if (code := self._server.process.poll()) is not None:
            self._fail(f"the server ended with exit code {code}")
            return False
        try:
            self._assert_balance()
            self._memory.sample(self._now_s)
            if (
                not self._keeps_sessions and len(self._memory.samples) % 2 == 0
            ):  # else the next round finds what is cached
                self._server.assert_flush_frees_everything()
            self._counters = self._server.get("/get_server_info")["counters"]
        except (AssertionError, httpx.HTTPError, psutil.NoSuchProcess) as error:
            self._fail(f"at rest: {error}")
        return True

    def _assert_balance(self) -> None:
        if self._keeps_sessions:
            self._server.assert_balance()
            return
        if self._faults:
            self._server.close_sessions()  # that malformed requests have opened
        self._server.assert_nothing_leaked()

    def _line(self) -> str:
        counters = self._counters
        mib = self._memory.mib
        return (
            f"{self._now_s / 60:>6.1f} {counters['requests_finished']:>9,} "
            f"{counters['requests_retracted']:>9,} {counters['evicted_pages']:>8,} "
            f"{counters['accepted_draft_tokens']:>9,} "
            f"{mib['server']:>11.1f} {mib['engine']:>11.1f} {len(self.failures):>8}  "
            f"{self._load.progress()}"
        )

    def conclude(self) -> str:
        """Judge the whole, adding to `failures`; the summary."""
        if self._counters:
            self.failures += self._defects()
        lines = [self._line()] if self._counters and self._memory.samples else []
        sources = list(filter(None, (self._load, self._faults, self._watcher)))
        for source in sources:
            lines += [f"{kind:<20} {source.counts[kind]:>8,}" for kind in source.kinds]  # type: ignore[attr-defined]
            lines += [f"refused: {code:<20} {n:>8,}" for code, n in source.refusals.items()]  # type: ignore[attr-defined]
        for name, (before, after) in self._memory.growth().items():
            lines.append(
                f"{name} memory: {before / (1 << 20):.1f} MiB at first, "
                f"{after / (1 << 20):.1f} MiB at last"
            )
        if self._faults:
            lines.append(f"{self._faults.counts['right answers']:,} right answers amid faults")
        lines += [f"FAILED: {failure}" for failure in self.failures] or ["all well"]
        return "\n".join(lines)

    def _defects(self) -> Iterator[str]:
        """What only the whole shows."""
        yield from self._load.defects(self._counters)
        if compiles := self._counters["compiles_after_ready"]:
            yield f"{compiles} compilations after ready"
        for source in filter(None, (self._load, self._faults, self._watcher)):
            for kind in source.kinds:  # type: ignore[attr-defined]
                if not source.counts[kind]:  # type: ignore[attr-defined]
                    yield f"{kind} did not happen"
        if self._faults and not self._faults.refusals["queue_full"]:
            yield "no flood was refused"
        if "Traceback" in self._server.log.read_text(errors="replace"):
            yield f"a traceback in {self._server.log}"
        for name, (before, after) in self._memory.growth().items():
            if is_growing(before, after):
                yield f"memory of {name} grew from {before:,} to {after:,} bytes"
