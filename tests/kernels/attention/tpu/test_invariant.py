"""Attention for TPU whose bits do not depend on the batch, simulated on the CPU: the same tokens
alone, in a batch, at other places, with other chunks and drafts, and in steps of another shape."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.attention.tpu import ragged_paged_attention
from sgl_jax.kernels.attention.tpu.tuned import INVARIANT_QUERIES
from tests.kernels.attention.problems import LAYER, LAYERS, Program
from tests.kernels.attention.reference import ragged_paged_attention as reference
from tests.kernels.simulation import EAGER, LAZY, assert_close, product_rows, simulate
from tests.support.long import long

ROWS, LENGTH = 9, 600  # of a request: several blocks of keys
# Lengths of the other requests before this step, and their new tokens.
OTHERS = ((0, 3), (511, 1), (530, 17), (17, 1), (256, 30), (599, 1), (255, 2), (64, 9))


class Place(NamedTuple):
    """Which of a request's tokens are in a step, and where."""

    start: int
    count: int
    row: int = 0
    others: int = 0  # other requests in the step
    decodes: int = 0  # rows that are decode rows
    tokens: int = 128  # of the step's shape


FIRST, LAST = 540, 580
PLACES = (
    Place(FIRST, LAST - FIRST, decodes=0),
    Place(FIRST, LAST - FIRST, row=4, others=8),
    Place(FIRST, LAST - FIRST, row=8, others=8, decodes=3, tokens=256),
    Place(FIRST - 5, 30, row=1, others=3),
    Place(FIRST + 7, 4, row=0, others=8, decodes=1),
    Place(FIRST + 20, 1, decodes=1),
    Place(FIRST + 20, 1, row=5, others=8, decodes=6, tokens=256),
    Place(FIRST + 33, 7, row=2, others=2, decodes=3),
)
PROGRAMS = {
    "plain": Program(max_drafts=6, max_len=LENGTH, rows=ROWS),
    "bfloat16, window": Program(
        *(64, 4, 1, 128, jnp.bfloat16), sliding_window=300, max_drafts=6, max_len=LENGTH, rows=ROWS
    ),
    "sinks, soft cap": Program(
        sinks=True, soft_cap=3.0, sliding_window=40, max_drafts=6, max_len=LENGTH, rows=ROWS
    ),
    "8 bits": Program(
        *(32, 1, 7, 128, jnp.bfloat16, jnp.int8), max_drafts=6, max_len=LENGTH, rows=ROWS
    ),
}


class Requests(NamedTuple):
    """Queries, keys and values of each request's tokens: [requests, LENGTH, heads, head_dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None

    @classmethod
    def drawn(cls, program: Program) -> "Requests":
        rng = np.random.default_rng(5)

        def draw(heads: int) -> np.ndarray:
            own = rng.standard_normal((1 + len(OTHERS), LENGTH, heads, program.head_dim))
            return np.asarray(own, program.dtype).astype(np.float32)

        sinks = rng.standard_normal(program.kv_heads * program.group).astype(np.float32)
        q, k, v = draw(program.kv_heads * program.group), *(draw(program.kv_heads) for _ in "kv")
        return cls(q, k, v, sinks if program.sinks else None)


class Step(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cache: np.ndarray
    table: np.ndarray
    kv_starts: np.ndarray
    q_lens: np.ndarray
    num_decode: np.int32
    sinks: np.ndarray | None

    @classmethod
    def of(cls, program: Program, requests: Requests, place: Place) -> "Step":
        """Build a step with the first request at its place, between some of the others."""
        rows = [(1 + n, *own) for n, own in enumerate(OTHERS[: place.others])]
        rows.insert(place.row, (0, place.start, place.count))
        page, width = program.page_size, -(-LENGTH // program.page_size)
        pages = np.random.default_rng(place.row).permutation(np.arange(1, 1 + ROWS * width))
        table = pages.reshape(ROWS, width).astype(np.int32)
        shape = (LAYERS, 1 + ROWS * width, 2 * program.kv_heads, page, program.head_dim)
        cache = np.full(shape, np.nan, np.float32)
        kv_starts, q_lens = np.zeros((2, ROWS), np.int32)
        new: list[list[np.ndarray]] = [[], [], []]
        for row, (number, start, count) in enumerate(rows):
            kv_starts[row], q_lens[row] = start, count
            old = np.concatenate([requests.k[number, :start], requests.v[number, :start]], axis=1)
            for position, slots in enumerate(old):
                cache[LAYER, table[row, position // page], :, position % page] = slots
            for parts, own in zip(new, requests[:3], strict=True):
                parts.append(own[number, start : start + count])
        arrays = []
        for parts in new:
            flat = np.concatenate(parts)
            padded = np.zeros((place.tokens, *flat.shape[1:]))
            padded[: len(flat)] = flat
            arrays.append(np.asarray(padded, program.dtype))
        return cls(
            *(*arrays, program.as_cached(cache), table, kv_starts, q_lens),
            *(np.int32(place.decodes), requests.sinks),
        )


@lru_cache
def compiled(program: Program, interpret: Any) -> Any:
    @jax.jit
    def run(step: Step) -> Any:
        batch = AttentionBatch.build(
            *step[4:8], num_tokens=len(step.q), max_draft_tokens=program.max_drafts
        )
        options = program.options._replace(sinks=step.sinks)
        with force_tpu_interpret_mode(interpret):
            return ragged_paged_attention(
                *step[:4], jnp.int32(LAYER), batch, options, is_invariant=True
            )[0]

    return run


def attended(program: Program, step: Step, row: int, interpret: Any = LAZY) -> np.ndarray:
    out = np.asarray(simulate(compiled(program, interpret), step), np.float64)
    first = step.q_lens[:row].sum()
    return out[first : first + step.q_lens[row]]


@pytest.mark.parametrize("name", ["plain", *long(*list(PROGRAMS)[1:])])
def test_a_tokens_bits_depend_on_neither_batch_nor_place_nor_chunks(name: str) -> None:
    program, requests = PROGRAMS[name], Requests.drawn(PROGRAMS[name])
    whole, *others = PLACES
    step = Step.of(program, requests, whole)
    expected = attended(program, step, whole.row)
    new = (program.as_cached(x) for x in (step.k, step.v))
    cached = (program.numbers(x) for x in (*new, step.cache))
    options = program.options._replace(sinks=step.sinks)._asdict()
    q = np.asarray(step.q, np.float64)
    wanted, _ = reference(q, *cached, LAYER, *step[4:7], **options)
    assert_close(expected, wanted[: whole.count], program.dtype)
    for place in others:
        found = attended(program, Step.of(program, requests, place), place.row)
        common = range(max(FIRST, place.start), min(LAST, place.start + place.count))
        for position in common:
            own, other = found[position - place.start], expected[position - FIRST]
            assert (own == other).all(), (place, position)


def test_every_token_takes_products_of_one_size() -> None:
    """By hardware or compiler, a product of another size may order its sums differently."""
    program = PROGRAMS["plain"]
    step = Step.of(program, Requests.drawn(program), PLACES[0])
    of_group = INVARIANT_QUERIES * program.group
    assert product_rows(compiled(program, LAZY), step) == {of_group}


@pytest.mark.long
def test_there_is_no_race() -> None:
    program = PROGRAMS["plain"]
    requests = Requests.drawn(program)
    for place in PLACES[1:3]:
        step = Step.of(program, requests, place)
        found = attended(program, step, place.row, EAGER)
        assert (found == attended(program, step, place.row)).all()
