"""The TPU's product with scales of groups, simulated on the CPU, beside float64."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.core.layer_configs import GREATEST, Scheme
from sgl_jax.kernels.quantized_matmul import tpu
from sgl_jax.kernels.quantized_matmul.numbers import QuantizedArrays
from sgl_jax.kernels.quantized_matmul.tpu import Blocks, choose_blocks
from tests.kernels.quantized_matmul.problems import TYPES, numbers, rounded
from tests.kernels.simulation import MODES, assert_close, simulate
from tests.support.long import long, long_but

LAYERS, LAYER = 3, 1


class Program(NamedTuple):
    """What a compiled program depends on."""

    scheme: Scheme = Scheme("int4", 32)
    tokens: int = 40
    inputs: int = 64
    outputs: int = 256
    blocks: Blocks = Blocks(16, 64, 128)
    dtype: Any = jnp.float32


PROGRAMS = (
    Program(),
    Program(Scheme("int4", 16, has_zero_points=True), outputs=192, dtype=jnp.bfloat16),
    Program(Scheme("fp8", 32), tokens=3, blocks=Blocks(3, 64, 256)),
    # The sums of two blocks of inputs, whose scales are whole tiles.
    Program(Scheme("int8", 16), inputs=512, blocks=Blocks(16, 256, 128)),
    Program(Scheme("mxfp4", 32), tokens=33, dtype=jnp.bfloat16),
    Program(Scheme("int8"), blocks=Blocks(16, 64, 128)),
    Program(Scheme("int4", has_zero_points=True), blocks=Blocks(16, 64, 128)),
    Program(Scheme("int8", activation="int8"), dtype=jnp.bfloat16),
    Program(Scheme("int8", activation="int8", has_input_scale=True), tokens=5),
    Program(Scheme("fp8", activation="fp8")),
)


class Problem(NamedTuple):
    x: np.ndarray
    matrices: QuantizedArrays
    layer: np.int32


def build(program: Program, seed: int) -> Problem:
    """Draw the arrays; what no product may read is NaN, or the least value of its type."""
    rng, scheme = np.random.default_rng(seed), program.scheme
    shape = (program.inputs, program.outputs)
    groups = (program.inputs // (scheme.group_size or program.inputs), program.outputs)
    x = rng.normal(size=(program.tokens, program.inputs)).astype(program.dtype)
    drawn = rng.normal(size=shape) * 30 if scheme.weight == "int8" else rng.normal(size=shape) * 3
    if scheme.weight != "fp8":
        limit = 127 if scheme.weight == "int8" else 7
        drawn = np.clip(np.round(drawn), -limit, limit)
    values = np.zeros((LAYERS, *shape), TYPES[scheme.weight])
    values[LAYER] = drawn.astype(values.dtype)
    if scheme.weight == "mxfp4":
        scales = np.full((LAYERS, *groups), 255, np.uint8)
        scales[LAYER] = rng.integers(120, 130, groups)
    else:
        of_scales = program.dtype if scheme.group_size else np.float32
        scales = np.full((LAYERS, *groups), np.nan, of_scales)
        scales[LAYER] = np.exp2(rng.integers(-6, 0, groups)) * rng.choice([1, 1.5], groups)
    zeros = None
    if scheme.has_zero_points:
        zeros = np.zeros((LAYERS, *groups), TYPES[scheme.weight])
        zeros[LAYER] = rng.integers(-7, 8, groups).astype(zeros.dtype)
    of_inputs = None
    if scheme.has_input_scale:  # the greatest magnitudes are clamped
        of_inputs = np.full(1, 2 / GREATEST[scheme.activation], np.float32)
    return Problem(x, QuantizedArrays(values, scales, zeros, of_inputs), np.int32(LAYER))


def multiply(program, interpret):
    @jax.jit
    def run(problem):
        with force_tpu_interpret_mode(interpret):
            return tpu.tpu_quantized_matmul(*problem, program.scheme, program.blocks)

    return run


compiled = lru_cache(multiply)


def check(program, seed, run):
    problem = build(program, seed)
    result = simulate(run, problem)
    assert result.dtype == program.dtype
    x, scheme = np.asarray(problem.x, np.float64), program.scheme
    if scheme.activation is not None:
        x = rounded(x, scheme.activation, problem.matrices.input_scale)
    expected = x @ numbers(scheme, problem.matrices, LAYER)
    # To numbers of about one, as the comparison expects.
    scale = np.abs(expected).max()
    assert_close(np.asarray(result, np.float64) / scale, expected / scale, program.dtype)


# By default in one mode: a fixed case is tried in both.
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=3, deadline=None)
@given(program=st.sampled_from(PROGRAMS), seed=st.integers(0, 2**32 - 1))
def test_a_matrix_in_groups_is_multiplied_as_its_numbers(mode, program, seed):
    check(program, seed, compiled(program, MODES[mode]))


def read_another_layer(monkeypatch):
    run = tpu.tpu_quantized_matmul
    monkeypatch.setattr(
        tpu, "tpu_quantized_matmul", lambda x, own, layer, *rest: run(x, own, layer + 1, *rest)
    )


def scale_by_the_next_group(monkeypatch):
    own = tpu.dequantized  # type: ignore[attr-defined]

    def wrong(values, scales, *rest):
        return own(values, jnp.roll(scales, 1, axis=0), *rest)

    monkeypatch.setattr(tpu, "dequantized", wrong)


def lose_the_first_block(monkeypatch):
    own = tpu.product  # type: ignore[attr-defined]
    monkeypatch.setattr(
        tpu,
        "product",
        lambda x, y, axes: own(x, y, axes) * (tpu.pl.program_id(1) > 0),  # type: ignore[attr-defined]
    )


def keep_the_numbers_of_the_block_before(monkeypatch):
    own = tpu.dequantized  # type: ignore[attr-defined]

    def wrong(*args):
        return jnp.where(tpu.pl.program_id(1) == 1, 0, own(*args))  # type: ignore[attr-defined]

    monkeypatch.setattr(tpu, "dequantized", wrong)


FAULTS = (
    read_another_layer,
    scale_by_the_next_group,
    lose_the_first_block,
    keep_the_numbers_of_the_block_before,
)
TWO_BLOCKS = PROGRAMS[3]


def check_in_both_modes():
    for mode in MODES.values():
        check(TWO_BLOCKS, 0, multiply(TWO_BLOCKS, mode))


def test_without_a_fault_the_case_that_they_are_seeded_into_passes():
    check_in_both_modes()


@pytest.mark.parametrize("fault", long_but(FAULTS, FAULTS[0]))
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes()


@pytest.mark.parametrize("tokens", [1, 128, 2048])
@pytest.mark.parametrize(
    ("inputs", "group"),
    [(5120, 128), (3200, 128), (3584, 128), (8192, 128), (2880, 32), (4096, 64)],
)
def test_blocks_are_whole_tiles_and_fit(tokens, inputs, group):
    groups = inputs // group
    blocks = choose_blocks(tokens, inputs, 6400, groups)
    assert inputs % blocks.inputs == 0
    own = blocks.inputs // group
    assert own == groups or own % 16 == 0
    assert blocks.outputs % 128 == 0
    # Numbers, both buffers of values, and the sums.
    assert blocks.inputs * blocks.outputs * 4 + 4 * tokens * blocks.outputs < 48 << 20
