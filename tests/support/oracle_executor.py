"""An executor without a device that checks each step: the oracle of the scheduler's tests.

It keeps a fake KV cache: each slot holds a hash of the whole prefix up to its token, and every step
checks that what it would read is what must be there. Its tokens depend on the prefix alone, so a
request's output must be the same for every schedule.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_jax.bench.trace.fake_executor import FakeExecutor
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from sgl_jax.core.step_plan import (
    NON_FINITE,
    Float32Array,
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    StepHandle,
    StepPlan,
)
from sgl_jax.core.token_values import named_values
from tests.support.host_oracle import HostOracle

_MULTIPLIER = 6364136223846793005  # Knuth's MMIX linear congruential generator
_MASK = (1 << 64) - 1
# KV that is not finite is that of the same prefix with these bits turned: it spreads by reading.
NON_FINITE_BITS = np.uint64(0x5A5A_5A5A_5A5A_5A5A)


HIDDEN_SIZE = 4


def made_up_hidden(state: int) -> NDArray[np.float32]:
    """The last hidden state of the prefix with this hash."""
    return np.array([state >> 16 * i & 0xFFFF for i in range(HIDDEN_SIZE)], np.float32)


EXPERTS_SHAPE = (3, 2)


def made_up_experts(hashes: NDArray[np.uint64]) -> NDArray[np.int16]:
    """The experts of tokens, int16[n, *EXPERTS_SHAPE], that only the prefix determines."""
    bits = np.arange(0, 6 * 8, 8).astype(np.uint64)
    return (
        (hashes[:, None] >> bits & np.uint64(0x7FFF)).astype(np.int16).reshape(-1, *EXPERTS_SHAPE)
    )


def made_up_hidden_states(hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The hidden states of tokens, [n, HIDDEN_SIZE], that only the prefix determines."""
    return np.array([made_up_hidden(state) for state in hashes.tolist()], np.float32)


MADE_UP: dict[str, Callable[[NDArray[np.uint64]], NDArray[Any]]] = {
    "routed_experts": made_up_experts,
    "hidden_states": made_up_hidden_states,
}


class ContentError(AssertionError):
    """A step would have read KV that is not that of its own prefix."""


