"""The throughput of a load, by hand: chunks of prompts carry the decode rows along."""

import dataclasses

import pytest

from sgl_jax.planner.load import Reach, requests_per_s
from sgl_jax.planner.step_time import StepTime

PEAK = Reach(attention=1.0, program=1.0, links=1.0, host_s=0.0)


def step(total, attention=0.0, exposed=0.0):
    fields = {field.name: 0.0 for field in dataclasses.fields(StepTime)}
    times = {"total_s": total, "attention_s": attention, "exposed_s": exposed}
    return StepTime(**fields | times | {"bound": "HBM"})


def test_each_part_of_a_step_has_its_own_rate():
    own = step(0.010, attention=0.004, exposed=0.002)
    assert PEAK.step_s(own) == pytest.approx(0.010)
    reach = Reach(attention=0.8, program=0.5, links=0.25, host_s=0.001)
    assert reach.step_s(own) == pytest.approx(0.004 / 0.5 + 0.004 / 0.8 + 0.002 / 0.25 + 0.001)


def test_decode_rows_of_a_mixed_step_cost_their_kv_alone():
    decode, prefill = step(0.010, attention=0.002), step(0.040)
    # 64 prompts of 1,024 tokens are 32 chunks of 2,048, and 100 tokens 68 further steps.
    rate = requests_per_s(64, 1024, 100, 2048, (decode, prefill), PEAK)
    assert rate == pytest.approx(64 / (32 * (0.040 + 0.002) + 68 * 0.010))


def test_short_outputs_end_within_the_chunks():
    decode, prefill = step(0.010, attention=0.002), step(0.040)
    rate = requests_per_s(64, 1024, 8, 2048, (decode, prefill), PEAK)
    assert rate == pytest.approx(64 / (32 * 0.042))
    assert rate == requests_per_s(64, 1024, 32, 2048, (decode, prefill), PEAK)


def test_the_kv_of_a_mixed_step_is_read_at_the_rate_of_attention():
    decode, prefill = step(0.010, attention=0.002), step(0.040)
    reach = PEAK._replace(attention=0.5)
    rate = requests_per_s(64, 1024, 8, 2048, (decode, prefill), reach)
    assert rate == pytest.approx(64 / (32 * 0.044))
