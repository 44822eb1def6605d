"""A thousand sessions with turns: each turn's answer is that of its whole history sent alone.

Owns the sessions that are open and what each has heard. Many share a script (the tokens of their
turns), so what is right is asked once for each turn of a script, of the server at rest.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.accuracy.near_ties import differences, generate, greedy
from tests.live.live_server import WARM
from tests.soak.refusals import RefusedError, check_refusal, patient_client, strict_client

FLAGS = (
    *("--dp-size", "2", "--context-length", "1280", "--max-running-requests", "16"),
    # A small part of what a thousand sessions hold together.
    *("--max-total-tokens", "16384", "--decode-log-interval", "0"),
    *("--test-retract", "--test-retract-interval", "5"),
    *("--check-memory", "busy", "--memory-error-action", "crash"),
    *WARM,
)
NUM_TURNS = 12
_NUM_SCRIPTS = 24
_NUM_NEW, _NUM_OUTPUT = 8, 8
_MAX_TRIES = 1200
_RETRY_S = 0.1


@dataclass
class Session:
    """One client's: `num_turns` of script `script` have been answered."""

    id: str
    script: int
    num_turns: int = 0
    is_busy: bool = False


class Conversations:
    """Clients of `num_sessions` sessions that are open at once; `one(rng)` is a turn of one.

    A context manager; `learn` comes first. Raises AssertionError for a wrong answer.
    """

    kinds = ("turn", "vanished turn", "rollback", "fork", "end")

    def __init__(self, url: str, num_sessions: int) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.num_near_ties = 0
        self._http = strict_client(url)
        self._patient = patient_client(url)
        self._num_sessions = num_sessions
        self._num_opened = 0
        self._sessions: list[Session] = []
        rng = random.Random(23)
        self._scripts = [
            [[rng.randrange(300, 700) for _ in range(_NUM_NEW)] for _ in range(NUM_TURNS)]
            for _ in range(_NUM_SCRIPTS)
        ]
        # Of each script and turn: the whole prompt, and what follows it.
        self._right: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    async def __aenter__(self) -> "Conversations":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._patient.aclose()

    async def learn(self) -> None:
        """Ask the server what is right, without sessions, and open all of them."""
        await asyncio.gather(*(self._learn_script(i) for i in range(_NUM_SCRIPTS)))
        for _ in range(self._num_sessions):
            self._sessions.append(await self._opened())

    async def one(self, rng: random.Random) -> None:
        """A turn, or what else befalls a session that is not in use."""
        idle = [i for i, session in enumerate(self._sessions) if not session.is_busy]
        at = rng.choice(idle)
        session = self._sessions[at]
        session.is_busy = True
        try:
            if session.num_turns == NUM_TURNS:
                await self._close(session)
                self._sessions[at] = await self._opened()
                self.counts["end"] += 1
                return
            chance = rng.random()
            if chance < 0.05:
                await self._vanished_turn(session)
            elif chance < 0.08 and session.num_turns:
                await self._roll_back(session, rng.randrange(session.num_turns))
                self.counts["rollback"] += 1
            elif chance < 0.11:
                self._sessions[at] = await self._forked(session)
            else:
                await self._turn(session)
        except RefusedError as error:
            self.refusals[str(error)] += 1
        finally:
            session.is_busy = False

    def progress(self) -> str:
        """For a line of the table."""
        return f"{self.counts['turn']:>9,} turns {self.num_near_ties:>4} near ties"

    def defects(self, counters: Mapping[str, int]) -> Iterator[str]:
        """What only the whole shows."""
        for name in ("sessions_evicted", "requests_force_retracted"):
            if not counters[name]:
                yield f"{name} is 0: the soak did not do what it is for"

    # -- turns ------------------------------------------------------------------------------

    async def _turn(self, session: Session) -> None:
        answer = await generate(self._http, self._body(session))
        prompt, wanted = self._right[session.script, session.num_turns]
        # The server knew all that went before.
        told = answer["meta_info"]["prompt_tokens"]
        assert told == len(prompt), f"turn {session.num_turns}: {told} tokens, not {len(prompt)}"
        found = await differences(self._patient, prompt, wanted, answer["output_ids"])
        session.num_turns += 1
        self.counts["turn"] += 1
        if found:  # from here on it is another conversation
            self.num_near_ties += len(found)
            await self._roll_back(session, session.num_turns - 1)

    async def _vanished_turn(self, session: Session) -> None:
        """Its client leaves a stream that has begun; then it takes back what may have been."""
        body = self._body(session) | {"stream": True}
        async with self._http.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        check_refusal(event["error"])
                    break
        await self._roll_back(session, session.num_turns)
        self.counts["vanished turn"] += 1

    async def _roll_back(self, session: Session, num_turns: int) -> None:
        """To its first turns, as soon as none is in flight."""
        body = {"session_id": session.id, "num_turns": num_turns}
        for _ in range(_MAX_TRIES):
            answer = await self._patient.post("/rollback_session", json=body)
            if answer.status_code == 200:
                session.num_turns = num_turns
                return
            assert "in flight" in answer.text, answer.text
            await asyncio.sleep(_RETRY_S)
        raise AssertionError(f"no rollback in {_MAX_TRIES} tries: {answer.text}")

    async def _forked(self, session: Session) -> Session:
        """What goes on in its place, with the same history."""
        answer = await self._patient.post("/fork_session", json={"session_id": session.id})
        assert answer.status_code == 200, answer.text
        fork = Session(answer.json()["session_id"], session.script, session.num_turns)
        await self._close(session)
        self.counts["fork"] += 1
        return fork

    async def _opened(self) -> Session:
        body = {"capacity_of_str_len": 0, "streaming": True}
        answer = await self._patient.post("/open_session", json=body)
        assert answer.status_code == 200, answer.text
        self._num_opened += 1
        return Session(answer.json(), self._num_opened % _NUM_SCRIPTS)

    async def _close(self, session: Session) -> None:
        answer = await self._patient.post("/close_session", json={"session_id": session.id})
        assert answer.status_code == 200, answer.text

    def _body(self, session: Session) -> dict[str, Any]:
        return {
            "input_ids": self._scripts[session.script][session.num_turns],
            "sampling_params": greedy(_NUM_OUTPUT),
            "session_params": {"id": session.id},
        }

    async def _learn_script(self, script: int) -> None:
        history: list[int] = []
        for turn, new in enumerate(self._scripts[script]):
            prompt = history + new
            body = {"input_ids": prompt, "sampling_params": greedy(_NUM_OUTPUT)}
            output = (await generate(self._patient, body))["output_ids"]
            self._right[script, turn] = (prompt, output)
            history = prompt + output
