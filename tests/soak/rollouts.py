"""Rollouts for a trainer: groups of samples, partial rollouts, and other weights again and again.

Every token must be of the weights that its answer names. So its log-probability is compared with
that of the same tokens, scored when these weights are served the next time; and greedy answers
with those that each policy gave before the soak.
"""

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.near_ties import NEAR_TIE, first_difference, generate, greedy
from tests.soak import soak
from tests.soak.load import LOGPROB_TOLERANCE, MAX_RESAMPLED_SHARE
from tests.soak.refusals import patient_client, strict_client
from tests.soak.trainer import FIRST_LABEL, NUM_POLICIES, Round, Trainer, policy_of

GROUP_SIZE = 16
FLAGS = (
    *soak.FLAGS,
    *("--max-running-requests", "16", "--max-total-tokens", "4096"),
    *("--speculative-algorithm", "none", "--chunked-prefill-size", "64"),
    *("--test-retract-interval", "25"),
    *("--weight-version", FIRST_LABEL),
)
_NUM_PROMPTS = 12
# Answers of one policy that wait to be scored. Of more, some are dropped.
_MAX_UNSCORED = 64
_SCORED_AT_ONCE = 8
_SCORED_SHARE = 0.2  # of the answers of one version; of several versions, all
_MAX_LATE_S = 2.0
_MIN_POLICY_GAP = 20 * LOGPROB_TOLERANCE


