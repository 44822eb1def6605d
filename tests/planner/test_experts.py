"""The time of a step's experts, by hand."""

import dataclasses

import pytest

from sgl_jax.planner.arguments import read_config
from sgl_jax.planner.kernel_time import (
    HEADS_CYCLES,
    LINE_BUNDLES,
    VISIT_BUNDLES,
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
    return DeviceBytes(0, 0, expert_bytes, 2, 0, 2, tp_size=4, **distributed)


def test_experts_are_read_as_far_as_tokens_are_likely_to_want_them():
    assert experts_touched(1, MOE.moe) == pytest.approx(8 / 128)
    assert experts_touched(2, MOE.moe) == pytest.approx(8 / 128 + 8 / 128 * 120 / 128)
    assert experts_touched(4096, MOE.moe) == pytest.approx(1)


def test_the_bytes_moved_are_the_experts_and_each_products_lines():
    time = experts_time(4096, MOE, device(ONE_GB), CHIP)
    lines = 48 * 3 * 4096 * 8 * (2048 + 192) * 2
    assert time.hbm_s == pytest.approx((ONE_GB + lines) / 1640e9)


def test_a_visit_computes_a_whole_tile_for_each_group_that_has_a_line_in_it():
    fixed, per_mib, per_gflop = VISIT_BUNDLES["TPU v6 lite"]

    def visit(lines):
        return fixed + per_mib * 0.75 + per_gflop * 2 * lines * 2048 * 192 / 1e9

    one = experts_time(1, MOE, device(), CHIP)  # a tile of the 8 lines there are
    assert one.instructions_s == pytest.approx(48 * 3 * 8 * visit(8) / 1.75e9)
    many = experts_time(2048, MOE, device(), CHIP)
    assert many.instructions_s == pytest.approx(48 * 3 * (128 + 128 - 1) * visit(128) / 1.75e9)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_no_product_is_faster_than_the_matrix_units(chip):
    lines = 16_384 * 8
    least = 48 * 3 * 2 * lines * 2048 * 192 / chip.bf16_flops_per_s
    assert experts_time(16_384, MOE, device(), chip).instructions_s > least


def test_the_longer_of_the_two_is_what_it_takes():
    time = experts_time(64, MOE, device(8 * ONE_GB), CHIP)
    assert time.total_s == max(time.hbm_s, time.instructions_s) > 0


def test_only_layers_that_have_experts_wait_for_them():
    dense = dataclasses.replace(MOE.layers[0], moe=None)
    mixed = dataclasses.replace(MOE, layers=(dense, *MOE.layers[:3]) * 12)
    whole, part = (experts_time(64, config, device(ONE_GB), CHIP) for config in (MOE, mixed))
    assert part.instructions_s == pytest.approx(whole.instructions_s * 3 / 4)


def test_whole_experts_take_a_share_of_the_lines_in_longer_visits():
    one_rank = device(ONE_GB, expert_devices=4)
    time = experts_time(4096, MOE, one_rank, CHIP)
    lines = 48 * 3 * 4096 * 8 / 4 * (2048 + 768) * 2
    assert time.hbm_s == pytest.approx((ONE_GB + lines) / 1640e9)
    fixed, per_mib, per_gflop = VISIT_BUNDLES["TPU v6 lite"]
    # 32 experts, 12,288 lines of which a third more than is in use have room, tiles of 512.
    visit = fixed + per_mib * 3 + per_gflop * 2 * 512 * 2048 * 768 / 1e9
    assert time.instructions_s == pytest.approx(48 * 3 * (32 + 16 - 1) * visit / 1.75e9)
    of_ranks = device(ONE_GB, expert_devices=4, expert_ranks=2)
    both = experts_time(2048, MOE, of_ranks, CHIP)
    assert both.instructions_s == pytest.approx(time.instructions_s)


def test_lines_are_moved_by_kernels_a_tile_at_a_time_or_by_row_gathered_or_scattered():
    count = LINE_BUNDLES["TPU v6 lite"]
    decode = lines_time(256, MOE, device(expert_devices=4), CHIP)
    call = HEADS_CYCLES["TPU v6 lite"].call
    cycles = (
        count.norm + count.routed + count.choose + count.sort + 32 * count.sort_expert + 6 * call
    )
    cycles += count.once + 4 * (count.tile + count.gate)
    assert decode == pytest.approx(48 * cycles / 1.75e9)
    chosen = 8 * (count.norm + count.routed + count.choose) + call
    whole = lines_time(2048, MOE, device(expert_devices=4), CHIP)
    moved = 2 * 16384 * count.sorted_key + (6144 + 16384) * count.gathered_row
    assert whole == pytest.approx(48 * (chosen + moved) / 1.75e9)
    few = lines_time(2048, MOE, device(expert_devices=16), CHIP)
    moved = (16384 + 1536) * count.sorted_key
    moved += 1536 * (count.gathered_row + count.scattered_row + 10)
    assert few == pytest.approx(48 * (chosen + moved) / 1.75e9)
    assert lines_time(64, read_config("llama-3.1-8b"), device(), CHIP) == 0


def test_a_model_without_experts_waits_for_none():
    assert experts_time(64, read_config("llama-3.1-8b"), device(), CHIP).total_s == 0
