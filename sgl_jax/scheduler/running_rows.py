"""The running requests as columns of arrays, indexed by row: of all ranks, and views for each.

A decode step touches only these arrays, so its cost on the host hardly depends on the number of
running requests. Each rank indexes them by its `ReqToTokenPool` rows. The arrays are the host's
own: a step plan gets copies.

    0         prompt_len        known_len        planned_len         + unread_drafts     max_len
    |  prompt  |  output, read   |  sampled by launched steps, not read yet  |  perhaps  |

A launched step adds one token for certain, and one for each accepted draft: until its result is
read, the row's length lies between `planned_len` and `planned_len` + `unread_drafts`.
"""

import mmap
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS
from sgl_jax.core.step_plan import BoolArray, Float32Array, Int32Array, IntpArray, RowIndex
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.priority_counts import PriorityCounts

NO_TOKEN = -1
TOKEN_BLOCK = 64  # tokens that are written to a row's table together
NOT_SCORED = np.iinfo(np.int32).max
# The end of a request: not yet, at its longest permitted length, or by a stop token.
GOES_ON, TOO_LONG, STOPPED = 0, 1, 2


@dataclass(eq=False)
class RowColumns:
    """The scheduler's records of n rows; a rank's columns are views of all ranks' columns."""

    tokens: Int32Array  # [n, max_context_len, in whole blocks]; the last block may lack the latest
    # The token at position p is at p % TOKEN_BLOCK, for the last positions. Each step writes a
    # token for each row close together here; their places in `tokens` are far apart.
    latest: Int32Array  # [n, TOKEN_BLOCK]
    known_len: Int32Array  # [n], as all that follow
    planned_len: Int32Array
    unread_drafts: Int32Array
    prompt_len: Int32Array
    min_len: Int32Array  # no stop before this many tokens
    max_len: Int32Array
    regained_len: Int32Array  # at which it has gained as many tokens as it lost by retracts
    length_class: Int32Array  # of its output: see `output_lengths.py`
    priority: NDArray[np.int64]
    tenant: Int32Array  # number of the request's tenant
    stop_ids: Int32Array  # [n, MAX_STOP_TOKEN_IDS], padded with NO_TOKEN
    has_grammar: BoolArray
    return_logprob: BoolArray
    top_logprobs_num: Int32Array
    num_logprob_ids: Int32Array
    # Prompt position from which the successors' log-probabilities are requested; NOT_SCORED if none
    # are, or all have been planned.
    score_start: Int32Array
    # The success of drafts: see `draft_policy.py`.
    draft_gain: Float32Array  # accepted tokens per step, a moving average
    draft_from_len: Int32Array  # no drafts before the known length reaches this
    draft_pause: Int32Array  # length of the next pause in drafting, in tokens
    is_unsent: BoolArray  # nothing sent yet: the first output carries more than a token
    rids: np.ndarray  # object[n] of str

    @classmethod
    def empty(cls, num_rows: int, max_context_len: int) -> "RowColumns":
        """Columns of `num_rows` free rows."""
        lens = np.zeros((10, num_rows), np.int32)
        return cls(
            tokens=_zeros(num_rows, -(-max_context_len // TOKEN_BLOCK) * TOKEN_BLOCK),
            latest=np.zeros((num_rows, TOKEN_BLOCK), np.int32),
            known_len=lens[0],
            planned_len=lens[1],
            unread_drafts=lens[2],
            prompt_len=lens[3],
            min_len=lens[4],
            max_len=lens[5],
            regained_len=lens[8],
            length_class=lens[9],
            priority=np.zeros(num_rows, np.int64),
            tenant=np.zeros(num_rows, np.int32),
            stop_ids=np.full((num_rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int32),
            has_grammar=np.zeros(num_rows, np.bool_),
            return_logprob=np.zeros(num_rows, np.bool_),
            top_logprobs_num=np.zeros(num_rows, np.int32),
            num_logprob_ids=np.zeros(num_rows, np.int32),
            score_start=np.full(num_rows, NOT_SCORED, np.int32),
            draft_gain=np.zeros(num_rows, np.float32),
            draft_from_len=lens[6],
            draft_pause=lens[7],
            is_unsent=np.zeros(num_rows, np.bool_),
            rids=np.full(num_rows, "", dtype=object),
        )

    def part(self, rows: slice) -> "RowColumns":
        return RowColumns(*(getattr(self, field.name)[rows] for field in fields(self)))

    def append(
        self,
        rows: RowIndex,
        bounds: IntpArray,
        epochs: Int32Array,
        samples: BoolArray,
        *,
        epoch: Int32Array,
        tokens: Int32Array,
        num_stop_ids: int,
    ) -> "Gains":
        """Append each row's new tokens, up to the one that ends its request.

        Accepted tokens beyond that one are overshoot and dropped here; their KV is freed with the
        lease, which offers the cache no more than the known tokens.

        Args:
            rows: int[n], of a launched step, rank by rank.
            bounds: rank k's rows are in [bounds[k], bounds[k + 1]).
            epochs: int32[n], of the rows at the launch.
            samples: bool[n], rows that needed a token.
            epoch: int32 of every row now. If it differs, the result is dropped.
            tokens: int32[n, w], each row's new tokens, then -1.
            num_stop_ids: columns of `stop_ids` to check.
        """
        gains = _append_tokens(
            rows,
            bounds,
            epochs,
            samples,
            tokens,
            epoch,
            self.tokens,
            self.latest,
            self.known_len,
            self.min_len,
            self.max_len,
            self.stop_ids,
            num_stop_ids,
            self.is_unsent,
            self.return_logprob,
        )
        return Gains(*gains)

    def may_run(self, rows: RowIndex) -> BoolArray:
        """Select the `rows` that still need a step.

        A row whose last permitted token was sampled, or may have been, waits for its result.
        """
        most = self.planned_len[rows] + self.unread_drafts[rows]
        is_open: BoolArray = most < self.max_len[rows]
        return is_open

    def expected_steps_to_ends(self, rows: RowIndex) -> Int32Array:
        """Steps until each of `rows` may end, if it generates half of its remaining tokens."""
        steps: Int32Array = (self.max_len[rows] - self.planned_len[rows]) // 2
        return steps


def _zeros(num_rows: int, num_columns: int) -> Int32Array:
    """int32[num_rows, num_columns], which takes memory only for written pages.

    The operating system zeroes it in small pages. It would zero a numpy array by 2 MiB, and delay
    the first step that writes there by milliseconds.
    """
    memory = mmap.mmap(-1, num_rows * num_columns * np.dtype(np.int32).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(num_rows, num_columns)


class Gains(NamedTuple):
    """The new tokens of the n rows of a launched step."""

    counts: Int32Array  # [n] tokens, 0 if the result is dropped or no token was needed
    ends: NDArray[np.int8]  # [n] GOES_ON, TOO_LONG or STOPPED
    detailed: IntpArray  # indices of rows that gained tokens, and not just one plain token
    plain_rows: RowIndex  # the other rows that gained tokens: their rows,
    plain_tokens: Int32Array  # the token of each,
    plain_bounds: IntpArray  # [ranks + 1] and each rank's bounds
    num_tokens: int


@compiled(
    "(int64[::1], int64[::1], int32[::1], boolean[::1], int32[:, ::1], int32[::1], int32[:, ::1], "
    "int32[:, ::1], int32[::1], int32[::1], int32[::1], int32[:, ::1], int64, boolean[::1], "
    "boolean[::1])"
)
def _append_tokens(
    rows: RowIndex,
    bounds: IntpArray,
    epochs: Int32Array,
    samples: BoolArray,
    new_tokens: Int32Array,
    epoch: Int32Array,
    tokens: Int32Array,
    latest: Int32Array,
    known_len: Int32Array,
    min_len: Int32Array,
    max_len: Int32Array,
    stop_ids: Int32Array,
    num_stop_ids: int,
    is_unsent: BoolArray,
    return_logprob: BoolArray,
) -> tuple[Any, ...]:
    """The fields of `Gains`; the first five parameters are as in `RowColumns.append`, others
    columns."""
    num_rows, width = new_tokens.shape
    assert len(rows) == len(epochs) == len(samples) == num_rows == bounds[-1]
    assert num_stop_ids <= stop_ids.shape[1]
    counts = np.zeros(num_rows, np.int32)
    ends = np.zeros(num_rows, np.int8)
    detailed = np.empty(num_rows, np.int64)
    plain_rows = np.empty(num_rows, np.int64)
    plain_tokens = np.empty(num_rows, np.int32)
    plain_bounds = np.zeros(len(bounds), np.int64)
    num_detailed = num_plain = num_tokens = 0
    for rank in range(len(bounds) - 1):
        for i in range(bounds[rank], bounds[rank + 1]):
            row = rows[i]
            assert 0 <= row < len(known_len)
            if not samples[i] or epoch[row] != epochs[i]:
                continue
            length = known_len[row]
            assert 0 <= length < max_len[row] <= tokens.shape[1]
            count, end = 0, GOES_ON
            while end == GOES_ON and count < width and (count == 0 or new_tokens[i, count] >= 0):
                token = new_tokens[i, count]
                place = length % TOKEN_BLOCK
                latest[row, place] = token
                if place == TOKEN_BLOCK - 1:
                    for j in range(TOKEN_BLOCK):
                        tokens[row, length - place + j] = latest[row, j]
                length += 1
                count += 1
                if length >= max_len[row]:
                    end = TOO_LONG
                if length > min_len[row]:
                    for j in range(num_stop_ids):
                        if stop_ids[row, j] == token:
                            end = STOPPED
            known_len[row] = length
            counts[i], ends[i] = count, end
            num_tokens += count
            if count > 1 or end != GOES_ON or is_unsent[row] or return_logprob[row]:
                detailed[num_detailed] = i
                num_detailed += 1
            else:
                plain_rows[num_plain], plain_tokens[num_plain] = row, new_tokens[i, 0]
                num_plain += 1
        plain_bounds[rank + 1] = num_plain
    return (
        counts,
        ends,
        detailed[:num_detailed],
        plain_rows[:num_plain],
        plain_tokens[:num_plain],
        plain_bounds,
        num_tokens,
    )


class RunningRows(RowColumns):
    """The columns of a rank's rows; `active` lists the rows in use, oldest first."""

    def __init__(self, columns: RowColumns) -> None:
        super().__init__(*(getattr(columns, field.name) for field in fields(columns)))
        self.active: RowIndex = np.zeros(0, np.intp)
        self.priorities = PriorityCounts()
        self.num_stop_ids = 0  # columns of `stop_ids` that were ever used
        self.requests: list[Request | None] = [None] * len(self.known_len)

    def __len__(self) -> int:
        return len(self.active)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is not running"
        return request

    def add(self, row: int, request: Request, stop_ids: tuple[int, ...]) -> None:
        """Run `request`, with all its known tokens, in `row`."""
        sampling, count = request.message.sampling, len(request.tokens)
        self.tokens[row, :count] = request.tokens
        last_block = count // TOKEN_BLOCK * TOKEN_BLOCK
        self.latest[row, : count - last_block] = request.tokens[last_block:]
        self.known_len[row] = count
        self.planned_len[row] = count
        self.unread_drafts[row] = 0
        self.prompt_len[row] = request.prompt_len
        self.min_len[row] = request.prompt_len + sampling.min_new_tokens
        self.max_len[row] = request.max_len
        self.regained_len[row] = count + request.num_lost
        self.priority[row] = request.priority
        self.priorities.add(request.priority)
        self.tenant[row] = request.tenant
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.num_stop_ids = max(self.num_stop_ids, len(stop_ids))
        self.has_grammar[row] = sampling.grammar is not None
        self.return_logprob[row] = request.message.return_logprob
        self.top_logprobs_num[row] = request.message.top_logprobs_num
        self.num_logprob_ids[row] = len(request.message.token_ids_logprob)
        is_scored = request.logprob_next < request.prompt_len
        self.score_start[row] = max(request.logprob_next - 1, 0) if is_scored else NOT_SCORED
        self.is_unsent[row] = count == request.prompt_len
        self.requests[row] = request
        self.rids[row] = request.rid
        self.active = np.concatenate((self.active, (row,)))

    def remove(self, row: int) -> Int32Array:
        """Take a request out of its row; return a copy of its known tokens."""
        tokens = self.known_tokens(row).copy()
        self.priorities.remove(int(self.priority[row]))
        self.requests[row] = None
        self.rids[row] = ""
        self.active = self.active[self.active != row]
        return tokens

    def known_tokens(self, row: int) -> Int32Array:
        """The known tokens of `row`, int32[known_len]; a view."""
        count = int(self.known_len[row])
        last_block = count // TOKEN_BLOCK * TOKEN_BLOCK
        self.tokens[row, last_block:count] = self.latest[row, : count - last_block]
        return self.tokens[row, :count]

    def expected_steps_to_end(self, row: int) -> int:
        """`expected_steps_to_ends` of one row."""
        return int(self.max_len[row] - self.planned_len[row]) // 2

    def runnable(self) -> RowIndex:
        """Active rows that still need a step, oldest first."""
        return self.active[self.may_run(self.active)]
