"""The time of a step's experts, by hand."""

import dataclasses

import pytest

from sgl_jax.planner.arguments import read_config
from sgl_jax.planner.kernel_time import (
    GATHER_SHARE,
    MATRIX_SHARE,
    VECTOR_RATE,
    DeviceBytes,
    experts_time,
    experts_touched,
    lines_time,
)
from sgl_jax.planner.topology import CHIPS

CHIP = CHIPS["v6e"]
MOE = read_config("qwen3-30b-a3b")  # 48 layers, hidden 2048, 128 experts of 768, 8 a token
ONE_GB = 10**9


def device(expert_bytes=0, **distributed):
    return DeviceBytes(0, 0, expert_bytes, 2, 0, tp_size=4, **distributed)


def test_experts_are_read_as_far_as_tokens_are_likely_to_want_them():
    assert experts_touched(1, MOE.moe) == pytest.approx(8 / 128)
    assert experts_touched(2, MOE.moe) == pytest.approx(8 / 128 + 8 / 128 * 120 / 128)
    assert experts_touched(4096, MOE.moe) == pytest.approx(1)


def test_the_bytes_moved_are_the_experts_and_each_products_lines():
    time = experts_time(4096, MOE, device(ONE_GB), CHIP)
    lines = 48 * 3 * 4096 * 8 * (2048 + 192) * 2
    assert time.hbm_s == pytest.approx((ONE_GB + lines) / 1640e9)


def seconds(flops):
    return flops / (MATRIX_SHARE * 918e12)


def test_a_visit_computes_a_whole_tile_for_each_group_that_has_a_line_in_it():
    one = experts_time(1, MOE, device(), CHIP)  # a tile of the 8 lines there are
    assert one.mxu_s == pytest.approx(seconds(48 * 3 * 8 * 2 * 8 * 2048 * 192))
    many = experts_time(2048, MOE, device(), CHIP)
    visits = 128 + 128 - 1
    assert many.mxu_s == pytest.approx(seconds(48 * 3 * visits * 2 * 128 * 2048 * 192))


@pytest.mark.parametrize(
    ("weight", "chip", "is_converted"),
    [("int8", "v6e", False), ("fp8", "v6e", True), ("fp8", "tpu7x", False), ("mxfp4", "v6e", True)],
)
def test_floats_are_converted_once_a_visit_unless_the_chip_multiplies_them(
    weight, chip, is_converted
):
    chip = CHIPS[chip]
    time = experts_time(1, MOE, device(expert_weight=weight), chip)
    cycles = 48 * 3 * 8 * 2048 * 192 / VECTOR_RATE
    assert time.vector_s == pytest.approx(is_converted * cycles / chip.clock_hz)


def test_only_layers_that_have_experts_wait_for_them():
    dense = dataclasses.replace(MOE.layers[0], moe=None)
    mixed = dataclasses.replace(MOE, layers=(dense, *MOE.layers[:3]) * 12)
    whole, part = (experts_time(64, config, device(ONE_GB), CHIP) for config in (MOE, mixed))
    assert part.mxu_s == pytest.approx(whole.mxu_s * 3 / 4)


def test_whole_experts_take_a_share_of_the_lines_in_longer_visits():
    one_rank = device(ONE_GB, expert_devices=4)
    time = experts_time(4096, MOE, one_rank, CHIP)
    lines = 48 * 3 * 4096 * 8 / 4 * (2048 + 768) * 2
    assert time.hbm_s == pytest.approx((ONE_GB + lines) / 1640e9)
    # 32 experts, 12,288 lines of which a third more than is in use have room, tiles of 512.
    assert time.mxu_s == pytest.approx(seconds(48 * 3 * (32 + 16 - 1) * 2 * 512 * 2048 * 768))
    of_ranks = device(ONE_GB, expert_devices=4, expert_ranks=2)
    assert experts_time(2048, MOE, of_ranks, CHIP).mxu_s == pytest.approx(time.mxu_s)


def test_lines_are_moved_by_products_or_by_row_gathered_or_scattered():
    decode = lines_time(256, MOE, device(expert_devices=4), CHIP)
    assert decode.total_s == pytest.approx(seconds(48 * 2 * 2 * 256 * 512 * 2048))
    row_s = 2 * 2048 * 2 / (GATHER_SHARE * 1640e9)
    whole = lines_time(2048, MOE, device(expert_devices=4), CHIP)
    assert whole.total_s == pytest.approx(48 * (6144 + 16384) * row_s)
    few = lines_time(2048, MOE, device(expert_devices=16), CHIP)
    assert few.total_s == pytest.approx(48 * (1 + 4) * 1536 * row_s)
    assert lines_time(64, read_config("llama-3.1-8b"), device(), CHIP).total_s == 0


def test_a_model_without_experts_waits_for_none():
    assert experts_time(64, read_config("llama-3.1-8b"), device(), CHIP).total_s == 0
