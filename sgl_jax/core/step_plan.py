"""The contract between the scheduler, which plans steps, and the executor, which runs them.

A step is one launch on the device. For each data-parallel rank it lists rows: one token for each
running request (decode), then prefill chunks. The tokens themselves are not in the plan: the
executor keeps a *token table* on the device, `tokens[row, position]`. A request's admission
(`RowAdmission`) fills in the prompt, and each step appends the tokens that it samples. So the host
can plan and launch the next step before it has read the sampled tokens: this is the token relay.

A decode row may also have k drafts: guesses of the tokens that follow, mostly made by the step
itself from the token table. The step samples a token at each draft's position too, and keeps the
sampled tokens up to the first that differs from its draft. So a row gains 1 to 1 + k tokens. If
the next step is planned before the result is read, the host has no exact length of the row: the
plan marks the row (`relayed`), and the executor uses the length that it keeps on the device.

Every array in a plan is a fresh copy, or a part of one made for all ranks (so it need not be
contiguous). The scheduler never writes to it after the launch, so the executor may pass it to the
device without a copy.
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
# Rows or pages as an index into arrays: numpy converts any other type on each use.
IntpArray = NDArray[np.intp]
RowIndex = IntpArray


def mask_words(vocab_size: int) -> int:
    """Return the length of a token mask in 32-bit words: bit i of the mask is set if token i is
    allowed."""
    return -(-vocab_size // 32)


class RowAdmission(NamedTuple):
    """A request gets a row; has everything that the device needs about it, sent once.

    After a retract the request is admitted again, to any row, with its generated tokens as part of
    `tokens`. `prompt_len` is still the length of the original prompt, so that penalties and
    `min_new_tokens` count the same output.
    """

    row: int
    tokens: Int32Array  # [n], the prompt, then the output, from position `start` on
    prompt_len: int
    sampling: SamplingParams
    seed: int  # int64; drawn by the scheduler if the request brought none
    stop_token_ids: tuple[int, ...]  # all that end the request, the model's own included
    # Tokens already in the row's token table, from the session's previous turn.
    start: int = 0
    # Tokens whose log-probabilities are reported at each position, besides the sampled one's.
    logprob_ids: tuple[int, ...] = ()


class StatePlan(NamedTuple):
    """Recurrent states that a rank's rows read and write in a step; n rows as in `RankPlan`.

    The slots of kept states (snapshots) come first, then each row's own (`EngineSizes.own_slot`). A
    row has two halves of own slots: a step reads the half that the previous step wrote, and writes
    the other, so the state before a step is still there after it.
    """

    # [n] slot of the state before the row's first query; NO_SLOT: the slot its last step wrote.
    sources: Int32Array
    halves: Int32Array  # [n] 0 or 1: the half of the row's own slots that the step writes
    # [m, 3] states to keep: index of the row in the plan, length in tokens, slot of a snapshot.
    # The step writes a snapshot if it computes, and keeps, the last token of that length.
    snapshots: Int32Array

    @classmethod
    def from_nothing(cls, num_rows: int) -> "StatePlan":
        """Return the plan of `num_rows` rows that start from the empty state and keep no
        snapshots."""
        zeros = np.zeros(num_rows, np.int32)
        return cls(zeros, zeros, np.zeros((0, 3), np.int32))


NO_SLOT = -1
NO_DRAFT = -1
NON_FINITE = -2  # in place of a row's first new token


class RankPlan(NamedTuple):
    """The rows of one rank in one step. Row order: `num_decode` decode rows, then prefill chunks.

    With n rows: row i computes positions [kv_starts[i], kv_starts[i] + q_lens[i]) of its request,
    and reads the KV of all earlier positions from the pages in its page table. If `samples[i]`, the
    step samples the token at position kv_starts[i] + q_lens[i] and writes it to the token table.

    A decode row's first query is the last token of its request; q_lens[i] - 1 drafts follow it, and
    a token is sampled after each query. If `relayed[i]`, kv_starts[i] is only a lower bound of that
    last token's position: the executor uses the row's length on the device.
    """

    rows: Int32Array  # [n] row of ReqToTokenPool, never 0
    kv_starts: Int32Array  # [n]
    q_lens: Int32Array  # [n], 1 + drafts for decode rows
    samples: BoolArray  # [n]
    num_pages: int  # columns of the page tables that the longest of the rows may use
    num_decode: int
    relayed: BoolArray  # [n] False for prefill rows
    admissions: tuple[RowAdmission, ...] = ()
    # [n] the number of each row's last queries that report prompt log-probabilities: 0 for decode
    # rows, and at most EngineSizes.max_prompt_logprob_tokens in all; None: all 0.
    num_scored: Int32Array | None = None
    return_logprob: bool = False  # True if any row reports its sampled token's log-probability
    top_logprobs_num: int = 0  # likeliest tokens reported besides it, the most of any row
    num_logprob_ids: int = 0  # `logprob_ids` reported besides it, the most of any row
    states: StatePlan | None = None  # only for models with recurrent layers
    # [num_decode, max_draft_tokens] drafts that the host has chosen for decode rows; NO_DRAFT
    # where the step makes its own. None: it makes all of them.
    drafts: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of this rank in this step."""
        return int(self.q_lens.sum())

    def known_drafts(self, index: int) -> list[int]:
        """Return the drafts in `drafts` of the row at `index`."""
        if self.drafts is None or index >= self.num_decode:
            return []
        drafts: list[int] = self.drafts[index, : self.q_lens[index] - 1].tolist()
        return drafts

    @property
    def num_drafts(self) -> Int32Array:
        """Return the number of drafts of each row, int32[n]."""
        drafts = np.zeros_like(self.q_lens)
        drafts[: self.num_decode] = self.q_lens[: self.num_decode] - 1
        return drafts