class Span(NamedTuple):
    """Tokens that one version generated after `prompt`, and their log-probabilities then."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]


class Rollouts:
    """Clients that generate for a trainer; `one(rng)` is a request, or the next update.

    A context manager; `learn` comes first. Raises AssertionError for a wrong answer.

    Args:
        update_every_s: mean time from an update to the next.
        folder: where the weights are written.
    """

    def __init__(self, url: str, update_every_s: float, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.num_near_ties = 0
        self.num_compared = 0  # sampled answers
        self.num_resampled = 0  # and those that were not those of the first time
        self.num_scored_tokens = 0
        self._trainer = Trainer(url, folder, self.counts)
        self._http = strict_client(url)
        self._patient = patient_client(url)
        self._every_s = update_every_s
        self._next_update_s = 0.0
        self._is_training = False
        rng = random.Random(37)
        self._prompts = [
            [rng.randrange(300, 700) for _ in range(rng.randrange(5, 120))]
            for _ in range(_NUM_PROMPTS)
        ]
        self._lengths = [rng.randrange(10, 41) for _ in self._prompts]
        self._greedy: dict[tuple[int, int], list[int]] = {}  # by policy and prompt
        self._sampled: dict[tuple[int, int, str, int], list[int]] = {}
        self._unscored = [deque[Span](maxlen=_MAX_UNSCORED) for _ in range(NUM_POLICIES)]
        self._kinds = {
            self.group: 2,
            self.listed_group: 2,
            self.greedy_answer: 4,
            self.rollout: 6,
            self.vanishing_client: 1,
            self.score: 4,
        }

    @property
    def kinds(self) -> list[str]:
        """Names of what clients and the trainer do, and of what must happen to answers."""
        own = [kind.__name__ for kind in self._kinds]
        return [*own, *self._trainer.kinds, "several versions", "old KV", "cut short", "resumed"]

    async def __aenter__(self) -> "Rollouts":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._trainer.close()
        await self._http.aclose()
        await self._patient.aclose()

    async def learn(self) -> None:
        """Ask each policy for its greedy answers. Policies must differ enough to be told apart."""
        for policy in (1, 2, 0):
            await self._trainer.serve(policy, Round("", "disk"))
            for i, prompt in enumerate(self._prompts):
                answer = await generate(self._patient, self._body(i, greedy(self._lengths[i])))
                ids = self._greedy[policy, i] = answer["output_ids"]
                self._unscored[policy].append(Span(prompt, ids, _logprobs(answer)))
        for other in (1, 2):
            span = self._unscored[other][0]
            scores, _ = await self._scored(span)
            gap = max(abs(a - b) for a, b in zip(scores, span.logprobs, strict=True))
            assert gap > _MIN_POLICY_GAP, f"policies 0 and {other} are only {gap} apart"

    async def one(self, rng: random.Random) -> None:
        """A request. One of the clients is the trainer, which waits for the next update."""
        if not self._is_training:
            self._is_training = True
            try:
                await self._train(rng)
            finally:
                self._is_training = False
            return
        (kind,) = rng.choices(list(self._kinds), list(self._kinds.values()))
        try:
            await kind(rng)
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__}: {error}") from error
        self.counts[kind.__name__] += 1

    async def _train(self, rng: random.Random) -> None:
        """Update if it is time, or wait for a moment."""
        wait_s = self._next_update_s - time.monotonic()
        if wait_s < -_MAX_LATE_S:  # no client was there: let them begin
            self._next_update_s = time.monotonic() + rng.uniform(0.1, _MAX_LATE_S)
        elif wait_s > 0:
            await asyncio.sleep(min(wait_s, _MAX_LATE_S / 2))
        else:
            await self._trainer.round(rng)
            self._next_update_s = time.monotonic() + self._every_s * rng.uniform(0.5, 1.5)

    def progress(self) -> str:
        """For a line of the table."""
        updates = sum(self.counts[way] for way in ("staged", "chunked", "disk"))
        return (
            f"{updates:>5} updates {self.num_scored_tokens:>8,} tokens scored "
            f"{self.num_near_ties:>4} near ties"
        )

    def defects(self, counters: Mapping[str, int]) -> Iterator[str]:
        """What only the whole shows."""
        if self.num_resampled > max(1, MAX_RESAMPLED_SHARE * self.num_compared):
            yield f"{self.num_resampled} of {self.num_compared} sampled answers changed"
        for name in ("requests_force_retracted", "evicted_pages"):
            if not counters[name]:
                yield f"{name} is 0: the soak did not do what it is for"

    # -- requests ---------------------------------------------------------------------------

    async def group(self, rng: random.Random) -> None:
        """All samples of a prompt by `n`, from one seed."""
        i = rng.randrange(_NUM_PROMPTS)
        answers = await self._generate(self._body(i, self._sampling(i) | {"n": GROUP_SIZE}))
        assert len(answers) == GROUP_SIZE
        for number, answer in enumerate(answers):
            self._check(self._prompts[i], answer, rng)
            self._compare(i, "n", number, answer)

    async def listed_group(self, rng: random.Random) -> None:
        """All samples as a list of equal prompts, each with a seed; one may be aborted."""
        i, name = rng.randrange(_NUM_PROMPTS), f"group {rng.getrandbits(60)}"
        seeds = [self._sampling(i) | {"seed": 1000 * i + k} for k in range(GROUP_SIZE)]
        body = self._body(i, seeds) | {"rid": [f"{name} {k}" for k in range(GROUP_SIZE)]}
        body["input_ids"] = [self._prompts[i]] * GROUP_SIZE
        aborted = rng.randrange(2 * GROUP_SIZE)  # none, if it is above
        if aborted < GROUP_SIZE:
            delay_s = rng.random()
            answers, _ = await asyncio.gather(
                self._generate(body), self._abort(f"{name} {aborted}", delay_s)
            )
        else:
            answers = await self._generate(body)
        for number, answer in enumerate(answers):
            self._check(self._prompts[i], answer, rng, may_be_cut=number == aborted)
            self._compare(i, "seed", number, answer)

    async def greedy_answer(self, rng: random.Random) -> None:
        """The answer that the policy gave before the soak, as far as it is of one version."""
        i = rng.randrange(_NUM_PROMPTS)
        body = self._body(i, greedy(self._lengths[i])) | {"top_logprobs_num": 2}
        (answer,) = await self._generate(body)
        self._check(self._prompts[i], answer, rng)
        versions = answer["meta_info"]["weight_versions"]
        end = versions[0]["end"]
        wanted = self._greedy[policy_of(versions[0]["version"]), i][:end]
        got = answer["output_ids"][:end]
        if got != wanted[: len(got)]:
            at = first_difference(wanted[: len(got)], got)
            best, second = answer["meta_info"]["output_top_logprobs"][at]
            assert best[0] - second[0] < NEAR_TIE, f"{versions}: token {at} of prompt {i} changed"
            assert {best[1], second[1]} == {wanted[at], got[at]}
            self.num_near_ties += 1

    async def rollout(self, rng: random.Random) -> None:
        """One sample, sent again with its output as often as a pause cuts it short."""
        i = rng.randrange(_NUM_PROMPTS)
        seed, ids, labels = rng.randrange(4), list[int](), list[str]()
        has_old_kv = False
        while len(ids) < self._lengths[i]:
            sampling = self._sampling(i) | {
                "seed": seed,
                "max_new_tokens": self._lengths[i] - len(ids),
            }
            prompt = self._prompts[i] + ids
            (answer,) = await self._generate(self._body(i, sampling) | {"input_ids": prompt})
            self._check(prompt, answer, rng)
            self.counts["resumed"] += bool(ids and answer["output_ids"])
            ids += answer["output_ids"]
            labels += [span["version"] for span in answer["meta_info"]["weight_versions"]]
            has_old_kv |= answer["meta_info"].get("has_old_kv", False)
        policies = {policy_of(label) for label in labels}
        if len(policies) == 1 and not has_old_kv:
            self._compare_ids((policies.pop(), i, "rollout", seed), ids)

    async def vanishing_client(self, rng: random.Random) -> None:
        """Reads some events of a group's stream and goes away."""
        i, num_events = rng.randrange(_NUM_PROMPTS), rng.randrange(1, 40)
        body = self._body(i, self._sampling(i) | {"n": GROUP_SIZE}) | {"stream": True}
        async with self._http.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    num_events -= 1
                if num_events <= 0:
                    break  # leaving the block closes the connection

    async def score(self, rng: random.Random) -> None:
        """Score earlier answers of the served policy."""
        unscored = self._unscored[policy_of(self._trainer.label)]
        spans = [unscored.popleft() for _ in range(min(len(unscored), _SCORED_AT_ONCE))]
        for span, (values, label) in zip(
            spans, await asyncio.gather(*map(self._scored, spans)), strict=True
        ):
            if self._unscored[policy_of(label)] is not unscored:  # it was replaced meanwhile
                unscored.append(span)
                continue
            pairs = zip(span.logprobs, values, strict=True)
            for at, (value, wanted) in enumerate(pairs):
                assert abs(value - wanted) < LOGPROB_TOLERANCE, (
                    f"as scored by {label}, token {at} of {len(values)} after {len(span.prompt)} "
                    f"tokens has {wanted}, not {value}"
                )
            self.num_scored_tokens += len(values)

    # -- checks -----------------------------------------------------------------------------

    def _check(
        self, prompt: list[int], answer: Any, rng: random.Random, *, may_be_cut: bool = False
    ) -> None:
        """Check what an answer says of its tokens, and keep them to be scored."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        finish, versions = meta["finish_reason"]["type"], meta["weight_versions"]
        assert finish in ("length", "abort"), meta["finish_reason"]
        if finish == "abort":
            self.counts["cut short"] += not may_be_cut
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        labels, starts, ends = (
            [span[name] for span in versions] for name in ("version", "start", "end")
        )
        numbers = [int(label.partition(":")[0]) for label in labels]
        assert starts == [0, *ends[:-1]], versions
        assert ends[-1] == len(ids), versions
        assert all(start < end for start, end in zip(starts, ends, strict=True)) or not ids
        assert numbers == sorted(set(numbers)), versions
        assert labels[-1] == meta["weight_version"], versions
        if meta.get("has_old_kv"):
            assert not self._trainer.kept.isdisjoint(labels), f"old KV without keep_cache: {labels}"
            self.counts["old KV"] += 1
            return
        if len(versions) > 1:
            self.counts["several versions"] += 1
        elif rng.random() > _SCORED_SHARE:
            return
        values = _logprobs(answer)
        for start, end, label in zip(starts, ends, labels, strict=True):
            if end > start:
                span = Span(prompt + ids[:start], ids[start:end], values[start:end])
                self._unscored[policy_of(label)].append(span)

    def _compare(self, i: int, kind: str, number: int, answer: Any) -> None:
        """Compare a sample with the first of the same policy, unless it was cut or is of several
        versions."""
        versions = answer["meta_info"]["weight_versions"]
        is_whole = len(answer["output_ids"]) == self._lengths[i] and len(versions) == 1
        if is_whole and not answer["meta_info"].get("has_old_kv"):
            key = policy_of(versions[0]["version"]), i, kind, number
            self._compare_ids(key, answer["output_ids"])

    def _compare_ids(self, key: tuple[int, int, str, int], ids: list[int]) -> None:
        """A near tie cannot be told from outside, so differences are counted."""
        self.num_compared += 1
        self.num_resampled += self._sampled.setdefault(key, ids) != ids

    # -- HTTP -------------------------------------------------------------------------------

    def _sampling(self, i: int) -> dict[str, Any]:
        count = self._lengths[i]
        return {"temperature": 1.0, "seed": i, "max_new_tokens": count, "ignore_eos": True}

    def _body(self, i: int, sampling: Any) -> dict[str, Any]:
        return {
            "input_ids": self._prompts[i],
            "sampling_params": sampling,
            "return_logprob": True,
            "logprobs_mode": "raw",
        }

    async def _generate(self, body: dict[str, Any]) -> list[Any]:
        answers = await generate(self._http, body)
        return answers if isinstance(answers, list) else [answers]

    async def _abort(self, rid: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._http.post("/abort_request", json={"rid": rid})

    async def _scored(self, span: Span) -> tuple[list[float], str]:
        """Return log-probabilities of the tokens of `span`, and the version that gave them."""
        body = {
            "input_ids": span.prompt,
            "output_ids": span.output,
            "logprobs_mode": "raw",
        }
        answer = await self._patient.post("/score_tokens", json=body)  # again after an abort
        assert answer.status_code == 200, answer.text
        scores = answer.json()
        return scores["logprobs"], scores["weight_version"]


def _logprobs(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
