"""The place of each (rank, row) of a step in the arrays that go to the device and come back.

Arrays are laid out `[rank 0 | padding | rank 1 | padding ...]`, sharded over 'data', so that each
rank sees its own rows alone. Everything about a step's rows passes through here, both ways; only
this file writes and reads a rank's control words.

Never keeps an array: each step makes its uploads afresh, because on the CPU jax may read numpy
memory in place, and later.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.step_plan import NO_DRAFT, Int32Array, RankPlan

_Scalar = TypeVar("_Scalar", bound=np.generic)

_NUM_ROW_WORDS = 6  # row, kv_start, q_len, samples, relayed, num_scored
# Then a word for each draft that a row may have.
_NUM_STATE_WORDS = 2  # of a row in models with recurrent layers: source, half
_NUM_SNAPSHOT_WORDS = 3  # of each snapshot: row, length, slot
_NUM_RANK_WORDS = 3  # num_decode, returns_logprobs, any_scored


class StepInput(NamedTuple):
    """All that one step uploads."""

    controls: Int32Array  # [dp, control_words]
    page_tables: Int32Array  # [dp * B, groups * pages], of one group after another


class RankControls(NamedTuple):
    """One rank's control words, as the step sees them on the device."""

    rows: jax.Array  # int32[B], 0 for padding
    kv_starts: jax.Array  # int32[B]
    q_lens: jax.Array  # int32[B], 0 for padding
    samples: jax.Array  # bool[B]
    relayed: jax.Array  # bool[B]
    num_scored: jax.Array  # int32[B]
    num_decode: jax.Array  # int32[]
    returns_logprobs: jax.Array  # bool[]
    any_scored: jax.Array  # bool[] whether any row of any rank is scored
    states: "StateControls | None"  # of models with recurrent layers
    drafts: jax.Array  # int32[B, max_drafts], NO_DRAFT where the step guesses


class StateControls(NamedTuple):
    """A `StatePlan` on the device."""

    sources: jax.Array  # int32[B]
    halves: jax.Array  # int32[B]
    snapshots: jax.Array  # int32[S, 3], slot 0 for none


class DPLayout(NamedTuple):
    """The arrays of a step with `rows_per_rank` rows (padding included) on each of `dp_size`."""

    dp_size: int
    rows_per_rank: int
    pages_per_row: int
    num_groups: int  # of layers, each with a page table
    max_snapshots: int | None = None  # of a rank in a step; None: the model has no states
    max_drafts: int = 0  # of a row

    @property
    def _row_words(self) -> int:
        state_words = 0 if self.max_snapshots is None else _NUM_STATE_WORDS
        return _NUM_ROW_WORDS + self.max_drafts + state_words

    @property
    def control_words(self) -> int:
        """Control words of one rank."""
        snapshot_words = _NUM_SNAPSHOT_WORDS * (self.max_snapshots or 0)
        return self._row_words * self.rows_per_rank + snapshot_words + _NUM_RANK_WORDS

    @property
    def page_tables_shape(self) -> tuple[int, int]:
        """The shape of all ranks' page tables together."""
        return self.dp_size * self.rows_per_rank, self.num_groups * self.pages_per_row

    def pack(self, ranks: Sequence[RankPlan], tables: PageTables) -> StepInput:
        """Fresh arrays with every rank's rows in place; padding rows are row 0 with no tokens.

        `tables` must include the plan's page changes.
        """
        controls = np.zeros((self.dp_size, self.control_words), np.int32)
        end_of_rows = self._row_words * self.rows_per_rank
        by_row = controls[:, :end_of_rows].reshape(self.dp_size, self._row_words, -1)
        of_snapshots = controls[:, end_of_rows:-_NUM_RANK_WORDS]
        # Zeroed by the operating system as pages are touched: the unused width costs nothing.
        page_tables = np.zeros(self.page_tables_shape, np.int32)
        by_group = page_tables.reshape(-1, self.num_groups, self.pages_per_row)
        controls[:, -1] = any(plan.num_scored is not None for plan in ranks)
        for rank, plan in enumerate(ranks):
            n = len(plan.rows)
            by_row[rank, 0, :n] = plan.rows
            by_row[rank, 1, :n] = plan.kv_starts
            by_row[rank, 2, :n] = plan.q_lens
            by_row[rank, 3, :n] = plan.samples
            by_row[rank, 4, :n] = plan.relayed
            by_row[rank, 5, :n] = 0 if plan.num_scored is None else plan.num_scored
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
            controls[rank, -3] = plan.num_decode
            controls[rank, -2] = plan.return_logprob or plan.top_logprobs_num > 0
            first = rank * self.rows_per_rank
            by_group[first : first + n, :, : plan.num_pages] = tables.of(
                rank, plan.rows, plan.num_pages
            )
        return StepInput(controls, page_tables)

    def pack_masks(self, masks: Sequence[Int32Array]) -> Int32Array:
        """Each rank's masks int32[n, 1 + max_drafts, words] in place: [dp * B, ...]."""
        shape = masks[0].shape[1:]
        packed = np.zeros((self.dp_size, self.rows_per_rank, *shape), np.int32)
        for rank, own in enumerate(masks):
            packed[rank, : len(own)] = own
        return packed.reshape(-1, *shape)

    def unpack_controls(self, words: jax.Array) -> RankControls:
        """One rank's words int32[control_words], by name; traced inside the step."""
        end_of_rows = self._row_words * self.rows_per_rank
        by_row = words[:end_of_rows].reshape(self._row_words, self.rows_per_rank)
        states = None
        if self.max_snapshots is not None:
            snapshots = words[end_of_rows:-_NUM_RANK_WORDS].reshape(-1, _NUM_SNAPSHOT_WORDS)
            states = StateControls(by_row[-2], by_row[-1], snapshots)
        return RankControls(
            rows=by_row[0],
            kv_starts=by_row[1],
            q_lens=by_row[2],
            samples=by_row[3] != 0,
            relayed=by_row[4] != 0,
            num_scored=by_row[5],
            num_decode=words[-3],
            returns_logprobs=words[-2] != 0,
            any_scored=words[-1] != 0,
            states=states,
            drafts=by_row[_NUM_ROW_WORDS : _NUM_ROW_WORDS + self.max_drafts].T,
        )

    def split_groups(self, page_tables: jax.Array) -> tuple[jax.Array, ...]:
        """One rank's page tables int32[B, groups * pages], a table [B, pages] for each group."""
        return tuple(jnp.split(page_tables, self.num_groups, axis=1))

    def split(self, values: NDArray[_Scalar], num_rows: Sequence[int]) -> list[NDArray[_Scalar]]:
        """Each rank's first `num_rows[rank]` entries of values [dp * n, ...], padding left out."""
        per_rank = values.reshape(self.dp_size, -1, *values.shape[1:])
        return [per_rank[rank, :n] for rank, n in enumerate(num_rows)]
