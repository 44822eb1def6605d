"""The running requests as columns of arrays, indexed by row.

A decode step uses only these arrays, so its host time hardly depends on the number of running
requests. The columns cover the rows of all ranks. Each rank has views of its part, indexed by its
`ReqToTokenPool` rows. A step plan gets copies, never these arrays.

    0         prompt_len        known_len        planned_len         + unread_drafts     max_len
    |  prompt  |  output, read   |  sampled by launched steps, not read yet  |  perhaps  |

A launch adds one token for certain, and one for each accepted draft or further step. Until its
result is read, the row's length is between `planned_len` and `planned_len` + `unread_drafts`, which
also counts further steps.
"""

import mmap
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Float32Array, Int32Array, RowIndex
from sgl_jax.scheduler.in_flight_rows import NOT_SCORED, ROW, TOKEN_BLOCK, Records
from sgl_jax.scheduler.request import Request

NO_TOKEN = -1


@dataclass(eq=False)
class RowColumns:
    """The scheduler's records of n rows; a rank's columns are views of all ranks' columns."""

    records: Records  # ROW[n]; each field is also an attribute
    tokens: Int32Array  # [n, max_context_len, in whole blocks]; the last block may lack the latest
    # The last tokens; position p is at p % TOKEN_BLOCK. The tokens that a step writes are close
    # together here, and far apart in `tokens`.
    latest: Int32Array  # [n, TOKEN_BLOCK]
    prompt_len: Int32Array  # [n], like all following columns without a shape
    regained_len: Int32Array  # length at which new tokens make up for tokens lost by retracts
    length_class: Int32Array  # class of the output length: see `forecast/output_lengths.py`
    priority: NDArray[np.int64]
    tenant: Int32Array  # number of the request's tenant
    stop_ids: Int32Array  # [n, max_stop_ids], padded with NO_TOKEN
    num_logprob_ids: Int32Array
    # The success of drafts: see `draft_policy.py`.
    draft_gain: Float32Array  # accepted tokens per step, a moving average
    draft_from_len: Int32Array  # no drafts before the known length reaches this
    draft_pause: Int32Array  # length of the next pause in drafting, in tokens
    rids: np.ndarray  # object[n] of str

    def __post_init__(self) -> None:
        self.known_len: Int32Array = self.records["known_len"]
        self.planned_len: Int32Array = self.records["planned_len"]
        self.unread_drafts: Int32Array = self.records["unread_drafts"]
        self.min_len: Int32Array = self.records["min_len"]
        self.max_len: Int32Array = self.records["max_len"]
        self.score_start: Int32Array = self.records["score_start"]
        self.top_logprobs_num: NDArray[np.int16] = self.records["top_logprobs_num"]
        self.return_logprob: BoolArray = self.records["return_logprob"]
        self.has_grammar: BoolArray = self.records["has_grammar"]
        self.returns_hidden: BoolArray = self.records["returns_hidden"]
        self.token_values: NDArray[np.uint8] = self.records["token_values"]
        self.is_unsent: BoolArray = self.records["is_unsent"]

    @classmethod
    def empty(cls, num_rows: int, max_context_len: int, max_stop_ids: int) -> "RowColumns":
        """Return columns of `num_rows` free rows, with up to `max_stop_ids` stop token ids each."""
        lens = np.zeros((7, num_rows), np.int32)
        columns = cls(
            records=np.zeros(num_rows, ROW),
            tokens=_zeros(num_rows, -(-max_context_len // TOKEN_BLOCK) * TOKEN_BLOCK),
            latest=np.zeros((num_rows, TOKEN_BLOCK), np.int32),
            prompt_len=lens[0],
            regained_len=lens[1],
            length_class=lens[2],
            priority=np.zeros(num_rows, np.int64),
            tenant=lens[3],
            stop_ids=np.full((num_rows, max_stop_ids), NO_TOKEN, np.int32),
            num_logprob_ids=lens[4],
            draft_gain=np.zeros(num_rows, np.float32),
            draft_from_len=lens[5],
            draft_pause=lens[6],
            rids=np.full(num_rows, "", dtype=object),
        )
        columns.score_start[:] = NOT_SCORED
        return columns

    def part(self, rows: slice) -> "RowColumns":
        return RowColumns(*(getattr(self, field.name)[rows] for field in fields(self)))

    def may_run(self, rows: RowIndex) -> BoolArray:
        """Select the `rows` that still need a step. A row only waits for its result if its last
        permitted token was sampled, or may have been."""
        most = self.planned_len[rows] + self.unread_drafts[rows]
        is_open: BoolArray = most < self.max_len[rows]
        return is_open

    def expected_steps_to_ends(self, rows: RowIndex) -> Int32Array:
        """Return int32[n], the expected steps to the ends of `rows`: half of their remaining
        tokens."""
        steps: Int32Array = (self.max_len[rows] - self.planned_len[rows]) // 2
        return steps


def _zeros(num_rows: int, num_columns: int) -> Int32Array:
    """Return int32[num_rows, num_columns] of zeros, which take memory only for written pages. The
    operating system zeroes it in small pages. It would zero a numpy array by 2 MiB, and delay the
    first step that writes there by milliseconds."""
    memory = mmap.mmap(-1, num_rows * num_columns * np.dtype(np.int32).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(num_rows, num_columns)


class RunningRows:
    """A rank's rows with their `columns`; `active` lists the rows in use, oldest first."""

    def __init__(self, columns: RowColumns) -> None:
        self.columns = columns
        self.active: RowIndex = np.zeros(0, np.intp)
        self.priorities = PriorityCounts()
        self.num_stop_ids = 0  # columns of `stop_ids` that were ever used
        self.requests: list[Request | None] = [None] * len(columns.known_len)

    def __len__(self) -> int:
        return len(self.active)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is not running"
        return request

    def add(self, row: int, request: Request, stop_ids: tuple[int, ...]) -> None:
        """Run `request`, with all its known tokens, in `row`."""
        columns, message, prompt_len = self.columns, request.message, request.prompt_len
        tokens, sampling = request.tokens, message.sampling
        count = len(tokens)
        columns.tokens[row, :count] = tokens
        last_block = count // TOKEN_BLOCK * TOKEN_BLOCK
        columns.latest[row, : count - last_block] = tokens[last_block:]
        is_scored = request.logprob_next < prompt_len
        score_start = max(request.logprob_next - 1, 0) if is_scored else NOT_SCORED
        columns.records[row] = (
            count,  # known
            count,  # planned
            0,  # unread drafts
            prompt_len + sampling.min_new_tokens,
            request.max_len,
            score_start,
            message.top_logprobs_num,
            message.return_logprob,
            sampling.grammar is not None,
            message.return_hidden,
            message.token_values,
            count == prompt_len,
        )
        columns.prompt_len[row] = prompt_len
        columns.regained_len[row] = count + request.num_lost
        columns.priority[row] = request.priority
        self.priorities.add(request.priority)
        columns.tenant[row] = request.tenant
        columns.stop_ids[row] = NO_TOKEN
        columns.stop_ids[row, : len(stop_ids)] = stop_ids
        self.num_stop_ids = max(self.num_stop_ids, len(stop_ids))
        columns.num_logprob_ids[row] = len(message.token_ids_logprob)
        self.requests[row] = request
        columns.rids[row] = request.rid
        active = np.empty(len(self.active) + 1, np.intp)
        active[:-1], active[-1] = self.active, row
        self.active = active

    def remove(self, row: int) -> Int32Array:
        """Take a request out of its row; return a copy of its known tokens."""
        tokens = self.known_tokens(row).copy()
        self.priorities.remove(int(self.columns.priority[row]))
        self.requests[row] = None
        self.columns.rids[row] = ""
        self.active = self.active[self.active != row]
        return tokens

    def known_tokens(self, row: int) -> Int32Array:
        """Return the known tokens of `row`, int32[known_len], as a view."""
        columns, count = self.columns, int(self.columns.known_len[row])
        last_block = count // TOKEN_BLOCK * TOKEN_BLOCK
        columns.tokens[row, last_block:count] = columns.latest[row, : count - last_block]
        return columns.tokens[row, :count]

    def runnable(self) -> RowIndex:
        """Return the active rows that still need a step, oldest first."""
        return self.active[self.columns.may_run(self.active)]


class PriorityCounts:
    """The number of requests of each priority. The priorities are scanned only when one appears or
    disappears. `lowest` and `highest` are None without requests."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.lowest: int | None = None
        self.highest: int | None = None

    def add(self, priority: int) -> None:
        count = self._counts.get(priority, 0)
        self._counts[priority] = count + 1
        if not count:
            self._find_extremes()

    def remove(self, priority: int) -> None:
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]
            self._find_extremes()

    def _find_extremes(self) -> None:
        self.lowest = min(self._counts, default=None)
        self.highest = max(self._counts, default=None)

    @property
    def differ(self) -> bool:
        return len(self._counts) > 1
