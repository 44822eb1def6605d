"""Conversations that the device has evicted come back from host memory, as clients see it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live.live_server import LiveServer, live_server
from tests.live.test_restart import is_storing
from tests.live.test_sessions import Client
from tests.support.waiting import until

FLAGS = (
    *("--context-length", "512", "--max-running-requests", "2", "--chunked-prefill-size", "32"),
    # Each turn of a session is evicted at once, on both servers: else one would have more in place.
    *("--session-memory-fraction", "0", "--check-memory", "busy"),
)
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "16", "--hicache-fetch-policy", "always")
NUM_CONVERSATIONS, NUM_TURNS = 4, 3
PAGE_SIZE = 16


class Talks:
    """Conversations in turns with one server, the last of them in a session."""

    def __init__(self, server: LiveServer) -> None:
        self._chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self._client = Client(server)
        self._server = server
        self.said: list[Any] = []  # texts and log-probabilities
        self.cached: list[int] = []  # tokens

    def answer(self, messages: list[Any], **extra: Any) -> int:
        """Append the answer to `messages`; returns the tokens of the conversation."""
        until(lambda: not is_storing(self._server), "transfers end")
        answer = self._chat.chat.completions.create(
            model="demo",
            messages=messages,
            temperature=0,
            max_tokens=12,
            logprobs=True,
            extra_body=extra,
        )
        choice, usage = answer.choices[0], answer.usage
        messages.append({"role": "assistant", "content": choice.message.content})
        self.said.append([(each.token, each.logprob) for each in choice.logprobs.content])
        self.cached.append(usage.prompt_tokens_details.cached_tokens)
        return int(usage.total_tokens)

    def run(self) -> Iterator[tuple[int, int]]:
        """All turns; yields the tokens of history and the cached tokens of each later one."""
        rng = random.Random(5)
        names = [rng.sample(("Anna", "Ben", "Carla", "Dora"), 4) for _ in range(NUM_CONVERSATIONS)]
        talks = [
            [{"role": "user", "content": " ".join(f"The code of {n} is {i}." for n in own * 5)}]
            for i, own in enumerate(names, 471)
        ]
        session_id = self._client.open(streaming=True)
        lens = [0] * NUM_CONVERSATIONS
        for turn in range(NUM_TURNS):
            for number, messages in enumerate(talks):
                extra = {"session_id": session_id} if number == NUM_CONVERSATIONS - 1 else {}
                if turn:
                    messages.append({"role": "user", "content": f"What is {turn + 10} + {number}?"})
                before, lens[number] = lens[number], self.answer(messages, **extra)
                if turn:
                    yield before, self.cached[-1]
        # The session goes back by a turn, after it was evicted, and says something else.
        back = self._client.post(
            "/rollback_session", session_id=session_id, num_turns=NUM_TURNS - 1
        )
        talks[-1][-2:] = [{"role": "user", "content": "What is the code of Ben?"}]
        self.answer(talks[-1], session_id=session_id)
        yield back["num_tokens"], self.cached[-1]


@pytest.mark.long
def test_evicted_conversations_are_answered_from_the_hosts_memory(tmp_path: Path) -> None:
    with live_server(tmp_path, *FLAGS, "--max-total-tokens", "8192") as server:
        expected = Talks(server)
        list(expected.run())
        assert server.get("/get_server_info")["counters"]["evicted_pages"] == 0
    with live_server(tmp_path, *FLAGS, "--max-total-tokens", "512", *HOST) as server:
        talks = Talks(server)
        for num_before, num_cached in talks.run():
            assert num_cached >= num_before - 1 - PAGE_SIZE
        counters = server.until_at_rest()["counters"]
        assert counters["evicted_pages"] > 0
        assert counters["sessions_evicted"] > 0
        assert counters["host_fetched_tokens"] > 0
        assert counters["host_failed_transfers"] == 0
        server.close_sessions()
        server.assert_flush_frees_everything()
        server.assert_nothing_leaked()
    assert talks.cached == expected.cached
    assert talks.said == expected.said
