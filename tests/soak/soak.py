"""A server under mixed load for as long as one likes, brought to rest again and again.

Owns the rounds (load, then rest and proof), the table, and the verdict. What clients do is in
`load.py`. The server runs with everything that makes memory move: two ranks, a small pool, forced
retracts, drafts, and books that are proved after every step.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil

from tests.live.live_server import LiveServer
from tests.soak.load import Clients
from tests.soak.resident_memory import ResidentMemory, is_growing

FLAGS = (
    *("--dp-size", "2", "--context-length", "1280", "--max-running-requests", "8"),
    *("--max-total-tokens", "1536", "--schedule-conservativeness", "0.3"),
    *("--chunked-prefill-size", "128", "--decode-log-interval", "0"),
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
    *("--test-retract", "--test-retract-interval", "5"),
    *("--check-memory", "busy", "--memory-error-action", "crash"),
)
NUM_CLIENTS = 12
MIN_ACCURACY = 0.97
MAX_RESAMPLED_SHARE = 0.005
# After so many there is nothing more to learn.
MAX_FAILURES = 10
_ROUNDS = 20  # at least, so that there are samples enough
_ROUND_S = 15.0  # at most
_LINE_EVERY_S = 60.0
_FAILURE_CHARS = 500
HEADER = (
    f"{'minute':>6} {'requests':>9} {'retracts':>9} {'evicted':>8} {'accepted':>9} "
    f"{'right':>7} {'near ties':>9} {'server MiB':>11} {'engine MiB':>11} {'failures':>8}"
)


class Soak:
    """One soak of a running server; `failures` says what went wrong."""

    def __init__(self, server: LiveServer, minutes: float, seed: int) -> None:
        self.failures: list[str] = []
        self._server = server
        self._total_s = minutes * 60
        self._memory = ResidentMemory(server.process.pid)
        self._rng = random.Random(seed)
        self._clients = Clients(server.url)
        self._counters: dict[str, Any] = {}
        self._start_s = time.monotonic()

    def run(self) -> None:
        """Until the time is up, too much failed, or the server is gone."""
        print(HEADER, flush=True)
        asyncio.run(self._run())

    async def _run(self) -> None:
        line_at_s = _LINE_EVERY_S
        round_s = min(_ROUND_S, self._total_s / _ROUNDS)
        async with self._clients:
            while self._now_s < self._total_s and len(self.failures) < MAX_FAILURES:
                until_s = min(self._now_s + round_s, self._total_s)
                await asyncio.gather(*(self._client(until_s) for _ in range(NUM_CLIENTS)))
                if not self._prove_at_rest():
                    return
                if self._now_s >= line_at_s:
                    line_at_s += _LINE_EVERY_S
                    print(self._line(), flush=True)

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _client(self, until_s: float) -> None:
        rng = random.Random(self._rng.getrandbits(64))
        while self._now_s < until_s and len(self.failures) < MAX_FAILURES:
            try:
                await self._clients.one(rng)
            except AssertionError as error:
                self._fail(str(error))
            except (httpx.HTTPError, openai.OpenAIError) as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        self.failures.append(" ".join(text.split())[:_FAILURE_CHARS])

    def _prove_at_rest(self) -> bool:
        """Nothing runs now: is all memory accounted for? False if the server is gone."""
        if (code := self._server.process.poll()) is not None:
            self._fail(f"the server ended with exit code {code}")
            return False
        try:
            self._server.assert_nothing_leaked()
            self._memory.sample(self._now_s)
            if len(self._memory.samples) % 2 == 0:  # else the next round finds what is cached
                self._server.assert_flush_frees_everything()
            self._counters = self._server.get("/get_server_info")["counters"]
        except (AssertionError, httpx.HTTPError, psutil.NoSuchProcess) as error:
            self._fail(f"at rest: {error}")
        return True

    def _line(self) -> str:
        counters, clients = self._counters, self._clients
        mib = self._memory.mib
        return (
            f"{self._now_s / 60:>6.1f} {counters['requests_finished']:>9,} "
            f"{counters['requests_retracted']:>9,} {counters['evicted_pages']:>8,} "
            f"{counters['accepted_draft_tokens']:>9,} "
            f"{clients.num_right / max(clients.num_asked, 1):>7.1%} {clients.num_near_ties:>9} "
            f"{mib['server']:>11.1f} {mib['engine']:>11.1f} {len(self.failures):>8}"
        )

    def conclude(self) -> str:
        """Judge the whole, adding to `failures`; the summary."""
        if self._counters:
            self.failures += self._defects()
        clients = self._clients
        lines = [self._line()] if self._counters else []
        lines += [f"{kind:<20} {clients.counts[kind]:>8,}" for kind in clients.kinds]
        for name, (before, after) in self._memory.growth().items():
            lines.append(
                f"{name} memory: {before / (1 << 20):.1f} MiB at first, "
                f"{after / (1 << 20):.1f} MiB at last"
            )
        lines.append(f"{clients.num_resampled} answers with a seed were not those of before")
        lines += [f"FAILED: {failure}" for failure in self.failures] or ["all well"]
        return "\n".join(lines)

    def _defects(self) -> Iterator[str]:
        """What only the whole shows."""
        clients, counters = self._clients, self._counters
        if clients.num_right < MIN_ACCURACY * clients.num_asked:
            yield f"only {clients.num_right} of {clients.num_asked} questions answered right"
        sampled = clients.counts["sampled_with_seed"]
        if clients.num_resampled > max(1, MAX_RESAMPLED_SHARE * sampled):
            yield f"{clients.num_resampled} of {sampled} answers with a seed changed"
        for name in ("requests_force_retracted", "evicted_pages", "accepted_draft_tokens"):
            if not counters[name]:
                yield f"{name} is 0: the soak did not do what it is for"
        if counters["compiles_after_ready"]:
            yield f"{counters['compiles_after_ready']} compilations after ready"
        for kind in clients.kinds:
            if not clients.counts[kind]:
                yield f"no client did {kind}"
        for name, (before, after) in self._memory.growth().items():
            if is_growing(before, after):
                yield f"memory of {name} grew from {before:,} to {after:,} bytes"
