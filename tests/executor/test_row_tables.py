"""Admissions of any length reach their rows, in pieces of one size."""

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import RowAdmission
from sgl_jax.executor.row_tables import (
    DeviceRows,
    cut_admissions,
    empty_piece,
    piece_words,
    write_piece,
)
from sgl_jax.layers.sampling.row_params import pack_row_params, packed_width, unpack_row_params

STOPS = 20
_write = jax.jit(write_piece)


def admission(row, length, start=0, **sampling):
    tokens = np.arange(row * 10_000, row * 10_000 + length, dtype=np.int32)
    params = SamplingParams(**sampling)
    return RowAdmission(row, tokens, length, params, 2**32 - row, (7, row), start)


def admitted(pieces, rank, num_rows=30, context=3000):
    tables = DeviceRows(
        jnp.full((num_rows, context), -1, jnp.int32),
        jnp.zeros((num_rows,), jnp.int32),
        jnp.zeros((num_rows, packed_width(STOPS)), jnp.int32),
    )
    for piece in pieces:
        tables = _write(tables, piece[rank])
    return jax.tree.map(np.asarray, tables)


def test_long_prompts_and_many_rows_arrive_whole_on_every_rank():
    ranks = [
        [admission(3, 2500), admission(1, 1), admission(2, 700)],
        [],
        [admission(row, 4, temperature=row / 10) for row in range(1, 21)],
    ]
    pieces = list(cut_admissions(ranks, STOPS))
    assert all(piece.shape == (3, piece_words(STOPS)) for piece in pieces)
    assert not np.shares_memory(pieces[0], pieces[1])
    for rank, admissions in enumerate(ranks):
        tables = admitted(pieces, rank)
        for a in admissions:
            np.testing.assert_array_equal(tables.tokens[a.row, : len(a.tokens)], a.tokens)
            assert (tables.tokens[a.row, len(a.tokens) :] == -1).all()
            assert tables.lens[a.row] == len(a.tokens)
            np.testing.assert_array_equal(tables.params[a.row], pack_row_params(a, STOPS))
        others = [row for row in range(1, 30) if row not in {a.row for a in admissions}]
        assert (tables.tokens[others] == -1).all()
        assert not tables.params[others].any()
        assert not tables.lens[others].any()


def test_a_row_that_goes_on_keeps_the_tokens_it_has():
    """Those of the turn before; what was behind them is written over, and no longer counts."""
    for start, length in ((5, 3), (1500, 1200), (1023, 1), (8, 2)):
        pieces = [
            *cut_admissions([[admission(4, 2000), admission(5, 3)]], STOPS),
            *cut_admissions([[admission(4, length, start=start)]], STOPS),
        ]
        tables = admitted(pieces, 0)
        first = np.arange(40_000, 42_000)
        np.testing.assert_array_equal(tables.tokens[4, :start], first[:start])
        new = tables.tokens[4, start : start + length]
        np.testing.assert_array_equal(new, np.arange(40_000, 40_000 + length))
        assert tables.lens[4] == start + length
        assert tables.lens[5] == 3
        np.testing.assert_array_equal(tables.tokens[5, :3], [50_000, 50_001, 50_002])


def test_an_empty_piece_changes_the_null_row_only():
    tables = admitted([empty_piece(1, STOPS)], 0)
    assert (tables.tokens[1:] == -1).all()


def test_parameters_survive_packing():
    sampling = SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        logit_bias={5: -2.5, 9: 100.0},
        min_new_tokens=3,
    )
    stops = tuple(range(7, 7 + STOPS))
    row = RowAdmission(1, np.zeros(4, np.int32), 4, sampling, -(2**32) + 7, stops)
    packed = pack_row_params(row, STOPS)
    params = jax.tree.map(lambda x: np.asarray(x)[0], unpack_row_params(jnp.asarray(packed)[None]))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        assert getattr(params, name) == np.float32(getattr(sampling, name))
    assert (params.frequency_penalty, params.presence_penalty) == (-0.5, 1.5)
    assert (params.top_k, params.min_new_tokens, params.prompt_len) == (40, 3, 4)
    assert (params.seed_high, params.seed_low) == (-1, 7)
    assert params.stop_ids.tolist() == list(stops)
    assert params.bias_ids[:2].tolist() == [5, 9]
    assert params.bias_values[:3].tolist() == [-2.5, 100.0, 0.0]
