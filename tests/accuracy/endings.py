"""Requests that end in every way there is, each judged by what the reference answers.

Owns what is sent and what must come back. An answer of 504 is right for any request, since the
server these are sent to has a time limit and may be slow; the test sees to it that no ending is
missed.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx

from sgl_jax.text.tokenizer import Tokenizer
from tests.accuracy.near_ties import differences, greedy
from tests.accuracy.workload import Outcome, client_of, generations, questions
from tests.live.live_server import DEMO

# Seconds. Enough for a short request on any machine, with all the others beside it.
REQUEST_TIMEOUT_S = 15
NUM_OF_EACH = 5
# Beside 8 that run at once, so that some wait.
CONCURRENCY = 12
# Far more tokens than any CPU generates within the time limit.
NUM_DOOMED, DOOMED_TOKENS = 80, 1000
_TIMED_OUT = "time-out"


class Endings:
    """One load, against one server; `counts` says how often each ending was met."""

    def __init__(self, client: httpx.AsyncClient, reference: Outcome) -> None:
        self.counts: Counter[str] = Counter()
        self._client = client
        self._reference = reference
        self._tokenizer = Tokenizer.load(str(DEMO), None)

    async def run(self) -> None:
        """All endings mixed, then more work than can be done in time."""
        kinds: list[Callable[[int], Awaitable[str]]] = [
            *(self.end_of_sequence, self.stop_token, self.stop_string, self.length),
            *(self.abort, self.disconnect, self.error),
        ]
        work = [(kind, i) for kind in kinds for i in range(NUM_OF_EACH)]
        work += [(self.doomed, 0), (self.doomed, 1)]
        random.Random(1).shuffle(work)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(kind: Callable[[int], Awaitable[str]], i: int) -> None:
            async with slots:
                self.counts[await kind(i)] += 1

        await asyncio.gather(*(one(kind, i) for kind, i in work))
        endings = await asyncio.gather(*(self.doomed(i) for i in range(NUM_DOOMED)))
        self.counts.update(endings)

    async def end_of_sequence(self, i: int) -> str:
        """The model says that it is done."""
        body = {"model": "demo", "messages": questions()[i].messages, "temperature": 0}
        answer = await self._client.post("/v1/chat/completions", json=body)
        if answer.status_code == 504:
            return _TIMED_OUT
        (choice,) = answer.raise_for_status().json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == self._reference.replies[i]
        return "end of sequence"

    async def stop_token(self, i: int) -> str:
        wanted = self._reference.outputs[i]
        stop = wanted[10 + i]
        answer = await self._generate(i, stop_token_ids=[stop])
        if answer is None:
            return _TIMED_OUT
        if await self._is_as_wanted(i, answer["output_ids"]):
            assert answer["output_ids"] == wanted[: wanted.index(stop) + 1]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        return "stop token"

    async def stop_string(self, i: int) -> str:
        i = 2 * i % len(generations())  # conversations, which are text
        text = self._tokenizer.decode(self._reference.outputs[i])
        stop = text[20:24]
        answer = await self._generate(i, stop=[stop])
        if answer is None:
            return _TIMED_OUT
        if await self._is_as_wanted(i, answer["output_ids"]):
            assert answer["text"] == text[: text.index(stop)]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        return "stop string"

    async def length(self, i: int) -> str:
        answer = await self._generate(i, max_new_tokens=20 + 5 * i)
        if answer is None:
            return _TIMED_OUT
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 20 + 5 * i}
        await self._is_as_wanted(i, answer["output_ids"])
        return "length"

    async def abort(self, i: int) -> str:
        """Another request of the client ends it; the answer is what there is."""
        rid = f"abort {i}"

        async def end_it(num_events: int) -> bool:
            if num_events == 2 + i:
                await self._client.post("/abort_request", json={"rid": rid})
            return True

        last = await self._stream(i, rid, end_it)
        if last is None:
            return _TIMED_OUT
        reason = last["meta_info"]["finish_reason"]["type"]
        await self._is_as_wanted(i, last["output_ids"])
        # The last tokens may have been faster than the abort.
        assert reason in ("abort", "length")
        return reason

    async def disconnect(self, i: int) -> str:
        """The client goes away in the midst of its stream."""

        async def leave(num_events: int) -> bool:
            await asyncio.sleep(0)
            return num_events < 2 + i

        last = await self._stream(i, f"disconnect {i}", leave)
        return _TIMED_OUT if last is None else "disconnect"

    async def error(self, i: int) -> str:
        """What cannot be served: too long for a row, or for a rank that does not exist."""
        prompt = generations()[i][0]
        body: dict[str, Any] = {"input_ids": [*prompt] * 1000, "sampling_params": greedy(5)}
        if i % 2:
            body = {"input_ids": prompt, "sampling_params": greedy(5), "dp_rank": 99}
        answer = await self._client.post("/generate", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        return "error"

    async def doomed(self, i: int) -> str:
        """More tokens than can be had in time, if others want as many."""
        answer = await self._generate(i % len(generations()), max_new_tokens=DOOMED_TOKENS)
        return _TIMED_OUT if answer is None else "length"

    async def _generate(self, i: int, **sampling: Any) -> dict[str, Any] | None:
        """The answer to a long generation, other than usual; None if it took too long."""
        prompt, count = generations()[i]
        body = {"input_ids": prompt, "sampling_params": greedy(count) | sampling}
        answer = await self._client.post("/generate", json=body)
        if answer.status_code == 504:
            return None
        decoded: dict[str, Any] = answer.raise_for_status().json()
        return decoded

    async def _stream(
        self, i: int, rid: str, goes_on: Callable[[int], Coroutine[Any, Any, bool]]
    ) -> dict[str, Any] | None:
        """The last event read, while `goes_on` says so; None if it took too long."""
        prompt, count = generations()[i]
        body = {"input_ids": prompt, "sampling_params": greedy(count), "stream": True, "rid": rid}
        last: dict[str, Any] = {}
        num_events = 0
        async with self._client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code == 504:
                return None
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line[6:])
                num_events += 1
                if "error" in last:
                    assert last["error"]["code"] == "timeout", last
                    return None
                if not await goes_on(num_events):
                    break  # leaving the block closes the connection
        return last

    async def _is_as_wanted(self, i: int, got: list[int]) -> bool:
        """Whether output is the beginning of the reference's; if not, it must be a near tie."""
        wanted = self._reference.outputs[i][: len(got)]
        if got == wanted:
            return True
        await differences(self._client, generations()[i][0], wanted, got[: len(wanted)])
        return False


def run_endings(url: str, reference: Outcome) -> Counter[str]:
    """The whole load against the server at `url`: how often each ending was met."""

    async def run() -> Counter[str]:
        async with client_of(url) as client:
            endings = Endings(client, reference)
            await endings.run()
            return endings.counts

    return asyncio.run(run())
