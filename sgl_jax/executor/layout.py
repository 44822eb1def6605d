"""The place of each (rank, row) of a step in the arrays to and from the device.

Arrays are laid out `[rank 0 | padding | rank 1 | padding ...]` and sharded over 'data', so that
each rank sees only its rows. Everything about a step's rows passes through this file in both
directions, and only this file writes and reads a rank's control words.

Never reuses an array: each step allocates its uploads, because on a CPU jax may read numpy memory
in place, and later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from sgl_jax.core.step_plan import (
    NO_DRAFT,
    BoolArray,
    Float32Array,
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    StepPlan,
)
from sgl_jax.core.token_values import named_values
from sgl_jax.executor.buckets import Bucket
from sgl_jax.layers.sampling.logprobs import LogprobArrays

_Scalar = TypeVar("_Scalar", bound=np.generic)

# Words of a row: rows, kv_starts, q_lens, samples, relayed, num_scored and num_steps of `RankPlan`,
# and one word per possible draft.
_NUM_ROW_WORDS = 7
_SCORED_WORD, _STEPS_WORD = 5, 6
_NUM_STATE_WORDS = 2  # per row with recurrent layers: source, half
_NUM_SNAPSHOT_WORDS = 3  # per snapshot: row, length, slot
_NUM_RANK_WORDS = 3  # num_decode, returns_logprobs, any_scored


class StepInput(NamedTuple):
    """All uploads of one step."""

    controls: Int32Array  # [dp, control_words]
    page_tables: Int32Array  # [dp * B, groups * pages], group by group


class RankControls(NamedTuple):
    """One rank's control words on the device."""

    rows: jax.Array  # int32[B], 0 for padding
    kv_starts: jax.Array  # int32[B]
    q_lens: jax.Array  # int32[B], 0 for padding
    samples: jax.Array  # bool[B]
    relayed: jax.Array  # bool[B]
    num_scored: jax.Array  # int32[B]
    num_steps: jax.Array  # int32[B] in a plan of several steps, else 0
    num_decode: jax.Array  # int32[]
    returns_logprobs: jax.Array  # bool[]
    any_scored: jax.Array  # bool[] True if any row of any rank is scored
    states: "StateControls | None"  # None without recurrent layers
    drafts: jax.Array  # int32[B, max_drafts], NO_DRAFT where the step computes it


class StateControls(NamedTuple):
    """A `StatePlan` on the device."""

    sources: jax.Array  # int32[B]
    halves: jax.Array  # int32[B]
    snapshots: jax.Array  # int32[S, 3] row, length, slot; slot 0: none


class StepOutput(NamedTuple):
    """A step's results for B rows; log-probabilities are zeros if not requested.

    There are few arrays, since the host creates and frees an object for each in every step.
    """

    tokens: jax.Array  # int32[B, w], as `RankResult.tokens`
    logprobs: jax.Array  # int32[B, w, n], see `pack_logprobs`
    # int32[S, n] for the successors of the scored queries, row by row: S is the minimum of
    # max_prompt_logprob_tokens and the step's queries.
    prompt_logprobs: jax.Array
    hidden: jax.Array | None = None  # float32[B, hidden_size], only of masked steps
    # By name [T, ...] of the query tokens, row after row; with several steps [B, steps, ...]. Those
    # that the model reports: `CausalLM.token_values`.
    token_values: Mapping[str, jax.Array] = {}


def pack_logprobs(values: LogprobArrays) -> jax.Array:
    """Concatenate the values at each position as words int32[..., n]; traced inside the step."""
    floats = values.logprobs[..., None], values.top_logprobs, values.id_logprobs
    words = [lax.bitcast_convert_type(each, jnp.int32) for each in floats]
    return jnp.concatenate([*words, values.top_ids], axis=-1)


