"""The running requests of one rank as columns of arrays, indexed by row.

A decode step touches only these arrays, so its cost on the host hardly depends on how many
requests run. Rows are those of the rank's `ReqToTokenPool`. The arrays are the host's own: a
step plan gets copies.

    0         prompt_len        known_len        planned_len         + unread_drafts     max_len
    |  prompt  |  output, read   |  sampled by launched steps, not read yet  |  perhaps  |

A launched step adds one token for certain, and as many more as it accepts of its drafts: until its
result is read, the row's length is known only to lie between `planned_len` and `planned_len` +
`unread_drafts`.
"""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.request import Request

NO_TOKEN = -1
NOT_SCORED = np.iinfo(np.int32).max


class RunningRows:
    """Columns over `sizes.num_rows` rows; `active` lists the rows in use, oldest first."""

    def __init__(self, sizes: EngineSizes) -> None:
        n = sizes.num_rows
        self.active: RowIndex = np.zeros(0, np.intp)
        # Zeroed lazily by the operating system: only rows and positions in use take memory.
        self.tokens = np.zeros((n, sizes.max_context_len), np.int32)
        self.known_len = np.zeros(n, np.int32)
        self.planned_len = np.zeros(n, np.int32)
        self.unread_drafts = np.zeros(n, np.int32)
        self.prompt_len = np.zeros(n, np.int32)
        self.min_len = np.zeros(n, np.int32)  # no stop before this many tokens
        self.max_len = np.zeros(n, np.int32)
        self.priority = np.zeros(n, np.int64)
        self.stop_ids = np.full((MAX_STOP_TOKEN_IDS, n), NO_TOKEN, np.int32)
        self.num_stop_ids = 0  # lines of `stop_ids` that were ever used
        self.return_logprob = np.zeros(n, np.bool_)
        self.top_logprobs_num = np.zeros(n, np.int32)
        # Prompt position from which on the successors' log-probabilities are wanted; NOT_SCORED
        # where none are, or all have been planned.
        self.score_start = np.full(n, NOT_SCORED, np.int32)
        # Nothing sent yet: the first output carries more than a token.
        self.is_unsent = np.zeros(n, np.bool_)
        self.requests: list[Request | None] = [None] * n
        self.rids = np.full(n, "", dtype=object)

    def __len__(self) -> int:
        return len(self.active)

    def request(self, row: int) -> Request:
        """The request that holds `row`."""
        request = self.requests[row]
        assert request is not None, f"row {row} is not running"
        return request

    def add(self, row: int, request: Request, stop_ids: tuple[int, ...]) -> None:
        """Let `request`, with all its known tokens, run in `row`."""
        sampling, count = request.message.sampling, len(request.tokens)
        self.tokens[row, :count] = request.tokens
        self.known_len[row] = count
        self.planned_len[row] = count
        self.unread_drafts[row] = 0
        self.prompt_len[row] = request.prompt_len
        self.min_len[row] = request.prompt_len + sampling.min_new_tokens
        self.max_len[row] = request.max_len
        self.priority[row] = request.priority
        self.stop_ids[:, row] = NO_TOKEN
        self.stop_ids[: len(stop_ids), row] = stop_ids
        self.num_stop_ids = max(self.num_stop_ids, len(stop_ids))
        self.return_logprob[row] = request.message.return_logprob
        self.top_logprobs_num[row] = request.message.top_logprobs_num
        is_scored = request.logprob_next < request.prompt_len
        self.score_start[row] = max(request.logprob_next - 1, 0) if is_scored else NOT_SCORED
        self.is_unsent[row] = count == request.prompt_len
        self.requests[row] = request
        self.rids[row] = request.rid
        self.active = np.concatenate((self.active, (row,)))

    def remove(self, row: int) -> Int32Array:
        """Take a request out of its row; returns a copy of its known tokens."""
        tokens = self.known_tokens(row).copy()
        self.requests[row] = None
        self.rids[row] = ""
        self.active = self.active[self.active != row]
        return tokens

    def has_priority_below(self, priority: int) -> bool:
        """Whether a request runs whose priority is lower than that."""
        return bool(np.count_nonzero(self.priority[self.active] < priority))

    def known_tokens(self, row: int) -> Int32Array:
        """The tokens of `row` the host knows, int32[known_len]; a view."""
        return self.tokens[row, : self.known_len[row]]

    def prefilling(self, committed_len: Int32Array) -> RowIndex:
        """Active rows with more than one token to compute, oldest first; `committed_len` is that
        of all rows."""
        rows = self.active
        return rows[self.planned_len[rows] - committed_len[rows] > 1]

    def runnable(self) -> RowIndex:
        """Active rows that still need a step, oldest first.

        A row whose last permitted token was sampled, or may have been, waits for its result.
        """
        # Of all rows: that costs less than to pick the active ones of three columns.
        may_run = self.planned_len + self.unread_drafts < self.max_len
        return self.active[may_run[self.active]]
