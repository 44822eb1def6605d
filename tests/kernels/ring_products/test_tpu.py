"""The TPU's products over a ring, their messages simulated on CPU devices, beside float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.ring_products import blocks
from sgl_jax.kernels.ring_products.tpu import gather, scatter
from sgl_jax.kernels.ring_products.tpu import ring as ring_module
from tests.kernels.ring_products.problems import Program, check, draw, on_ring
from tests.kernels.simulation import MODES, NoWait, simulate

PROGRAMS = (
    Program(2, ranks=2),
    Program(4, is_quantized=True),
    Program(4, dtype=jnp.bfloat16),
    Program(4, tokens=16),  # too few for two parts
    Program(3, tokens=8),  # no chip lies opposite
    Program(2, tokens=150),  # padded
    Program(2, tokens=128, is_quantized=True, activation="int8"),
    Program(2, tokens=128, is_quantized=True, dtype=jnp.bfloat16, activation="int8"),
    Program(2, tokens=32, is_quantized=True, activation="fp8"),
    Program(3, tokens=150),
    Program(4, tokens=128, is_quantized=True, activation="int8"),
)
# By default one in each mode.
BY_DEFAULT = ((PROGRAMS[5], "lazy"), (PROGRAMS[6], "eager"))


def multiply(program, interpret):
    def run(problem):
        products = gather.tpu_gather_multiply, scatter.tpu_multiply_scatter
        with force_tpu_interpret_mode(interpret):
            return on_ring(program, *products)(problem)

    return jax.jit(run)


compiled = lru_cache(multiply)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several to each matrix, in fewer buffers than there are blocks; and of 128 tokens or more,
    each multiplied two tiles at a time."""
    monkeypatch.setattr(blocks, "_MAX_NUMBERS", 128 * 128)
    monkeypatch.setattr(blocks, "_MAX_BUFFERS", 3)
    monkeypatch.setattr(blocks, "_MAX_TILE", 32)
    room = 16 * 2**20 + 640_000
    monkeypatch.setattr(blocks, "most_vmem_bytes", lambda kind: room)


def run_and_check(program, seed, run):
    problem = draw(program, seed)
    check(program, problem, simulate(run, problem))


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        pytest.param(
            *(program, mode),
            id=f"{program}-{mode}",
            marks=() if (program, mode) in BY_DEFAULT else pytest.mark.long,
        )
        for program in PROGRAMS
        for mode in MODES
    ],
)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_layers_in_a_row_are_those_of_the_whole_arrays(mode, program, seed):
    run_and_check(program, seed, compiled(program, MODES[mode]))


def send_the_wrong_way(monkeypatch):
    own = ring_module._direction
    monkeypatch.setattr(ring_module, "_direction", lambda k: -own(k))


def wait_for_neighbours_before_the_first_block_alone(monkeypatch):
    own = ring_module.Ring.wait_for_neighbours

    def wrong(self):
        pl.when(pl.program_id(0) == 0)(lambda: own(self))

    monkeypatch.setattr(ring_module.Ring, "wait_for_neighbours", wrong)


def pass_on_without_what_came(monkeypatch):
    monkeypatch.setattr(ring_module.Ring, "place_before", lambda self, k, part: self.chips)


def send_before_the_neighbours_are_there(monkeypatch):
    monkeypatch.setattr(ring_module.Ring, "wait_for_neighbours", lambda self: None)


def read_another_layer(monkeypatch):
    own = ring_module.Stream
    for module in (gather, scatter):
        monkeypatch.setattr(module, "Stream", lambda layer, *rest: own(layer - 1, *rest))


def use_blocks_that_have_not_come(monkeypatch):
    own = ring_module.Stream._copies
    monkeypatch.setattr(ring_module.Stream, "_copies", lambda *args: list(map(NoWait, own(*args))))


class NotReceived(NoWait):
    """A message that is read before it has come."""

    def wait_recv(self):
        pass

    def wait_send(self):
        self.copy.wait_send()


def read_messages_before_they_come(monkeypatch):
    own = ring_module.Ring.message
    monkeypatch.setattr(ring_module.Ring, "message", lambda *args: NotReceived(own(*args)))


def leave_messages_under_way(monkeypatch):
    monkeypatch.setattr(ring_module.Ring, "all_messages", lambda self: [])


def leave_out_the_last_rows(monkeypatch):
    def half(num_tokens, size, do):
        do(pl.ds(0, size // 2))

    for module in (gather, scatter):
        monkeypatch.setattr(module, "for_rows", half)


FAULTS = (
    wait_for_neighbours_before_the_first_block_alone,
    pass_on_without_what_came,
    send_the_wrong_way,
    send_before_the_neighbours_are_there,
    read_another_layer,
    use_blocks_that_have_not_come,
    read_messages_before_they_come,
    leave_messages_under_way,
    leave_out_the_last_rows,
)
QUICKLY_NOTICED = (send_before_the_neighbours_are_there,)
OVER_FOUR = Program(4, tokens=128, inner=128)  # in two blocks


def check_in_both_modes():
    for mode in MODES.values():
        run_and_check(OVER_FOUR, 0, multiply(OVER_FOUR, mode))


@pytest.mark.long
def test_without_a_fault_the_case_that_they_are_seeded_into_passes():
    check_in_both_modes()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault in QUICKLY_NOTICED else pytest.mark.long)
        for fault in FAULTS
    ],
)
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes()


@pytest.mark.parametrize("chips", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [8, 64])
def test_each_chip_gets_each_message_once_from_the_nearest_side(chips, tokens, monkeypatch):
    monkeypatch.setattr(gather.lax, "axis_size", lambda axis: chips)  # type: ignore[attr-defined]
    ring = ring_module.Ring.of("tensor", tokens, itemsize=2)
    assert ring.parts == (2 if chips % 2 == 0 and tokens == 64 else 1)
    offsets = sorted(int(ring_module.distance(k)) % chips for k in range(chips))
    assert offsets == list(range(chips))