@dataclass(frozen=True)
class DPLayout:
    """The arrays of a step with `rows_per_rank` rows, including padding, on each rank."""

    dp_size: int
    rows_per_rank: int
    pages_per_row: int
    num_groups: int  # cache groups, with one page table each
    max_snapshots: int | None = None  # per rank and step; None: the model has no states
    max_drafts: int = 0  # per row

    @cached_property
    def _row_words(self) -> int:
        state_words = 0 if self.max_snapshots is None else _NUM_STATE_WORDS
        return _NUM_ROW_WORDS + self.max_drafts + state_words

    @cached_property
    def control_words(self) -> int:
        snapshot_words = _NUM_SNAPSHOT_WORDS * (self.max_snapshots or 0)
        return self._row_words * self.rows_per_rank + snapshot_words + _NUM_RANK_WORDS

    @cached_property
    def page_tables_shape(self) -> tuple[int, int]:
        return self.dp_size * self.rows_per_rank, self.num_groups * self.pages_per_row

    def pack(self, ranks: Sequence[RankPlan], tables: PageTables) -> StepInput:
        """Return new arrays with every rank's rows; padding rows are row 0 with no tokens. `tables`
        must include the plan's page changes."""
        controls = np.zeros((self.dp_size, self.control_words), np.int32)
        end_of_rows = self._row_words * self.rows_per_rank
        by_row = controls[:, :end_of_rows].reshape(self.dp_size, self._row_words, -1)
        of_snapshots = controls[:, end_of_rows:-_NUM_RANK_WORDS]
        # The operating system zeroes memory at its first use: unused columns cost nothing.
        page_tables = np.zeros(self.page_tables_shape, np.int32)
        by_group = page_tables.reshape(
            self.dp_size, self.rows_per_rank, self.num_groups, self.pages_per_row
        )
        any_scored = any(plan.num_scored is not None for plan in ranks)
        for rank, plan in enumerate(ranks):
            n = len(plan.rows)
            _write_rows(
                by_row[rank],
                by_group[rank],
                plan.rows,
                plan.kv_starts,
                plan.q_lens,
                plan.samples,
                plan.relayed,
                tables.pages[rank],
                plan.num_pages,
            )
            if plan.num_scored is not None:
                by_row[rank, _SCORED_WORD, :n] = plan.num_scored
            if plan.num_steps is not None:
                by_row[rank, _STEPS_WORD, :n] = plan.num_steps
            if self.max_drafts:
                drafts = by_row[rank, _NUM_ROW_WORDS : _NUM_ROW_WORDS + self.max_drafts]
                if plan.drafts is None:
                    drafts[:] = NO_DRAFT
                else:
                    drafts[:, : plan.num_decode] = plan.drafts.T
            if plan.states is not None:
                by_row[rank, -2, :n] = plan.states.sources
                by_row[rank, -1, :n] = plan.states.halves
                kept = plan.states.snapshots.reshape(-1)
                of_snapshots[rank, : len(kept)] = kept
            controls[rank, -3:] = plan.num_decode, plan.return_logprob, any_scored
        return StepInput(controls, page_tables)

    def pack_masks(self, masks: Sequence[Int32Array]) -> Int32Array:
        """Return the masks of all ranks, each int32[n, 1 + max_drafts, words], as [dp * B, ...]."""
        shape = masks[0].shape[1:]
        packed = np.zeros((self.dp_size, self.rows_per_rank, *shape), np.int32)
        for rank, own in enumerate(masks):
            packed[rank, : len(own)] = own
        return packed.reshape(-1, *shape)

    def unpack_controls(self, words: jax.Array) -> RankControls:
        """Unpack one rank's words int32[control_words]; traced inside the step."""
        end_of_rows = self._row_words * self.rows_per_rank
        by_row = words[:end_of_rows].reshape(self._row_words, self.rows_per_rank)
        states = None
        if self.max_snapshots is not None:
            snapshots = words[end_of_rows:-_NUM_RANK_WORDS].reshape(-1, _NUM_SNAPSHOT_WORDS)
            states = StateControls(by_row[-2], by_row[-1], snapshots)
        rows, kv_starts, q_lens, samples, relayed, num_scored, num_steps = by_row[:_NUM_ROW_WORDS]
        return RankControls(
            rows=rows,
            kv_starts=kv_starts,
            q_lens=q_lens,
            samples=samples != 0,
            relayed=relayed != 0,
            num_scored=num_scored,
            num_steps=num_steps,
            num_decode=words[-3],
            returns_logprobs=words[-2] != 0,
            any_scored=words[-1] != 0,
            states=states,
            drafts=by_row[_NUM_ROW_WORDS : _NUM_ROW_WORDS + self.max_drafts].T,
        )

    def split_groups(self, page_tables: jax.Array) -> tuple[jax.Array, ...]:
        """Split a rank's page tables int32[B, groups * pages] into one [B, pages] per group."""
        return tuple(jnp.split(page_tables, self.num_groups, axis=1))

    def unpack_output(
        self, ranks: Sequence[RankPlan], output: StepOutput
    ) -> tuple[RankResult, ...]:
        """Return each rank's samples in plan order. Waits for the step to finish, and fetches only
        the results that the plan requests."""
        num_rows = [len(plan.rows) for plan in ranks]
        tokens = np.asarray(output.tokens).reshape(self.dp_size, self.rows_per_rank, -1)
        results = [RankResult(own[:n]) for own, n in zip(tokens, num_rows, strict=True)]
        if any(plan.return_logprob for plan in ranks):
            for i, values in enumerate(self._fetch(ranks, output.logprobs, num_rows)):
                if ranks[i].return_logprob:
                    results[i] = results[i]._replace(**values._asdict())
        if any(plan.num_scored is not None for plan in ranks):
            num_scored = [plan.num_scored for plan in ranks]
            counts = [0 if scored is None else int(scored.sum()) for scored in num_scored]
            fetched = self._fetch(ranks, output.prompt_logprobs, counts)
            for i, (scored, values) in enumerate(zip(num_scored, fetched, strict=True)):
                if scored is not None:
                    results[i] = results[i]._replace(prompt_logprobs=_by_row(scored, values))
        if any(plan.returns_hidden for plan in ranks):
            for i, own in enumerate(self.split(np.asarray(output.hidden), num_rows)):
                if ranks[i].returns_hidden:
                    results[i] = results[i]._replace(hidden=own)
        if wanted := reduce(or_, (plan.token_values for plan in ranks)):
            counts = [
                n if plan.num_steps is not None else plan.num_tokens
                for n, plan in zip(num_rows, ranks, strict=True)
            ]
            by_rank = {
                name: self.split(np.asarray(output.token_values[name]), counts)
                for name in named_values(wanted)
            }
            for i, plan in enumerate(ranks):
                reported = {name: by_rank[name][i] for name in named_values(plan.token_values)}
                results[i] = results[i]._replace(token_values=reported)
        return tuple(results)

    def _fetch(
        self, ranks: Sequence[RankPlan], words: jax.Array, counts: Sequence[int]
    ) -> list[PromptLogprobs]:
        names_tokens = any(plan.num_logprob_ids for plan in ranks)
        return [_unpack(own, names_tokens) for own in self.split(np.asarray(words), counts)]

    def split(self, values: NDArray[_Scalar], num_rows: Sequence[int]) -> list[NDArray[_Scalar]]:
        """Return each rank's first `num_rows[rank]` entries of values [dp * n, ...]."""
        per_rank = values.reshape(self.dp_size, -1, *values.shape[1:])
        return [per_rank[rank, :n] for rank, n in enumerate(num_rows)]


