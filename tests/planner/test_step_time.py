"""A step's time from its parts, by hand."""

import dataclasses

import pytest

from sgl_jax.kernels.qkv_heads import PLAIN_NAME
from sgl_jax.planner.arguments import read_config
from sgl_jax.planner.kernel_time import (
    VECTOR_RATE,
    DeviceBytes,
    StepWork,
    experts_time,
    heads_time,
    lines_time,
)
from sgl_jax.planner.program_cost import Collective, ProgramCost
from sgl_jax.planner.step_time import collective_time, estimate_step, exposed_time
from sgl_jax.planner.topology import CHIPS, ICI_HOP_S

CHIP = CHIPS["v6e"]
LLAMA = read_config("llama-3.1-8b")
MOE = read_config("qwen3-30b-a3b")
ONE_GB = 10**9


def cost(cycles=0, collectives=()):
    return ProgramCost(0, 0, 0, 0, 0, cycles, tuple(collectives), ())


def device(layers=0, experts=0, kv_token=0):
    return DeviceBytes(layers, layers // 2, experts, 2, kv_token, tp_size=1)


def test_a_decode_step_waits_for_its_weights_and_its_kv():
    work = StepWork(tokens=8, kv_tokens_read=8000, query_key_pairs=8000, is_prefill=False)
    time = estimate_step(
        cost(), work.tokens, work, LLAMA, device(layers=16 * ONE_GB, kv_token=131072), CHIP
    )
    assert time.weights_s == pytest.approx(16 / 1640)
    assert time.attention_s == pytest.approx(8000 * 131072 / 1640e9)
    assert time.total_s == pytest.approx(time.weights_s + time.attention_s)
    assert time.bound == "HBM"


def test_the_compilers_cycles_count_where_they_are_more_than_the_weights():
    work = StepWork(8, 0, 0)
    time = estimate_step(
        cost(cycles=175_000_000), work.tokens, work, LLAMA, device(layers=ONE_GB), CHIP
    )
    assert time.total_s == pytest.approx(0.1)
    assert time.bound == "instructions"


def test_a_prefill_chunk_is_bound_by_the_matrix_units_and_its_attention_by_the_scores():
    work = StepWork(2048, 1024, 2048 * 512)
    time = estimate_step(
        cost(), work.tokens, work, LLAMA, device(layers=16 * ONE_GB, kv_token=131072), CHIP
    )
    scores = 2048 * 512 * 32 * 32
    assert time.attention_s == pytest.approx(scores / VECTOR_RATE / 1.75e9)
    assert time.bound == "MXU"


def test_small_heads_cost_a_prefill_chunk_as_much_as_heads_of_128():
    small = dataclasses.replace(LLAMA, head_dim=64)
    work = StepWork(2048, 1024, 2048 * 512)
    times = [
        estimate_step(cost(), work.tokens, work, c, device(layers=1), CHIPS["v5e"])
        for c in (LLAMA, small)
    ]
    assert times[0].attention_s == times[1].attention_s > 0


def test_an_all_reduce_goes_round_twice_its_halves_once():
    reduce = Collective("all-reduce", "", 4_000_000, group_size=4, times=10, in_loop=True)
    gather = reduce._replace(kind="all-gather")
    once = 1_000_000 / 200e9 + ICI_HOP_S
    assert collective_time(reduce, CHIP) == pytest.approx(10 * 6 * once)
    assert collective_time(gather, CHIP) == pytest.approx(10 * 3 * once)
    scatter = reduce._replace(kind="reduce-scatter", num_bytes=1_000_000)  # what each has at last
    assert collective_time(scatter, CHIP) == pytest.approx(10 * 3 * once)
    assert collective_time(reduce._replace(group_size=1), CHIP) == 0


def test_a_step_waits_only_for_the_exposed_part_of_an_exchange():
    reduce = Collective("all-reduce", "", 4_000_000, group_size=4, times=10, in_loop=True)
    transfer = collective_time(reduce, CHIP) / 10
    half, more = int(transfer / 2 * CHIP.clock_hz), int(transfer * 2 * CHIP.clock_hz)
    beside = [reduce._replace(beside_cycles=cycles) for cycles in (0, half, more)]
    exposed = [exposed_time(each, CHIP) for each in beside]
    assert exposed == pytest.approx([10 * transfer, 5 * transfer, 0], rel=1e-4)
    time = estimate_step(
        cost(collectives=beside), 8, StepWork(8, 0, 0), LLAMA, device(layers=ONE_GB), CHIP
    )
    assert time.collectives_s == pytest.approx(30 * transfer)
    assert time.exposed_s == pytest.approx(15 * transfer, rel=1e-4)
    assert time.total_s == pytest.approx(time.weights_s + time.exposed_s)


def test_an_all_to_all_costs_as_much_as_an_all_gather_where_all_are_near():
    gather = Collective("all-gather", "", 8_000_000, group_size=4, times=1, in_loop=False)
    exchange = gather._replace(kind="all-to-all")
    assert collective_time(exchange, CHIP) == collective_time(gather, CHIP)
    far = collective_time(exchange._replace(group_size=8), CHIP)
    assert far == pytest.approx(7 * (2 * 1_000_000 / 200e9 + ICI_HOP_S))


def test_a_step_of_many_small_exchanges_is_bound_by_the_interconnect():
    reduce = Collective("all-reduce", "", 64_000, group_size=8, times=160, in_loop=True)
    time = estimate_step(
        cost(collectives=[reduce]), 4, StepWork(4, 0, 0), LLAMA, device(layers=ONE_GB), CHIP
    )
    assert time.bound == "ICI"


def test_a_step_waits_for_its_experts_beside_all_else():
    work = StepWork(tokens=256, kv_tokens_read=0, query_key_pairs=0, is_prefill=False)
    held = device(layers=ONE_GB, experts=57 * ONE_GB)
    time = estimate_step(cost(), work.tokens, work, MOE, held, CHIP)
    assert time.experts_s == experts_time(256, MOE, held, CHIP).total_s
    assert time.lines_s == lines_time(256, MOE, held, CHIP).total_s > 0
    assert time.total_s == pytest.approx(1 / 1640 + time.experts_s + time.lines_s)
    assert time.weights_s == pytest.approx(1 / 1640)
    assert time.bound == "HBM"


def test_heads_are_read_and_written_with_their_angles():
    time = heads_time(128, LLAMA, 2, 8, CHIP)
    heads = 4 + 1 + 1  # of a device: queries, key, value
    assert time.total_s == pytest.approx(32 * 128 * (2 * heads * 256 + 512) / 1640e9)


def test_heads_count_only_where_a_kernel_makes_them():
    work = StepWork(8, 0, 0)
    by_xla = cost(cycles=1_000_000)
    by_kernel = by_xla._replace(kernels=(PLAIN_NAME,) * 4)
    times = [
        estimate_step(program, 16, work, LLAMA, device(layers=1), CHIP)
        for program in (by_xla, by_kernel)
    ]
    assert times[0].heads_s == 0
    assert times[1].heads_s == heads_time(16, LLAMA, 2, 1, CHIP).total_s
    assert times[1].total_s == pytest.approx(times[0].total_s + times[1].heads_s)
