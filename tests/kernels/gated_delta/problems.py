"""Ragged steps for gated delta nets: drawn, built, and judged by float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from sgl_jax.core.layer_configs import conv_state_shape
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from tests.kernels.gated_delta import reference
from tests.kernels.gated_delta.reference import Step

LAYERS, LAYER = 2, 1


class Program(NamedTuple):
    """What a compiled program depends on."""

    key_heads: int = 2
    group: int = 2  # value heads of a key head
    key_dim: int = 16
    value_dim: int = 8
    width: int = 4  # tokens that a convolution sees
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    max_drafts: int = 0
    rows: int = 6
    tokens: int = 256
    max_snapshots: int = 4
    by_channel: bool = False  # each channel of a key decays by a factor of its own

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.group

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_slots(self) -> int:
        """The null slot, those that rows read, those that they write, and snapshots."""
        return 1 + self.rows + self.rows * (1 + self.max_drafts) + self.max_snapshots + 1


class Case(NamedTuple):
    program: Program
    decodes: list[tuple[int, int]]  # kv_start, tokens: one, and the drafts after it
    prefills: list[tuple[int, int]]  # kv_start, q_len; empty rows among them
    snapshots: list[tuple[int, float]]  # of a row of all, after a part of its tokens
    seed: int
    same_keys: bool = False  # which makes the equations of a chunk as bad as they can be


@st.composite
def cases(draw, programs, max_decodes: int = 4, max_prefills: int = 2):
    """Ragged steps: any lengths, ends of chunks often, empty rows, snapshots anywhere."""
    program = draw(st.sampled_from(programs))
    starts = st.one_of(st.just(0), st.integers(0, 300))
    decode = st.tuples(starts, st.integers(1, 1 + program.max_drafts))
    decodes = draw(st.lists(decode, max_size=min(max_decodes, program.rows - max_prefills)))
    left = program.tokens - sum(n for _, n in decodes)
    prefills = []
    for _ in range(draw(st.integers(0, max_prefills))):
        near = [n for n in (0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1) if n <= left]
        length = draw(st.one_of(st.integers(0, left), st.sampled_from(near)))
        prefills.append((draw(starts), length))
        left -= length
    snapshot = st.tuples(st.integers(0, program.rows - 1), st.floats(0, 1))
    snapshots = draw(st.lists(snapshot, max_size=program.max_snapshots))
    seed, same_keys = draw(st.integers(0, 2**32 - 1)), draw(st.booleans())
    return Case(program, decodes, prefills, snapshots, seed, same_keys)


class Problem(NamedTuple):
    """The arrays of a case."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    states: np.ndarray  # NaN in slots that no row reads
    u: np.ndarray
    weight: np.ndarray
    conv_states: np.ndarray  # likewise; [layers, slots, width - 1, channels]
    step: Step

    @property
    def tokens(self) -> DeltaInputs:
        return DeltaInputs(*self[:5])

    @property
    def conv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The convolution's arguments, with states as they are kept."""
        shape = conv_state_shape(*self.weight.shape)
        return self.u, self.weight, self.conv_states.reshape(*self.conv_states.shape[:2], *shape)

    def make_batch(self, program: Program) -> StateBatch:
        """Traceable."""
        return StateBatch.build(*self.step, program.tokens, program.max_drafts)


def make_step(case: Case) -> Step:
    """A step whose slots are any, in any order; those of drafts follow each other."""
    program, rng = case.program, np.random.default_rng(case.seed)
    rows = case.decodes + case.prefills
    kv_starts, q_lens = np.zeros((2, program.rows), np.int32)
    for i, (start, length) in enumerate(rows):
        kv_starts[i], q_lens[i] = start, length
    own = 1 + program.max_drafts
    reads = 1 + rng.permutation(program.rows).astype(np.int32)
    slots_in = np.where(kv_starts > 0, reads, 0).astype(np.int32)
    slots_out = (1 + program.rows + rng.permutation(program.rows) * own).astype(np.int32)
    snapshots = np.zeros((program.max_snapshots, 3), np.int32)
    first, seen = 1 + program.rows * (1 + own), set()
    for i, (row, part) in enumerate(case.snapshots):
        length = int(kv_starts[row] + round(part * q_lens[row]))
        if (row, length) not in seen:
            seen.add((row, length))
            snapshots[i] = row, length, first + i
    return Step(slots_in, slots_out, snapshots, kv_starts, q_lens, np.int32(len(case.decodes)))


def build(case: Case) -> Problem:
    """Draw the arrays of a case from its seed."""
    program, rng, step = case.program, np.random.default_rng(case.seed), make_step(case)
    keys = (program.tokens, program.key_heads, program.key_dim)
    values = (program.tokens, program.value_heads, program.value_dim)
    q, k = rng.normal(size=(2, *keys))
    if case.same_keys:
        k[:] = k[:1] * np.sign(rng.normal(size=(program.tokens, 1, 1)))
    # Some heads, or channels, forget all at once, some nothing.
    forgetting = values[1], program.key_dim if program.by_channel else 1
    rates = rng.choice([0, 0.01, 1, 100], size=forgetting)
    decay = -rng.exponential(size=(program.tokens, *forgetting)) * rates
    beta = rng.uniform(0.9 if case.same_keys else 0.01, 0.999, size=values[:2])
    shape = (LAYERS, program.num_slots, program.value_heads, program.key_dim, program.value_dim)
    conv_shape = (*shape[:2], program.width - 1, program.channels)
    states, conv_states = np.full(shape, np.nan), np.full(conv_shape, np.nan)
    for slot in {0, *step.slots_in}:
        for array in (states, conv_states):
            array[LAYER, slot] = rng.uniform(-1, 1, size=array.shape[2:]) if slot else 0
    return Problem(
        np.asarray(q, program.dtype),
        np.asarray(k, program.dtype),
        np.asarray(rng.uniform(-1, 1, size=values), program.dtype),
        decay.astype(np.float32),
        beta.astype(np.float32),
        np.asarray(states, program.state_dtype),
        np.asarray(rng.uniform(-1, 1, size=(program.tokens, program.channels)), program.dtype),
        np.asarray(rng.uniform(-1, 1, size=(program.width, program.channels)), program.dtype),
        np.asarray(conv_states, program.dtype),
        step,
    )


def expected_delta(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(out, states) of the gated delta rule by the reference."""
    return reference.gated_delta(*problem[:6], LAYER, problem.step)


def expected_conv(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(out, states as they are kept) of the convolution by the reference."""
    out, states = reference.causal_conv(*problem[6:9], LAYER, problem.step)
    return out, states.reshape(problem.conv[2].shape)


def num_tokens(problem: Problem) -> int:
    """Of all rows, without padding."""
    return int(problem.step.q_lens.sum())