@compiled(
    "(int32[:, ::1], int32[:, :, ::1], int32[:], int32[:], int32[:], boolean[:], boolean[:], "
    "int32[:, :, ::1], int64)"
)
def _write_rows(
    by_row: Int32Array,
    page_tables: Int32Array,
    rows: Int32Array,
    kv_starts: Int32Array,
    q_lens: Int32Array,
    samples: BoolArray,
    relayed: BoolArray,
    pages: Int32Array,
    num_pages: int,
) -> None:
    """Write a rank's rows to their words, [words, B], and page tables, [B, groups, pages].

    `pages` is the rank's int32[num_rows, groups, pages_per_row] in `PageTables`. The first
    `num_pages` of each group are written.
    """
    assert len(rows) <= by_row.shape[1] == len(page_tables)
    assert len(rows) == len(kv_starts) == len(q_lens) == len(samples) == len(relayed)
    assert page_tables.shape[1:] == pages.shape[1:]
    assert num_pages <= pages.shape[2]
    for i in range(len(rows)):
        by_row[0, i] = rows[i]
        by_row[1, i] = kv_starts[i]
        by_row[2, i] = q_lens[i]
        by_row[3, i] = samples[i]
        by_row[4, i] = relayed[i]
        assert 0 <= rows[i] < len(pages)
        for group in range(pages.shape[1]):
            for page in range(num_pages):
                page_tables[i, group, page] = pages[rows[i], group, page]


def _unpack(words: Int32Array, names_tokens: bool) -> PromptLogprobs:
    """Undo `pack_logprobs` on the host; values of named tokens are omitted unless requested."""
    floats: Float32Array = words.view(np.float32)
    own, top, named = floats[..., 0], floats[..., 1 : 1 + MAX_TOP_LOGPROBS], None
    if names_tokens:
        named = floats[..., 1 + MAX_TOP_LOGPROBS : 1 + MAX_TOP_LOGPROBS + MAX_LOGPROB_IDS]
    return PromptLogprobs(own, words[..., -MAX_TOP_LOGPROBS:], top, named)


def _by_row(num_scored: Int32Array, values: PromptLogprobs) -> dict[int, PromptLogprobs]:
    """Split one rank's values by scored row, keyed by plan index."""
    ends = np.cumsum(num_scored)
    rows = {}
    for i in np.flatnonzero(num_scored).tolist():
        tokens = slice(ends[i] - num_scored[i], ends[i])
        rows[i] = jax.tree.map(itemgetter(tokens), values)
    return rows


@dataclass
class LaunchedStep:
    """A step in flight: its plan and the layout of its output.

    Attributes:
        output: None until `draw` of a masked step.
        undrawn: until then, the arguments of its second half between the tables and the masks.
    """

    plan: StepPlan
    bucket: Bucket
    layout: DPLayout
    output: StepOutput | None
    undrawn: tuple[Any, ...] | None = None

    @property
    def has_ended(self) -> bool:
        """Return True once the result can be read without waiting."""
        tokens: Any = None if self.output is None else self.output.tokens
        return tokens is not None and bool(tokens.is_ready())
