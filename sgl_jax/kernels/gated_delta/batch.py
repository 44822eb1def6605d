"""The states that a step reads and writes, and the chunks of its prompts.

A layer with a recurrence keeps a state of fixed size for each sequence instead of KV. States are
stored in slots of one data-parallel rank. Slot 0 is the null slot: zeros, the state before the
first token; it is never written. A padding row has a slot of the null row, which is never read.

A state holds all tokens so far and cannot be truncated, so a step never overwrites the state it
started from: for each row it reads one slot and writes other slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.token_rows import TokenRows
from sgl_jax.kernels.tpu_chip import LANES

# Tokens of a chunk. The recurrence within a chunk is solved as matrix products.
CHUNK_TOKENS = 64
NO_SLOT = -1


def check_heads(value_heads: int, key_dim: int, value_dim: int) -> None:
    """Raise ValueError unless the Pallas kernels can compute a chip's heads; XLA can compute any.

    A head must have the 128 dimensions of a TPU's memory row. A chip has at most 128 value heads.
    """
    if (key_dim, value_dim) != (LANES, LANES) or value_heads > LANES:
        raise ValueError(
            f"the Pallas kernels of gated delta nets compute up to {LANES} value heads a chip, of "
            f"{LANES} key and {LANES} value dimensions; got {value_heads} of {key_dim} and "
            f"{value_dim}: --attention-backend xla takes any"
        )


class DeltaInputs(NamedTuple):
    """The inputs of the gated delta rule at T tokens.

    value_heads is a multiple of key_heads, and the value heads of one key head are adjacent.
    """

    q: jax.Array  # [T, key_heads, key_dim]
    k: jax.Array  # [T, key_heads, key_dim]
    v: jax.Array  # [T, value_heads, value_dim]
    # float32 [T, value_heads, key_dim], at most 0; or [..., 1], the same for a head's channels
    log_decay: jax.Array
    beta: jax.Array  # float32 [T, value_heads], in (0, 1)

    @property
    def group(self) -> int:
        """Return the number of value heads per key head."""
        return self.v.shape[-2] // self.k.shape[-2]

    @property
    def decays_by_channel(self) -> bool:
        return self.log_decay.shape[-1] > 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StateBatch(TokenRows):
    """The rows of a step with their slots and chunks; a pytree of arrays.

    A decode row with q tokens writes the states after each of them to the slots `slots_out[i] ..
    slots_out[i] + q - 1`: verification of the drafts selects one of them. A prefill row writes the
    state after its last token to `slots_out[i]`, and its snapshots to their slots.

    Tokens of prefill rows are cut into chunks of at most `CHUNK_TOKENS`, in the order of the
    tokens. Chunk c holds the tokens [chunk_starts[c], chunk_starts[c + 1]) of one row. It starts
    from the state in slot `chunk_sources[c]`, or, for NO_SLOT, from the state after the previous
    chunk. The state after the chunk is written to the slots `chunk_targets[c]` and
    `chunk_snapshots[c]`, except for NO_SLOT.
    """

    slots_in: jax.Array  # int32 [B] slot with the state that each row starts from
    slots_out: jax.Array  # int32 [B] first slot that each row writes
    chunk_starts: jax.Array  # int32 [N + 1]; from num_chunks on, the end of the last chunk
    chunk_rows: jax.Array  # int32 [N]
    chunk_sources: jax.Array  # int32 [N] slot or NO_SLOT
    chunk_targets: jax.Array  # int32 [N] slot or NO_SLOT
    chunk_snapshots: jax.Array  # int32 [N] slot or NO_SLOT
    num_chunks: jax.Array  # int32 []

    def slots_after(self) -> tuple[jax.Array, jax.Array]:
        """Return where to write the state after each token, or NO_SLOT: the slot of the token's
        row, and the slot of a snapshot, both int32 [T]."""
        number, row = jnp.arange(len(self.token_rows), dtype=jnp.int32), self.token_rows
        last = jnp.where(number + 1 == self.q_offsets[row + 1], self.slots_out[row], NO_SLOT)
        drafted = self.slots_out[row] + number - self.q_offsets[row]
        own = jnp.where(row < self.num_decode, drafted, last)
        ends = jnp.where(self.chunk_snapshots >= 0, self.chunk_starts[1:] - 1, len(number))
        nothing = jnp.full_like(number, NO_SLOT)
        kept = nothing.at[ends].set(self.chunk_snapshots, mode="drop")
        return jnp.where(self.valid, own, NO_SLOT), kept

    @classmethod
    def build(
        cls,
        slots_in: jax.Array,
        slots_out: jax.Array,
        snapshots: jax.Array,
        kv_starts: jax.Array,
        q_lens: jax.Array,
        num_decode: jax.Array,
        num_tokens: int,
        max_draft_tokens: int = 0,
    ) -> "StateBatch":
        """Derive the per-token indices and the chunks.

        Args:
            slots_in, slots_out: int32 [B], see the fields.
            snapshots: int32 [S, 3] states for prefill rows to keep: row, length in tokens, slot.
                Only lengths in (kv_start, kv_start + q_len] of the row matter; slot 0 for none.
                Entries of decode rows are ignored.
            kv_starts, q_lens, num_decode, num_tokens, max_draft_tokens: passed to `TokenRows.of`.
        """
        num_chunks_at_most = num_tokens // CHUNK_TOKENS + len(q_lens) + len(snapshots)
        rows = TokenRows.of(kv_starts, q_lens, num_decode, num_tokens, max_draft_tokens)
        q_offsets, token_rows, lengths = rows.q_offsets, rows.token_rows, rows.positions
        in_row = jnp.arange(num_tokens, dtype=jnp.int32) - q_offsets[token_rows]
        is_prefill = rows.valid & (token_rows >= num_decode)
        kept_rows, kept_lens, kept_slots = snapshots.T
        is_kept = (kept_slots > 0) & (kept_rows >= num_decode)
        # [T, S]: whether a state must be kept before the token.
        kept_before = is_kept & (kept_rows == token_rows[:, None]) & (kept_lens == lengths[:, None])
        is_start = is_prefill & ((in_row % CHUNK_TOKENS == 0) | kept_before.any(axis=1))
        num_chunks = jnp.sum(is_start, dtype=jnp.int32)
        (starts,) = jnp.nonzero(is_start, size=num_chunks_at_most + 1, fill_value=0)
        index = jnp.arange(num_chunks_at_most + 1, dtype=jnp.int32)
        chunk_starts = jnp.where(index < num_chunks, starts.astype(jnp.int32), q_offsets[-1])
        first, end = chunk_starts[:-1], chunk_starts[1:]
        chunk_rows = token_rows[jnp.minimum(first, num_tokens - 1)]
        is_chunk = index[:-1] < num_chunks
        begins = is_chunk & (first == q_offsets[chunk_rows])
        is_last = is_chunk & (end == q_offsets[chunk_rows + 1])
        end_lens = kv_starts[chunk_rows] + end - q_offsets[chunk_rows]
        kept_after = is_kept & (kept_rows == chunk_rows[:, None]) & (kept_lens == end_lens[:, None])
        snapshot = jnp.max(jnp.where(kept_after, kept_slots, NO_SLOT), axis=1, initial=NO_SLOT)
        return cls(
            slots_in=slots_in,
            slots_out=slots_out,
            chunk_starts=chunk_starts,
            chunk_rows=chunk_rows,
            chunk_sources=jnp.where(begins, slots_in[chunk_rows], NO_SLOT),
            chunk_targets=jnp.where(is_last, slots_out[chunk_rows], NO_SLOT),
            chunk_snapshots=jnp.where(is_chunk, snapshot, NO_SLOT),
            num_chunks=num_chunks,
            **vars(rows),
        )