class OracleExecutor(FakeExecutor):
    """Simulates what KV pages hold, rank by rank, in launch order."""

    def __init__(self, sizes: EngineSizes) -> None:
        super().__init__(sizes)
        # By rank and pool; of which group a page's KV is, its hashes say.
        self._kv = [
            [np.zeros(num_pages * sizes.page_size, np.uint64) for num_pages in sizes.pool_pages]
            for _ in range(sizes.dp_size)
        ]
        rows = (sizes.num_rows, sizes.max_context_len)
        # What the device's token table holds, and the prefix hash at each of its positions.
        self._tokens = [np.zeros(rows, np.int32) for _ in range(sizes.dp_size)]
        self._hashes = [np.zeros(rows, np.uint64) for _ in range(sizes.dp_size)]
        self._lens = [np.zeros(sizes.num_rows, np.int32) for _ in range(sizes.dp_size)]
        ids = (sizes.num_rows, MAX_LOGPROB_IDS)
        self._logprob_ids = [np.zeros(ids, np.int32) for _ in range(sizes.dp_size)]
        # The tokens that end each row, and the length that it must pass to end.
        self._stops: list[dict[int, tuple[tuple[int, ...], int]]] = [
            {} for _ in range(sizes.dp_size)
        ]
        # The tokens of images in the table of vectors: their pixels begin with them.
        self._image_lists: dict[tuple[int, int], Int32Array] = {}  # by rank and row
        self._images = [np.zeros(sizes.image_slots, np.int32) for _ in range(sizes.dp_size)]
        self._page_tables = PageTables(sizes)
        self._states = [StateOracle(sizes, rank) for rank in range(sizes.dp_size)]
        self.host = HostOracle(sizes, [self._pools(rank) for rank in range(sizes.dp_size)])
        # A row computes values that are not finite if it has this token, or is the next but so
        # many to run.
        self.bad_token: int | None = None
        self.rows_to_glitch: int | None = None
        self.num_non_finite = 0  # rows so far
        self.weights = 0  # their version, which the values of tokens also depend on

    def _pools(self, rank: int) -> list[NDArray[np.uint64]]:
        """The contents of the rank's pools, [pages, values]: views."""
        pools = [kv.reshape(-1, self.sizes.page_size) for kv in self._kv[rank]]
        if self.sizes.state_group is not None:
            pools[-1] = self._states[rank].snapshots.reshape(-1, 1)
        return pools

    def launch(self, plan: StepPlan) -> StepHandle:
        """Run the step. Raises `ContentError` if a row would read foreign or missing KV."""
        self._page_tables.apply(plan.page_changes)
        self.host.copy(plan.saved)
        return tuple(self._run_steps(rank, rank_plan) for rank, rank_plan in enumerate(plan.ranks))

    def expected_output(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens any schedule must generate after `prompt`."""
        state = 0
        for token in prompt:
            state = _extend(state, token)
        output = []
        for _ in range(num_tokens):
            output.append(self._sample(state))
            state = _extend(state, output[-1])
        return output

    def expected_hidden(self, prompt: list[int]) -> bytes:
        """The hidden state that any schedule must return for `prompt`."""
        state = 0
        for token in prompt:
            state = _extend(state, token)
        return made_up_hidden(state).tobytes()

    def expected_values(self, name: str, tokens: list[int], weights: int = 0) -> NDArray[Any]:
        """The values that any schedule must report for `tokens`, by weights of this version."""
        hashes = np.zeros(len(tokens), np.uint64)
        _hash_span(np.array(tokens, np.int32), hashes, 0, len(tokens))
        return MADE_UP[name](hashes + np.uint64(weights))

    def holds_state(self, rank: int, slots: list[int], tokens: Int32Array) -> bool:
        """Whether one of the rank's slots has the state after `tokens`."""
        hashes = np.zeros(len(tokens), np.uint64)
        _hash_span(tokens, hashes, 0, len(tokens))
        return bool((self._states[rank].held(slots) == hashes[-1]).any())

    def _run_steps(self, rank: int, plan: RankPlan) -> RankResult:
        """Run a rank's step, or its steps one after another. A row leaves at its end."""
        self._admit(rank, plan)
        if plan.num_steps is None:
            return self._run_rank(rank, plan)
        assert plan.num_decode == len(plan.rows)
        assert (plan.q_lens == 1).all()
        assert plan.samples.all()
        results: list[tuple[NDArray[np.intp], RankResult]] = []
        running = np.arange(len(plan.rows))
        # A row that ended before takes one step, which writes the KV of its last token.
        num_steps = [
            1 if self._stopped(rank, plan, i) else int(most)
            for i, most in enumerate(plan.num_steps)
        ]
        while len(running):
            step, lens = len(results), self._lens[rank][plan.rows]
            part = plan._replace(
                rows=plan.rows[running],
                kv_starts=plan.kv_starts[running] if step == 0 else lens[running] - 1,
                q_lens=plan.q_lens[running],
                samples=plan.samples[running],
                num_decode=len(running),
                relayed=plan.relayed[running] & (step == 0),
                num_steps=None,
            )
            result = self._run_rank(rank, part)
            results.append((running, result))
            is_finite = result.tokens[:, 0] != NON_FINITE
            running = np.array(
                [
                    i
                    for i in running[is_finite].tolist()
                    if num_steps[i] > step + 1 and not self._stopped(rank, plan, i)
                ],
                np.intp,
            )
        return self._joined(plan, results)

    def _joined(
        self, plan: RankPlan, results: list[tuple[NDArray[np.intp], RankResult]]
    ) -> RankResult:
        """One result of all steps, each with the indices of its rows."""
        joined = self._no_result(plan)
        for step, (rows, result) in enumerate(results):
            for all_values, values in zip(joined[:5], result[:5], strict=True):
                if all_values is not None:
                    all_values[rows, step] = values[:, 0]
            for name, values in joined.token_values.items():
                values[rows, step] = result.token_values[name]
        is_bad = (joined.tokens == NON_FINITE).any(axis=1)
        joined.tokens[is_bad] = -1
        joined.tokens[is_bad, 0] = NON_FINITE
        return joined

    def _stopped(self, rank: int, plan: RankPlan, i: int) -> bool:
        """Whether the last token of row i ends it."""
        row = int(plan.rows[i])
        length = int(self._lens[rank][row])
        stop_ids, min_len = self._stops[rank][row]
        return length > min_len and int(self._tokens[rank][row, length - 1]) in stop_ids

    def _admit(self, rank: int, plan: RankPlan) -> None:
        tokens, hashes = self._tokens[rank], self._hashes[rank]
        for image in plan.encodings:
            spelled = np.frombuffer(image.pixels, np.int32)[: len(image.slots)]
            self._images[rank][image.slots] = spelled
        for admission in plan.admissions:
            self._image_lists[rank, admission.row] = admission.images
            min_len = admission.prompt_len + admission.sampling.min_new_tokens
            self._stops[rank][admission.row] = admission.stop_token_ids, min_len
            start, end = admission.start, admission.start + len(admission.tokens)
            tokens[admission.row, start:end] = admission.tokens
            read = tokens[admission.row].copy()
            read[start:end] = self._as_read(rank, read[start:end])
            _hash_span(read, hashes[admission.row], start, end)
            self._lens[rank][admission.row] = end
            own_ids = self._logprob_ids[rank][admission.row]
            own_ids[:] = 0
            own_ids[: len(admission.logprob_ids)] = admission.logprob_ids

    def _as_read(self, rank: int, tokens: Int32Array) -> Int32Array:
        """Tokens with those of images as their rows of the table say now."""
        if not self.sizes.image_slots:
            return tokens
        slots = tokens - self.sizes.vocab_size
        is_image = (slots >= 0) & (slots < self.sizes.image_slots)
        return np.where(is_image, self._images[rank][np.where(is_image, slots, 0)], tokens)

    def _check_images(self, rank: int, row: int, start: int, end: int) -> None:
        """The images that a row reads are still in the table, and none is split if none may be."""
        firsts, counts = self._image_lists[rank, row].T[:2]
        if self.sizes.whole_images and np.any((firsts < end) & (end < firsts + counts)):
            raise ContentError(f"rank {rank}, row {row}: a chunk ends at {end}, within an image")
        read = self._tokens[rank][row].copy()
        read[start:end] = self._as_read(rank, read[start:end])
        hashes = self._hashes[rank][row].copy()
        _hash_span(read, hashes, start, end)
        if not np.array_equal(hashes[start:end], self._hashes[rank][row, start:end]):
            raise ContentError(f"rank {rank}, row {row}: an image in {start} to {end} was evicted")

    def _run_rank(self, rank: int, plan: RankPlan) -> RankResult:
        tokens, hashes = self._tokens[rank], self._hashes[rank]
        result = self._no_result(plan)
        self._check_rows_distinct(rank, plan)
        num_drafts, first_query = plan.num_drafts.tolist(), 0
        page_table = self._page_tables.pages[rank, plan.rows, :, : plan.num_pages]
        for i, row in enumerate(plan.rows.tolist()):
            start = self._start(rank, plan, i)
            end = start + int(plan.q_lens[i]) - num_drafts[i]
            if self.sizes.image_slots:
                self._check_images(rank, row, start, end)
            state = int(hashes[row, end - 1])
            drafts = self._draft(state, num_drafts[i])
            if result.token_values:
                queries = np.concatenate([hashes[row, start:end], _hashes_after(state, drafts)])
                for name, values in result.token_values.items():
                    own = MADE_UP[name](queries + np.uint64(self.weights))
                    values[first_query : first_query + len(queries)] = own
                first_query += len(queries)
            is_bad = self._glitches() or self.bad_token in tokens[row, :end]
            paged = [n for n, group in enumerate(self.sizes.groups) if not group.is_recurrent]
            for number in paged:
                is_bad |= self._read(rank, row, number, page_table[i, number], start)
            for number in paged:
                pages = page_table[i, number]
                self._write(rank, row, number, pages, start, end, drafts, is_bad=is_bad)
            if plan.states is not None:
                self._states[rank].run(plan, i, start, hashes[row, :end], drafts)
            num_kept = end - start
            if plan.samples[i]:
                gained = self._verify(state, drafts)
                num_kept += len(gained) - 1
                result.tokens[i, : len(gained)] = gained
                self._report(result, i, state, gained, self._ids(rank, plan, i))
                if result.hidden is not None:
                    result.hidden[i] = made_up_hidden(state)
                stored = tokens[row, end : end + len(gained)]
                stored[:] = gained[: len(stored)]  # the last one may lie past the table's end
                _hash_span(tokens[row], hashes[row], end, end + len(stored))
                self._lens[rank][row] = end + len(gained)
            if plan.states is not None:
                self._states[rank].keep(plan, i, start, num_kept, hashes[row])
            if is_bad:
                self.num_non_finite += 1
                result.tokens[i] = -1
                result.tokens[i, 0] = NON_FINITE
        self._states[rank].end_step()
        if plan.num_scored is None:
            return result
        scored = np.flatnonzero(plan.num_scored).tolist()
        counts = plan.num_scored.tolist()
        return result._replace(
            prompt_logprobs={
                i: self._score(plan, i, counts[i], hashes, self._ids(rank, plan, i)) for i in scored
            }
        )

    def _no_result(self, plan: RankPlan) -> RankResult:
        """A result to be filled in, with log-probabilities if the plan asks for them."""
        width = 1 + self.sizes.max_draft_tokens
        shape = (len(plan.rows), width if plan.num_steps is None else self.sizes.max_decode_steps)
        result = RankResult(np.full(shape, -1, np.int32))
        if plan.returns_hidden:
            result = result._replace(hidden=np.zeros((len(plan.rows), HIDDEN_SIZE), np.float32))
        lead = (plan.num_tokens,) if plan.num_steps is None else shape
        for name in named_values(plan.token_values):
            one = MADE_UP[name](np.zeros(1, np.uint64))
            empty = np.full((*lead, *one.shape[1:]), -1, one.dtype)
            result = result._replace(token_values={**result.token_values, name: empty})
        if not plan.return_logprob:
            return result
        return result._replace(
            logprobs=np.zeros(shape, np.float32),
            top_ids=np.zeros((*shape, MAX_TOP_LOGPROBS), np.int32),
            top_logprobs=np.zeros((*shape, MAX_TOP_LOGPROBS), np.float32),
            id_logprobs=np.zeros((*shape, plan.num_logprob_ids), np.float32),
        )

    def _ids(self, rank: int, plan: RankPlan, i: int) -> Int32Array:
        """As many of row i's `logprob_ids` as the plan says that one has."""
        return self._logprob_ids[rank][plan.rows[i], : plan.num_logprob_ids]

    def _report(
        self, result: RankResult, i: int, state: int, gained: list[int], ids: Int32Array
    ) -> None:
        """Made-up log-probabilities of row i's new tokens, that only their prefix determines."""
        if result.logprobs is None or result.top_ids is None or result.top_logprobs is None:
            return
        assert result.id_logprobs is not None
        for j, token in enumerate(gained):
            state = _extend(state, token)
            value = made_up_logprobs(np.array([state], np.uint64))
            result.logprobs[i, j] = value[0]
            result.top_ids[i, j] = token + np.arange(MAX_TOP_LOGPROBS)
            result.top_logprobs[i, j] = value - np.arange(MAX_TOP_LOGPROBS)
            result.id_logprobs[i, j] = made_up_id_logprobs(value, ids)[0]

    def _glitches(self) -> bool:
        """Whether the next row computes values that are not finite, for no reason."""
        if self.rows_to_glitch is None:
            return False
        self.rows_to_glitch -= 1
        if self.rows_to_glitch < 0:
            self.rows_to_glitch = None
        return self.rows_to_glitch is None

    def held_non_finite(self, rank: int, tokens: Int32Array, pages: Int32Array) -> bool:
        """Whether pages int32[groups, n] of the prefix `tokens` hold values that are not finite."""
        hashes = np.zeros(len(tokens), np.uint64)
        _hash_span(tokens, hashes, 0, len(tokens))
        size = self.sizes.page_size
        for number, group in enumerate(self.sizes.groups):
            if group.is_recurrent:
                continue
            for column in pages[number].nonzero()[0].tolist():
                held = self._kv[rank][group.pool][int(pages[number, column]) * size :][:size]
                own = hashes[column * size :][:size] + np.uint64(number)
                if (held == own ^ NON_FINITE_BITS).any():
                    return True
        return False

    def _read(self, rank: int, row: int, number: int, pages: Int32Array, start: int) -> bool:
        """Check a group's KV before `start`; returns whether some of it is not finite."""
        group = self.sizes.groups[number]
        kv, hashes = self._kv[rank][group.pool], self._hashes[rank][row] + np.uint64(number)
        seen = max(start + 1 - group.sliding_window, 0) if group.sliding_window else 0
        slots = self._slots(pages, seen, start)
        is_bad = kv[slots] == hashes[seen:start] ^ NON_FINITE_BITS
        wrong = np.flatnonzero((kv[slots] != hashes[seen:start]) & ~is_bad)
        if len(wrong):
            raise ContentError(
                f"rank {rank}, row {row}: position {seen + int(wrong[0])} of {start} holds foreign "
                f"KV in page {int(slots[wrong[0]]) // self.sizes.page_size} of {group}"
            )
        return bool(is_bad.any())

    def _write(
        self,
        rank: int,
        row: int,
        number: int,
        pages: Int32Array,
        start: int,
        end: int,
        drafts: list[int],
        *,
        is_bad: bool,
    ) -> None:
        """Write a group's KV of [start, end), and of drafts behind."""
        kv = self._kv[rank][self.sizes.groups[number].pool]
        slots = self._slots(pages, start, end + len(drafts))
        written = self._hashes[rank][row, start:end]
        behind = _hashes_after(int(written[-1]), drafts)
        values = np.concatenate([written, behind]) + np.uint64(number)
        kv[slots] = values ^ NON_FINITE_BITS if is_bad else values

    def _start(self, rank: int, plan: RankPlan, i: int) -> int:
        """Where row i's first query lies: the device knows, and the host where it says so."""
        planned = int(plan.kv_starts[i])
        if i >= plan.num_decode:
            return planned
        start = int(self._lens[rank][plan.rows[i]]) - 1
        if start < planned or (start > planned and not plan.relayed[i]):
            raise ContentError(
                f"rank {rank}, row {plan.rows[i]}: the last token is at position {start}, the "
                f"plan says {'at least ' if plan.relayed[i] else ''}{planned}"
            )
        return start

    def _draft(self, state: int, count: int) -> list[int]:
        """Guesses of the next tokens, each right three times out of four."""
        drafts = []
        for _ in range(count):
            token = self._sample(state)
            wrong = (state >> 20) % 4 == 0
            drafts.append((token + 1) % self.sizes.vocab_size if wrong else token)
            state = _extend(state, drafts[-1])
        return drafts

    def _verify(self, state: int, drafts: list[int]) -> list[int]:
        """The tokens that follow: those of the drafts that are right, and one more."""
        gained = [self._sample(state)]
        for draft in drafts:
            if draft != gained[-1]:
                break
            state = _extend(state, draft)
            gained.append(self._sample(state))
        return gained

    def _score(
        self, plan: RankPlan, i: int, count: int, hashes: NDArray[np.uint64], ids: Int32Array
    ) -> PromptLogprobs:
        """Made-up log-probabilities of the tokens after the last `count` of row i's chunk."""
        first = int(plan.kv_starts[i] + plan.q_lens[i]) - count + 1
        logprobs = made_up_logprobs(hashes[int(plan.rows[i]), first : first + count])
        logprobs = np.pad(logprobs, (0, count - len(logprobs)))
        return PromptLogprobs(
            logprobs=logprobs,
            top_ids=np.zeros((count, MAX_TOP_LOGPROBS), np.int32),
            top_logprobs=np.zeros((count, MAX_TOP_LOGPROBS), np.float32),
            id_logprobs=made_up_id_logprobs(logprobs, ids),
        )

    def expected_logprobs(self, prompt: list[int]) -> list[float]:
        """What any schedule must report for each token of `prompt` but the first."""
        hashes = np.zeros(len(prompt), np.uint64)
        _hash_span(np.array(prompt, np.int32), hashes, 0, len(prompt))
        logprobs: list[float] = made_up_logprobs(hashes).tolist()
        return logprobs

    def _check_rows_distinct(self, rank: int, plan: RankPlan) -> None:
        if len(np.unique(plan.rows)) != len(plan.rows) or (plan.rows <= 0).any():
            raise ContentError(f"rank {rank}: rows must be distinct and not null: {plan.rows}")

    def _slots(self, pages: Int32Array, first: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(first, end)
        page_size = self.sizes.page_size
        page_ids = pages[positions // page_size].astype(np.int64)
        if (page_ids <= 0).any():
            raise ContentError(f"tokens {first} to {end} of a row lie in the null page: {pages}")
        return page_ids * page_size + positions % page_size

    def _sample(self, state: int) -> int:
        return (state >> 33) % self.sizes.vocab_size


class StateOracle:
    """What the slots of states of one rank hold: the hash of the prefix that each is after."""

    def __init__(self, sizes: EngineSizes, rank: int) -> None:
        self._sizes = sizes
        self._rank = rank
        self._slots = np.zeros(sizes.num_state_slots, np.uint64)
        self._current = np.zeros(sizes.num_rows, np.int32)
        self._read: set[int] = set()
        self._written: set[int] = set()

    @property
    def snapshots(self) -> NDArray[np.uint64]:
        """The contents of the pool of kept states; a view."""
        return self._slots[: self._sizes.num_snapshots]

    def held(self, slots: list[int]) -> NDArray[np.uint64]:
        """What is in these slots."""
        return self._slots[slots]

    def run(
        self, plan: RankPlan, i: int, start: int, hashes: NDArray[np.uint64], drafts: list[int]
    ) -> None:
        """Row i of the plan goes on from `start` to the end of `hashes`, and over its drafts."""
        assert plan.states is not None
        row, source = int(plan.rows[i]), int(plan.states.sources[i])
        slot = source if source >= 0 else int(self._current[row])
        expected = int(hashes[start - 1]) if start else 0
        if int(self._slots[slot]) != expected:
            raise ContentError(
                f"rank {self._rank}, row {row}: slot {slot} has not the state after {start} tokens"
            )
        self._read.add(slot)
        out = self._out(plan, i)
        if i >= plan.num_decode:
            self._write(out, int(hashes[-1]))
            return
        state = int(hashes[-1])
        self._write(out, state)
        for j, draft in enumerate(drafts):
            state = _extend(state, draft)
            self._write(out + 1 + j, state)

    def keep(
        self, plan: RankPlan, i: int, start: int, num_kept: int, hashes: NDArray[np.uint64]
    ) -> None:
        """Of row i's tokens from `start` on so many count."""
        assert plan.states is not None
        last = num_kept - 1 if i < plan.num_decode else 0
        self._current[plan.rows[i]] = self._out(plan, i) + last
        for index, length, slot in plan.states.snapshots.tolist():
            if index == i and start < length <= start + num_kept:
                if not 0 < slot < self._sizes.num_snapshots:
                    raise ContentError(f"rank {self._rank}: slot {slot} is no snapshot's")
                self._write(slot, int(hashes[length - 1]))

    def end_step(self) -> None:
        """Nothing that was read may have been written: rows run in no order."""
        both = self._read & self._written
        if both:
            raise ContentError(f"rank {self._rank}: slots {both} are read and written in one step")
        self._read.clear()
        self._written.clear()

    def _out(self, plan: RankPlan, i: int) -> int:
        assert plan.states is not None
        return self._sizes.own_slot(int(plan.rows[i]), int(plan.states.halves[i]))

    def _write(self, slot: int, state: int) -> None:
        if slot <= 0 or slot in self._written:
            raise ContentError(f"rank {self._rank}: slot {slot} is written twice, or is null")
        self._written.add(slot)
        self._slots[slot] = state


def made_up_logprobs(hashes: NDArray[np.uint64]) -> Float32Array:
    """A log-probability in (-16, 0] that only the prefix up to the token determines."""
    return -(hashes >> np.uint64(44)).astype(np.float32) / np.float32(1 << 16)


def made_up_id_logprobs(logprobs: Float32Array, ids: Int32Array) -> Float32Array:
    """Of tokens that a request has named, float32[n, ids], beside the `logprobs` float32[n]."""
    return logprobs[:, None] - ids.astype(np.float32) / np.float32(1024)


def _extend(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * _MULTIPLIER + 1442695040888963407) & _MASK


def _hashes_after(state: int, tokens: list[int]) -> NDArray[np.uint64]:
    """The prefix hashes of `tokens` that follow a prefix with this hash."""
    hashes = []
    for token in tokens:
        state = _extend(state, token)
        hashes.append(state)
    return np.array(hashes, np.uint64)


def _hash_span(tokens: Int32Array, hashes: NDArray[np.uint64], start: int, end: int) -> None:
    """Set hashes[start:end] to the prefix hashes of tokens."""
    state = int(hashes[start - 1]) if start else 0
    for position in range(start, end):
        state = _extend(state, int(tokens[position]))
        hashes[position] = state
