"""Clients of every kind, and what they may expect: each answer is that of the first time.

Owns what was answered before. Never looks at the server's memory: see `soak.py`.
"""

import functools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI, InternalServerError

from benchmarks.demo_model.tasks import held_out_questions, is_right
from sgl_jax.text.tokenizer import Tokenizer
from tests.accuracy.near_ties import differences, generate, greedy, is_near_tie
from tests.live.live_server import DEMO
from tests.server.malformed_bodies import MALFORMED
from tests.soak.refusals import RefusedError, check_refusal, patient_client, strict_client

NUM_QUESTIONS = 240
NUM_PROMPTS = 24
TIMEOUT_S = 120.0
# Of the engine's own arithmetic, in another batch.
LOGPROB_TOLERANCE = 1e-3
MIN_ACCURACY = 0.97
MAX_RESAMPLED_SHARE = 0.005
_MAX_ANSWER_TOKENS = 48


class Clients:
    """What clients do, one method for each kind; `one(rng)` is the next thing that one does.

    A context manager. Raises AssertionError for a wrong answer. Refusals (503) are counted, and are
    wrong unless `may_refuse`.
    """

    def __init__(self, url: str, *, may_refuse: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.num_asked = 0  # held-out questions, and of these:
        self.num_right = 0
        self.num_near_ties = 0
        self.num_resampled = 0  # random answers that were not those of the first time
        self._may_refuse = may_refuse
        self._http = strict_client(url)
        self._patient = patient_client(url)
        self._openai = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
        )
        self._tokenizer = Tokenizer.load(str(DEMO), None)
        self._questions = held_out_questions(NUM_QUESTIONS, seed=5)
        self._known: dict[tuple[str, int, int], Any] = {}  # kind, item, part of it
        self._kinds: dict[Callable[[random.Random], Awaitable[None]], int] = {
            self.question: 6,
            self.conversation: 1,
            self.long_prompt: 2,
            self.vanishing_client: 2,
            self.abort: 1,
            self.stop_string: 2,
            self.sampled_with_seed: 2,
            self.logprobs: 1,
            self.bad_request: 1,
        }

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._patient.aclose()
        await self._openai.close()

    @property
    def kinds(self) -> list[str]:
        """Names of what clients do."""
        return [kind.__name__ for kind in self._kinds]

    async def one(self, rng: random.Random) -> None:
        """The next request."""
        (kind,) = rng.choices(list(self._kinds), list(self._kinds.values()))
        try:
            await self._do(kind, rng)
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__}: {error}") from error
        except RefusedError as refusal:
            if not self._may_refuse:
                raise AssertionError(f"{kind.__name__}: refused: {refusal}") from refusal
            self.refusals[str(refusal)] += 1
            return
        self.counts[kind.__name__] += 1

    async def _do(self, kind: Callable[[random.Random], Awaitable[None]], rng: Any) -> None:
        """Raises `RefusedError` if the official client was refused, too."""
        try:
            await kind(rng)
        except InternalServerError as error:
            if error.status_code == 503 and isinstance(error.body, dict):
                check_refusal(error.body)
            raise

    async def learn(self) -> None:
        """Nothing: each answer is compared with that of the first time."""

    def progress(self) -> str:
        """For a line of the table."""
        right = self.num_right / max(self.num_asked, 1)
        return f"{right:>9.1%} right {self.num_near_ties:>4} near ties"

    def defects(self, counters: Mapping[str, int]) -> Iterator[str]:
        """What only the whole shows."""
        if self.num_right < MIN_ACCURACY * self.num_asked:
            yield f"only {self.num_right} of {self.num_asked} questions answered right"
        sampled = self.counts["sampled_with_seed"]
        if self.num_resampled > max(1, MAX_RESAMPLED_SHARE * sampled):
            yield f"{self.num_resampled} of {sampled} answers with a seed changed"
        for name in ("requests_force_retracted", "evicted_pages", "accepted_draft_tokens"):
            if not counters[name]:
                yield f"{name} is 0: the soak did not do what it is for"

    # -- chat, through the official client --------------------------------------------------

    async def question(self, rng: random.Random) -> None:
        """A held-out question."""
        i = rng.randrange(NUM_QUESTIONS)
        question = self._questions[i]
        reply = await self._chat("question", i, question.messages)
        self.num_asked += 1
        self.num_right += is_right(question, reply)

    async def conversation(self, rng: random.Random) -> None:
        """All turns of a conversation, one after the other."""
        i = rng.randrange(NUM_QUESTIONS)
        messages = self._questions[i].messages[:10]
        for end, message in enumerate(messages, start=1):
            if message["role"] == "user":
                await self._chat("turn", i, messages[:end])

    async def stop_string(self, rng: random.Random) -> None:
        """The answer up to a letter that may be in it."""
        i = rng.randrange(NUM_QUESTIONS)
        stop = rng.choice("aeiou. ")
        messages = self._questions[i].messages
        whole = await self._chat("question", i, messages)
        cut = await self._complete(messages, stop=stop)
        await self._judge(messages, whole.split(stop)[0], cut)

    async def _chat(self, kind: str, i: int, messages: Sequence[dict[str, str]]) -> str:
        reply = await self._complete(messages)
        await self._judge(messages, self._known.setdefault((kind, i, len(messages)), reply), reply)
        return reply

    async def _complete(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        completion = await self._openai.chat.completions.create(
            model="demo",
            messages=list(messages),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=_MAX_ANSWER_TOKENS,
            **options,
        )
        (choice,) = completion.choices
        assert choice.finish_reason in ("stop", "length"), choice
        return choice.message.content or ""

    async def _judge(self, messages: Sequence[dict[str, str]], wanted: str, reply: str) -> None:
        """The reply is as wanted, or departs from it at a near tie."""
        if reply == wanted:
            return
        prompt = self._tokenizer.apply_chat_template(messages)
        end = [self._tokenizer.eos_token_id or 0]
        left, right = (self._tokenizer.encode(text) + end for text in (wanted, reply))
        shorter = min(len(left), len(right))
        is_tie = await is_near_tie(self._patient, prompt, left[:shorter], right[:shorter])
        assert is_tie, f"{wanted!r} became {reply!r}"
        self.num_near_ties += 1

    # -- tokens, through /generate ----------------------------------------------------------

    async def long_prompt(self, rng: random.Random) -> None:
        """Hundreds of random tokens, some shared with others, and what the model makes of them."""
        i = rng.randrange(NUM_PROMPTS)
        prompt, count = _prompts()[i]
        answer = await generate(self._http, {"input_ids": prompt, "sampling_params": greedy(count)})
        await self._judge_tokens(i, answer["output_ids"])

    async def vanishing_client(self, rng: random.Random) -> None:
        """Reads some of a stream and goes away."""
        await self._stream(rng, f"vanish {rng.getrandbits(60)}", leaves=True)

    async def abort(self, rng: random.Random) -> None:
        """Asks for the end of a stream, and gets what there is."""
        i, ids = await self._stream(rng, f"abort {rng.getrandbits(60)}", leaves=False)
        await self._judge_tokens(i, ids)

    async def sampled_with_seed(self, rng: random.Random) -> None:
        """The same seed gives the same text.

        Here a near tie cannot be told from outside, since the noise that was drawn is not known:
        such answers are counted, and the soak bounds how many there may be.
        """
        i = rng.randrange(NUM_PROMPTS)
        prompt, count = _prompts()[i]
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": i, "max_new_tokens": count}
        answer = await generate(self._http, {"input_ids": prompt, "sampling_params": sampling})
        wanted = self._known.setdefault(("sampled", i, 0), answer["output_ids"])
        self.num_resampled += answer["output_ids"] != wanted

    async def logprobs(self, rng: random.Random) -> None:
        """Log-probabilities of prompt and output: complete, in order, the same each time."""
        i = rng.randrange(NUM_PROMPTS)
        prompt = _prompts()[i][0][:100]
        body = {
            "input_ids": prompt,
            "sampling_params": greedy(12),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
        }
        meta = (await generate(self._http, body))["meta_info"]
        values = [entry[0] for entry in meta["input_token_logprobs"]]
        assert len(values) == len(prompt)
        assert values[0] is None, "nothing predicts the first token"
        assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt
        outputs = meta["output_token_logprobs"]
        assert len(outputs) == 12
        for chosen, top in zip(outputs, meta["output_top_logprobs"], strict=True):
            assert len(top) == 3
            assert chosen[:2] == top[0][:2], "greedy takes the most likely token"
            assert 0 >= top[0][0] >= top[1][0] >= top[2][0]
        known = self._known.setdefault(("logprobs", i, 0), values)
        for at, (value, wanted) in enumerate(zip(values[1:], known[1:], strict=True), start=1):
            assert abs(value - wanted) < LOGPROB_TOLERANCE, f"prompt token {at}"

    async def bad_request(self, rng: random.Random) -> None:
        """What no client should send."""
        case = rng.choice(MALFORMED)
        headers = {"content-type": case.content_type} if case.content_type else {}
        answer = await self._http.post(case.path, content=case.body, headers=headers)
        assert answer.status_code == case.status, f"{case.name}: {answer.text[:200]}"

    async def _stream(self, rng: random.Random, rid: str, *, leaves: bool) -> tuple[int, list[int]]:
        """Read some events of a greedy stream, then end it; the prompt and all that was read."""
        i, num_events = rng.randrange(NUM_PROMPTS), rng.randrange(1, 12)
        prompt, count = _prompts()[i]
        body = {"input_ids": prompt, "sampling_params": greedy(count), "stream": True, "rid": rid}
        ids: list[int] = []
        async with self._http.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    check_refusal(event["error"])
                ids = event["output_ids"]
                num_events -= 1
                if num_events <= 0 and leaves:
                    break  # leaving the block closes the connection
                if num_events == 0:
                    await self._http.post("/abort_request", json={"rid": rid})
        return i, ids

    async def _judge_tokens(self, i: int, ids: list[int]) -> None:
        """`ids` begin what prompt `i` is answered with, or differ at near ties."""
        known = self._known.get(("tokens", i, 0), [])
        if len(ids) > len(known):
            self._known["tokens", i, 0] = ids
        common = min(len(ids), len(known))
        self.num_near_ties += len(
            await differences(self._patient, _prompts()[i][0], known[:common], ids[:common])
        )


@functools.cache
def _prompts() -> list[tuple[list[int], int]]:
    """Random tokens, from a few to most of a row, and how many are to follow."""
    rng = random.Random(11)
    stems = [[rng.randrange(300, 700) for _ in range(900)] for _ in range(3)]
    prompts = []
    for i in range(NUM_PROMPTS):
        own = [rng.randrange(300, 700) for _ in range(rng.randrange(5, 60))]
        prompts.append((stems[i % 3][: rng.randrange(i * 35 + 1)] + own, rng.randrange(20, 120)))
    return prompts
