"""The contract between the scheduler, which plans steps, and the executor, which runs them.

A step is one launch on the device. For each data-parallel rank it lists rows: one token for each
running request (decode), then prefill chunks. The plan does not contain the tokens: the executor
keeps a *token table* on the device, `tokens[row, position]`. A request's admission (`RowAdmission`)
fills in the prompt, and each step appends the tokens it samples. So the host can plan and launch
the next step before it has read the sampled tokens: this is the token relay.

A decode row may also have k drafts: guesses of the next tokens, usually computed by the step from
the token table. The step also samples a token at each draft's position, and keeps the sampled
tokens up to the first that differs from its draft. So a row gains 1 to 1 + k tokens. If the next
step is planned before the result is read, the host does not have the exact length of the row: the
plan marks the row (`relayed`), and the executor uses the length on the device.

A plan of only decode rows may have several steps (`num_steps`), which the device computes in a
loop. Each reads the token that the previous step wrote to the token table. A row ends early at a
stop token. So it gains 1 to num_steps tokens, and the host treats those after the first like
drafts.

Every array in a plan is a fresh copy, or a part of one made for all ranks (and therefore not
necessarily contiguous). The scheduler never writes to it after the launch, so the executor may pass
it to the device without a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.page_tables import NO_PAGE_CHANGES, PageChanges
from sgl_jax.core.sampling_params import LogprobsMode, SamplingParams

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
# Rows or pages as an array index: numpy converts any other type on each use.
IntpArray = NDArray[np.intp]
RowIndex = IntpArray


def mask_words(vocab_size: int) -> int:
    """Return the length of a token mask in 32-bit words; bit i is set if token i is allowed."""
    return -(-vocab_size // 32)


# The numbers of an image in a row's list: index of its first token, number of tokens, tokens side
# by side, and what the positions of the tokens before it have been moved by.
IMAGE_FIELDS = 4
NO_IMAGES: Int32Array = np.zeros((0, IMAGE_FIELDS), np.int32)


class ImageEncoding(NamedTuple):
    """An image whose vectors the tower computes before the step, and their rows of the table."""

    height: int  # in pixels
    width: int
    pixels: bytes  # uint8 [height, width, 3]
    slots: Int32Array  # [tokens]


class RowAdmission(NamedTuple):
    """A request gets a row. Carries everything about the request that the device needs, sent once.

    After a retract the request is admitted again, to any row, with its generated tokens as part of
    `tokens`. `prompt_len` is still the length of the original prompt, so that penalties and
    `min_new_tokens` count the same output.
    """

    row: int
    tokens: Int32Array  # [n] prompt and output from position `start` on
    prompt_len: int
    sampling: SamplingParams
    seed: int  # int64; drawn by the scheduler if the request has none
    stop_token_ids: tuple[int, ...]  # all ids that end the request, including the model's
    # Number of tokens already in the row's token table, from the session's previous turn.
    start: int = 0
    # Tokens with log-probabilities reported at each position, in addition to the sampled token.
    logprob_ids: tuple[int, ...] = ()
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs_mode: LogprobsMode = "raw"
    # [n, IMAGE_FIELDS] all images of the prompt, in order. A token that has still to be computed
    # is `vocab_size` plus its row of the table of images' vectors.
    images: Int32Array = NO_IMAGES


class StatePlan(NamedTuple):
    """Recurrent states that a rank's rows read and write in a step; n rows as in `RankPlan`.

    The slots of kept states (snapshots) come first, then the slots of each row
    (`EngineSizes.own_slot`). A row has two halves of slots: a step reads the half that the previous
    step wrote and writes the other, so that the state before a step still exists after it.
    """

    # [n] slot of the state before the row's first query; NO_SLOT: the slot its last step wrote.
    sources: Int32Array
    halves: Int32Array  # [n] 0 or 1: the half of the row's slots that the step writes
    # [m, 3] states to keep: index of the row in the plan, length in tokens, slot of a snapshot.
    # The step writes a snapshot if it computes, and keeps, the last token of that length.
    snapshots: Int32Array

    @classmethod
    def from_nothing(cls, num_rows: int) -> "StatePlan":
        """Return the plan of rows that start from the empty state and keep no snapshot."""
        zeros = np.zeros(num_rows, np.int32)
        return cls(zeros, zeros, np.zeros((0, 3), np.int32))


NO_SLOT = -1
NO_DRAFT = -1
NON_FINITE = -2  # replaces a row's first new token


class RankPlan(NamedTuple):
    """The rows of one rank in one step: `num_decode` decode rows, then prefill chunks.

    With n rows, row i computes positions [kv_starts[i], kv_starts[i] + q_lens[i]) of its request,
    and reads the KV of all earlier positions from the pages in its page table. If `samples[i]`, the
    step samples the token at position kv_starts[i] + q_lens[i] and writes it to the token table.

    A decode row's first query is the last token of its request; q_lens[i] - 1 drafts follow, and a
    token is sampled after each query. If `relayed[i]`, kv_starts[i] is only a lower bound of the
    last token's position: the executor uses the row's length on the device.
    """

    rows: Int32Array  # [n] row of ReqToTokenPool, never 0
    kv_starts: Int32Array  # [n]
    q_lens: Int32Array  # [n], 1 + drafts for decode rows
    samples: BoolArray  # [n]
    num_pages: int  # page-table columns that the longest row may use
    num_decode: int
    relayed: BoolArray  # [n] False for prefill rows
    admissions: tuple[RowAdmission, ...] = ()
    # [n] number of each row's last queries that report prompt log-probabilities: 0 for decode rows,
    # in total at most EngineSizes.max_prompt_logprob_tokens; None: all 0.
    num_scored: Int32Array | None = None
    return_logprob: bool = False  # True if any row reports the sampled token
    top_logprobs_num: int = 0  # most likely tokens to report, maximum over rows
    num_logprob_ids: int = 0  # `logprob_ids` to report, maximum over rows
    returns_hidden: bool = False  # True if any row reports a hidden state
    token_values: int = 0  # values that any row reports of its tokens: a mask of `token_values.py`
    states: StatePlan | None = None  # only for models with recurrent layers
    # [num_decode, max_draft_tokens] drafts chosen by the host for decode rows; NO_DRAFT where the
    # step computes the draft. None: the step computes all drafts.
    drafts: Int32Array | None = None
    # [n] decode steps of each row, which has no drafts and, for the first, no other query than its
    # last token; None: one step.
    num_steps: Int32Array | None = None
    encodings: tuple[ImageEncoding, ...] = ()  # in this order

    @property
    def num_tokens(self) -> int:
        return int(self.q_lens.sum())

    def known_drafts(self, index: int) -> list[int]:
        """Return the host's drafts for the row at `index`, without padding."""
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
    """Contents moved between pages of a rank's device pools and blocks in host memory.

    `pages[p][i]` corresponds to `blocks[p][i]`, for each pool p of the rank.
    """

    dp_rank: int
    number: int  # transfer number within the rank
    pages: tuple[Int32Array, ...]
    blocks: tuple[Int32Array, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step over all ranks; `ranks[r]` has zero rows if rank r has nothing to do.

    `page_changes` has the changes of all rows, not only the step's, since the previous step was
    planned.

    If a grammar constrains a sampling row, `is_masked` is set. The step then samples only when
    `Executor.draw` is called, since the allowed tokens depend on the previous token. It is also set
    if a rank `returns_hidden`, since only these steps report hidden states.

    If `has_steps`, every rank has `num_steps`, and none has a prefill row or a grammar.

    `saved` lists pages that were evicted while the step was planned and may be overwritten by it:
    they are copied to host memory before it runs.
    """

    step_id: int
    ranks: tuple[RankPlan, ...]
    page_changes: PageChanges = NO_PAGE_CHANGES
    is_masked: bool = False
    saved: tuple[PageTransfer, ...] = ()
    has_steps: bool = False


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the *next* tokens of one prefill chunk's last m = num_scored queries.

    Entry j belongs to position kv_start + q_len - m + j + 1. The last entry of the prompt's last
    chunk predicts the first generated token and is not a prompt token.
    """

    logprobs: Float32Array  # [m] log-probability of the actual next token
    top_ids: Int32Array  # [m, MAX_TOP_LOGPROBS]
    top_logprobs: Float32Array  # [m, MAX_TOP_LOGPROBS]
    id_logprobs: Float32Array | None = None  # [m, MAX_LOGPROB_IDS], the row's first


class RankResult(NamedTuple):
    """New tokens of one rank's rows, in plan order; w = 1 + EngineSizes.max_draft_tokens, or
    EngineSizes.max_decode_steps in a plan of several steps.

    `tokens[i]` begins with the new tokens of row i and is padded with -1. If the row did not
    sample, all entries are -1. Optional fields are None unless the plan requests them.

    A row with non-finite results has NON_FINITE and no token, even if it does not sample.
    Non-finite means a logit that is NaN or +inf, or all logits -inf: after a token that the row
    keeps, in a position that it scores, or for the first draft of a draft layer. These are the
    model's logits, before the request's penalties, biases and masks. In a chunk of a prompt, the
    hidden states of all its tokens are checked, too.
    """

    tokens: Int32Array  # [n, w]
    logprobs: Float32Array | None = None  # [n, w]
    top_ids: Int32Array | None = None  # [n, w, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: Float32Array | None = None  # [n, w, MAX_TOP_LOGPROBS]
    id_logprobs: Float32Array | None = None  # [n, w, MAX_LOGPROB_IDS], each row's first
    # Index of a row in the plan -> values, for rows with `num_scored` above 0.
    prompt_logprobs: dict[int, PromptLogprobs] | None = None
    # [n, hidden_size] each row's last hidden state without its drafts, after the final norm.
    hidden: Float32Array | None = None
    # By name [T, ...] of the T query tokens, drafts included, row after row; in a plan of several
    # steps [n, w, ...]. See `token_values.py`.
    token_values: Mapping[str, NDArray[Any]] = {}


# A launched step with an unread result; opaque to all but the executor that created it.
StepHandle: TypeAlias = Any


class Executor(Protocol):
    """The scheduler's view of the device.

    Steps run in launch order. `launch` returns before the step has finished; `result` waits for it.
    Results must be read in launch order, each exactly once. After the launch of a masked step,
    `draw` must be called before any other launch and before its result is read.
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

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]: ...
