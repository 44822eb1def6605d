"""The contract between the scheduler, which plans steps, and the executor, which runs them.

A step is one launch on the device. For each data-parallel rank it lists rows: one token for each
running request (decode), then prefill chunks. The tokens themselves are not in the plan: the
executor keeps a *token table* on the device, `tokens[row, position]`, filled once when a request
is admitted (`RowAdmission`) and extended by the step itself with each sampled token. So the next
step can be planned and launched before the sampled token was ever seen by the host: this is the
token relay.

A decode row may also carry drafts: guesses, mostly made by the step itself from the token table, of
the tokens that follow. The step computes and samples at every one of their positions and keeps the
sampled tokens up to the first that differs from its draft. So a row gains 1 to 1 + k tokens, and
its length is not known on the host when the next step is planned before the result is read: the
executor keeps it on the device (`tokens` per row) and the plan marks it for a look-up
(`relayed`).

Every array in a plan is a fresh copy, or a part of one made for all ranks (so it need not be
contiguous). The executor may hand it to the device without copying again, and the scheduler never
writes to it after the launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.page_tables import NO_PAGE_CHANGES, PageChanges
from sgl_jax.core.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
# Rows or pages, as an index into columns: numpy converts any other type on each use.
IntpArray = NDArray[np.intp]
RowIndex = IntpArray


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits, one for each token, lowest first, set for each allowed token."""
    return -(-vocab_size // 32)


class RowAdmission(NamedTuple):
    """A request takes a row: everything the device needs about it, sent once.

    After a retract the same request is admitted again, to any row, with the tokens it had
    generated as part of `tokens`; `prompt_len` is still the original prompt's, so penalties
    and `min_new_tokens` go on counting where they were.
    """

    row: int
    tokens: Int32Array  # [n], prompt then output, from position `start` on
    prompt_len: int
    sampling: SamplingParams
    seed: int  # uint32; drawn by the scheduler if the request brought none
    stop_token_ids: tuple[int, ...]  # all that end the request, the model's own included
    # Tokens that the row still holds on the device, from the turn of a session before this.
    start: int = 0
    # Tokens whose log-probabilities are reported beside each other one.
    logprob_ids: tuple[int, ...] = ()


class StatePlan(NamedTuple):
    """The states that one rank's rows go on from, and leave, in a step; n rows as in `RankPlan`.

    Slots are of `EngineSizes.own_slot` and of the pool of snapshots. Each row has slots of
    its own in two halves: a step reads the half of the step before, and writes the other, so
    the state before a step outlives it.
    """

    # [n] slot of the state before the row's first query; NO_SLOT: the one its last step left.
    sources: Int32Array
    halves: Int32Array  # [n] 0 or 1: the half of the row's own slots that the step writes
    # [m, 3] states to keep: index of the row in the plan, length in tokens, slot of a snapshot.
    # Written if the step computes, and keeps, the token before that length.
    snapshots: Int32Array

    @classmethod
    def from_nothing(cls, num_rows: int) -> "StatePlan":
        """The plan of rows that start without tokens before them, and keep nothing."""
        zeros = np.zeros(num_rows, np.int32)
        return cls(zeros, zeros, np.zeros((0, 3), np.int32))


NO_SLOT = -1
NO_DRAFT = -1


class RankPlan(NamedTuple):
    """The rows of one rank in one step. Row order: `num_decode` decode rows, then prefill chunks.

    With n rows: row i computes positions [kv_starts[i], kv_starts[i] + q_lens[i]) of its request,
    reads the KV of all positions before them in the pages that its row lists, and, where
    `samples[i]`, draws the token at position kv_starts[i] + q_lens[i] and records it in the token
    table.

    A decode row's first query is the last token of its request; q_lens[i] - 1 drafts follow it,
    and a token is drawn after each query. With `relayed[i]`, kv_starts[i] is only the least that
    the position of that last token can be: the executor uses the row's length, which it has.
    """

    rows: Int32Array  # [n] row of ReqToTokenPool, never 0
    kv_starts: Int32Array  # [n]
    q_lens: Int32Array  # [n], 1 + drafts for decode rows
    samples: BoolArray  # [n]
    num_pages: int  # that the longest of the rows may read or write
    num_decode: int
    relayed: BoolArray  # [n] False for prefill rows
    admissions: tuple[RowAdmission, ...] = ()
    # The number of a row's last queries that report prompt log-probabilities: 0 for decode
    # rows, and at most EngineSizes.max_prompt_logprob_tokens in all.
    num_scored: Int32Array | None = None  # [n] or None for none
    # Set if any row reports the log-probability of its sampled token; the number of others: the
    # likeliest, and (also beside its prompt's) the `logprob_ids` that it was admitted with.
    return_logprob: bool = False
    top_logprobs_num: int = 0
    num_logprob_ids: int = 0
    states: StatePlan | None = None  # of models with recurrent layers
    # Drafts of decode rows that the host has; NO_DRAFT where the step is to guess.
    drafts: Int32Array | None = None  # [num_decode, max_draft_tokens] or None: it guesses all

    @property
    def num_tokens(self) -> int:
        """Query tokens of this rank in this step."""
        return int(self.q_lens.sum())

    def known_drafts(self, index: int) -> list[int]:
        """The drafts of one row that `drafts` has."""
        if self.drafts is None or index >= self.num_decode:
            return []
        drafts: list[int] = self.drafts[index, : self.q_lens[index] - 1].tolist()
        return drafts

    @property
    def num_drafts(self) -> Int32Array:
        """Drafts of each row, int32[n]."""
        drafts = np.zeros_like(self.q_lens)
        drafts[: self.num_decode] = self.q_lens[: self.num_decode] - 1
        return drafts


@dataclass(frozen=True)
class StepPlan:
    """One step over all ranks; `ranks[r]` has zero rows if rank r has nothing to do.

    `page_changes` has the cells changed since the step before was planned: of all rows,
    not only the step's.

    If a row that samples is held to a grammar (`is_masked`), the step draws nothing until
    `Executor.draw`: which tokens are allowed depends on the one before.
    """

    step_id: int
    ranks: tuple[RankPlan, ...]
    page_changes: PageChanges = NO_PAGE_CHANGES
    is_masked: bool = False


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the *next* tokens of one prefill chunk's last m = num_scored queries.

    Entry j belongs to position kv_start + q_len - m + j + 1; the last entry of the prompt's last
    chunk predicts the first generated token and is not a prompt token.
    """

    logprobs: Float32Array  # [m] of the token that actually follows
    top_ids: Int32Array  # [m, MAX_TOP_LOGPROBS]
    top_logprobs: Float32Array  # [m, MAX_TOP_LOGPROBS]
    id_logprobs: Float32Array | None = None  # [m, MAX_LOGPROB_IDS], the row's own come first


class RankResult(NamedTuple):
    """The gain of one rank's rows, in plan order; w = 1 + EngineSizes.max_draft_tokens.

    A row's new tokens come first in its line, the rest of it is -1: all of it where a row did not
    sample. Optional fields are None unless the plan requests them.
    """

    tokens: Int32Array  # [n, w]
    logprobs: Float32Array | None = None  # [n, w]
    top_ids: Int32Array | None = None  # [n, w, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: Float32Array | None = None  # [n, w, MAX_TOP_LOGPROBS]
    id_logprobs: Float32Array | None = None  # [n, w, MAX_LOGPROB_IDS], each row's own come first
    # Plan index -> values, of the rows that score.
    prompt_logprobs: dict[int, PromptLogprobs] | None = None


# A launched step whose result has not been read: opaque to all but the executor that made it.
StepHandle: TypeAlias = Any


class Executor(Protocol):
    """The scheduler's view of the device.

    Steps run in launch order. `launch` returns before the step has finished; `result` waits for
    it. Results must be read in launch order, each exactly once. A masked step is drawn before its
    result is read, or another step launched.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Raises if the plan exceeds the sizes the executor was built for."""
        ...

    def draw(self, handle: StepHandle, masks: Sequence[Int32Array]) -> None:
        """Let a masked step draw.

        Args:
            handle: of the step launched last.
            masks: of each rank, int32[n, 1 + max_draft_tokens, mask_words(vocab_size)], the tokens
                that each row of its plan may draw next, and after each of its drafts if that is
                right; masks of rows without a grammar allow everything.
        """
        ...

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        """Wait for a step and return the samples of each rank."""
        ...
