"""Kernels beside attention: values that are not finite stay with the row, slot or line they are of.

Attention's are in `attention/test_not_finite.py`, choices and sums of experts in `expert_dispatch`.
"""

from functools import lru_cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.layers.kernels import kernels_of
from tests.kernels import test_qkv_heads as heads
from tests.kernels.attention.problems import LAYER, Case
from tests.kernels.gated_delta import problems as delta
from tests.kernels.grouped_matmul import problems as groups
from tests.kernels.latent_attention import problems as latent
from tests.kernels.not_finite import BAD, assert_same_bits, check_rows, row_tokens
from tests.kernels.quantized_matmul import problems as quantized
from tests.kernels.simulation import EAGER
from tests.support.long import long, long_but

# By default XLA's are tried with all values, and the kernels, simulated, with one in one row.
HOW = [("xla", BAD), ("pallas", BAD[:1]), pytest.param("pallas", BAD, marks=pytest.mark.long)]
LATENTS = (
    latent.LatentProgram(heads=4, rank=128, rope_dim=16, rows=5, max_drafts=1),
    latent.LatentProgram(heads=4, rank=128, page_size=32, dtype=jnp.bfloat16, cache_dtype=jnp.int8),
)


def spoil(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


@lru_cache
def latent_attention(program, how):
    attend = kernels_of("cpu", how).attend_latents

    @jax.jit
    def run(problem):
        batch = latent.make_batch(problem, program)
        arrays = problem.queries, problem.latents, problem.up, problem.kv_cache
        return attend(*arrays, jnp.int32(LAYER), batch, latent.SCALE)

    return run


@pytest.mark.parametrize(("how", "values"), HOW)
@pytest.mark.parametrize("program", long_but(LATENTS, LATENTS[1]), ids=["float32", "8 bits"])
def test_rows_of_latent_attention(program, how, values):
    """In the last number of a row of the cache, which is no part of its value."""
    decodes = [(100, 1 + program.max_drafts), (50, 1), (17, 1)]
    problem = latent.build(Case(program, decodes, [(10, 20), (0, 17)], 0, seed=5))
    is_unused, cache = np.isnan(program.numbers(problem.kv_cache)), problem.kv_cache
    clean = problem._replace(kv_cache=np.where(is_unused, cache.dtype.type(0), cache))
    run, q_lens = latent_attention(program, how), clean.q_lens
    want, *_ = run(clean)
    got, *_ = run(problem)  # unused slots are NaN
    assert_same_bits(got[: q_lens.sum()], want[: q_lens.sum()])
    for row in (1, 3)[: len(values)]:
        for value in values:
            new = spoil(clean.latents, (row_tokens(q_lens, row), -1), value)
            check_rows(run(clean._replace(latents=new))[0], want, q_lens, row)
            page, slot = divmod(int(clean.kv_starts[row]) - 1, program.page_size)
            stored = np.int8(0x7F) if cache.dtype == np.int8 else value
            where = (LAYER, clean.page_table[row, page], 0, slot, program.width - 1)
            cached = clean._replace(kv_cache=spoil(clean.kv_cache, where, stored))
            check_rows(run(cached)[0], want, q_lens, row)


DELTA = delta.Program(key_heads=1, key_dim=128, value_dim=128, tokens=100, rows=5, max_drafts=1)


@lru_cache
def gated_delta(how):
    calls = kernels_of("cpu", how)

    @jax.jit
    def run(problem):
        batch, layer = problem.make_batch(DELTA), jnp.int32(delta.LAYER)
        found = calls.gated_delta(problem.tokens, problem.states, layer, batch)
        return found, calls.causal_conv(*problem.conv, layer, batch)

    return run


@pytest.mark.parametrize(
    ("how", "values"), [HOW[0], pytest.param("pallas", BAD, marks=pytest.mark.long)]
)
def test_rows_and_slots_of_gated_delta_nets(how, values):
    """A row's outputs and the states that it writes follow from its own tokens and state alone."""
    case = delta.Case(DELTA, [(9, 2), (30, 1)], [(7, 20), (0, 40), (5, 3)], [(3, 0.5)], seed=4)
    problem, run = delta.build(case), gated_delta(how)
    # A slot that nothing reads may hold anything: what a request left that had it before.
    clean = problem._replace(
        states=np.nan_to_num(problem.states), conv_states=np.nan_to_num(problem.conv_states)
    )
    step, (want, want_conv) = problem.step, run(clean)
    used = step.q_lens.sum()
    for own, wanted in zip(run(problem), (want, want_conv), strict=True):
        assert_same_bits(own[0][:used], wanted[0][:used])
    for row in (1, 2):
        tokens, read = row_tokens(step.q_lens, row), (delta.LAYER, step.slots_in[row])
        for value, name in product(values, ("states", "k", "beta")):
            where = read if name == "states" else tokens
            got, _ = run(clean._replace(**{name: spoil(getattr(clean, name), where, value)}))
            check_rows(got[0], want[0], step.q_lens, row)
            check_slots(got[1], want[1], step, row)
        for value in values:
            _, got = run(clean._replace(u=spoil(clean.u, tokens, value)))
            check_rows(got[0], want_conv[0], step.q_lens, row)
            check_slots(got[1], want_conv[1], step, row)


def check_slots(got, want, step, bad_row):
    """The slots that the other rows write are as they were."""
    for row, slot in enumerate(step.slots_out):
        if row != bad_row and step.q_lens[row]:
            number = step.q_lens[row] if row < step.num_decode else 1
            written = slice(slot, slot + number)
            assert_same_bits(got[delta.LAYER, written], want[delta.LAYER, written])


GROUPS = groups.Program(lines=40, inputs=64, outputs=128)


@pytest.mark.parametrize(("how", "values"), HOW)
@pytest.mark.parametrize("transposed", [False, *long(True)])
def test_lines_and_matrices_of_a_grouped_product(how, values, transposed):
    """A line, or an expert's matrix, spoils its own lines alone; lines of no group may be any."""
    program = GROUPS._replace(transposed=transposed)
    problem = groups.build(groups.Case(program, (5, 0, 12, 7, 8), None, seed=3))
    matrices, sizes = np.nan_to_num(problem.matrices.values), jnp.asarray(problem.group_sizes)
    multiply = kernels_of("cpu", how).multiply_groups

    @jax.jit
    def run(lines, matrices):
        own = GroupMatrices(matrices), jnp.int32(groups.LAYER), sizes
        return multiply(lines, *own, transposed=transposed)

    used = int(sizes.sum())
    want = run(problem.lines, matrices)[:used]
    for value in values:
        bad = spoil(problem.lines, ([9, *range(used, 40)], slice(None)), value)
        got, others = run(bad, matrices)[:used], np.arange(used) != 9
        assert_same_bits(got[others], want[others])
        assert not np.isfinite(got[9]).any()
        got = run(problem.lines, spoil(matrices, (groups.LAYER, 2), value))[:used]
        others = (np.arange(used) < 5) | (np.arange(used) >= 17)
        assert_same_bits(got[others], want[others])
        assert not np.isfinite(got[~others]).any()


SCHEMES = (
    Scheme("int8", activation="int8"),
    Scheme("fp8", activation="fp8"),
    Scheme("int8", activation="int8", has_input_scale=True),
    Scheme("fp8", activation="fp8", has_input_scale=True),
    Scheme("int8"),
    Scheme("int4", 32),
)


@pytest.mark.parametrize(("how", "values"), HOW)
@pytest.mark.parametrize("scheme", long_but(SCHEMES, SCHEMES[0], SCHEMES[5]), ids=str)
def test_tokens_of_a_quantized_product(scheme, how, values):
    arrays = quantized.draw(scheme, 128, 256)
    multiply = kernels_of("cpu", how).multiply_quantized
    run = jax.jit(partial(multiply, matrices=arrays, layer=jnp.int32(1), scheme=scheme))
    x = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)
    want, others = run(x), np.arange(16) != 5
    for value in values:
        got = run(spoil(x, (5, 3), value))
        assert_same_bits(got[others], want[others])
        assert not np.isfinite(got[5]).any()


@pytest.mark.long
def test_tokens_of_the_kernel_of_heads():
    case = heads.CASES["bfloat16"]
    inputs = heads.build(case)
    want = heads.run(case, EAGER)
    bad = spoil(inputs[0], 7, np.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "build", lambda _: (bad, *inputs[1:]))
        got = heads.run(case, EAGER)
    others = np.arange(case.tokens) != 7
    for own, wanted in zip(got, want, strict=True):
        assert_same_bits(own[others], wanted[others])
        assert np.isnan(np.asarray(own[7], np.float32)).all()