class PageTransfer(NamedTuple):
    """Contents that move between pages of a rank's device pools and blocks in the host's memory.

    `pages[p][i]` belongs to `blocks[p][i]`, for each pool p of the rank.
    """

    dp_rank: int
    number: int  # of the transfer, by rank
    pages: tuple[Int32Array, ...]
    blocks: tuple[Int32Array, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step over all ranks; `ranks[r]` has zero rows if rank r has nothing to do.

    `page_changes` has the changes since the previous step was planned, of all rows, not only the
    step's.

    `is_masked` is set if a grammar constrains a row that samples. The step then samples only when
    `Executor.draw` is called, since the allowed tokens depend on the previous token.

    `saved` are pages that were evicted while the step was planned, and that it may overwrite: they
    are copied to the host before it runs.
    """

    step_id: int
    ranks: tuple[RankPlan, ...]
    page_changes: PageChanges = NO_PAGE_CHANGES
    is_masked: bool = False
    saved: tuple[PageTransfer, ...] = ()


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
    """New tokens of one rank's rows, in plan order; w = 1 + EngineSizes.max_draft_tokens.

    `tokens[i]` begins with the new tokens of row i; the rest is -1, and all of it if the row did
    not sample. Optional fields are None unless the plan requests them.

    A row whose results are not finite has NON_FINITE and no token, whether it samples or not. That
    is a row with a logit that is NaN or +inf, or with all logits -inf: after a token that it keeps,
    in a position that it scores, or of the first draft of a draft layer. The logits are the model's
    own, before the request's penalties, biases and masks. In a chunk of a prompt, the hidden states
    of all its tokens count, too.
    """

    tokens: Int32Array  # [n, w]
    logprobs: Float32Array | None = None  # [n, w]
    top_ids: Int32Array | None = None  # [n, w, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: Float32Array | None = None  # [n, w, MAX_TOP_LOGPROBS]
    id_logprobs: Float32Array | None = None  # [n, w, MAX_LOGPROB_IDS], each row's own come first
    # Index of a row in the plan -> its values, for rows with `num_scored` above 0.
    prompt_logprobs: dict[int, PromptLogprobs] | None = None


# A launched step whose result has not been read; only the executor that made it looks inside.
StepHandle: TypeAlias = Any


class Executor(Protocol):
    """The scheduler's view of the device.

    Steps run in launch order. `launch` returns before the step has finished; `result` waits for
    it. Results must be read in launch order, each exactly once. After the launch of a masked step,
    `draw` must be called before any other launch, and before its result is read.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Raises if the plan exceeds the sizes the executor was built for."""
        ...

    def draw(self, handle: StepHandle, masks: Sequence[Int32Array]) -> None:
        """Sample the tokens of a masked step.

        Args:
            handle: the step launched last.
            masks: for each rank, int32[n, 1 + max_draft_tokens, mask_words(vocab_size)]: the tokens
                allowed for each row of its plan, first after its last token, then after each of its
                drafts. The masks of rows without a grammar allow all tokens.
        """
        ...

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        """Wait for a step, and return the results of each rank."""
        ...
