"""Latent attention's time from its parts, by hand."""

import pytest

from sgl_jax.planner.latent_time import LATENT_BUNDLES, LatentSizes, latent_attention_time
from sgl_jax.planner.step_work import StepWork
from sgl_jax.planner.topology import CHIPS

V6E, V5P = CHIPS["v6e"], CHIPS["v5p"]
DEEPSEEK = LatentSizes(heads=16, rank=512, rope_dim=64, layers=61, token_bytes=61 * 1280)


def test_decode_waits_for_memory_with_few_heads_and_for_the_matrix_units_with_many():
    work = StepWork(tokens=64, kv_tokens_read=10**6, query_key_pairs=10**6, is_prefill=False)
    few = latent_attention_time(work, DEEPSEEK, V6E)
    assert few.bound == "HBM"
    assert few.total_s == pytest.approx(61 * 1280 / 1.64e6)
    many = latent_attention_time(work, DEEPSEEK._replace(heads=128), V5P)
    assert many.bound == "MXU"
    assert many.total_s == pytest.approx(61e6 * LATENT_BUNDLES["TPU v5"].decode[1] / 1.75e9)


@pytest.mark.parametrize(("tokens", "form"), [(256, "absorbed"), (2048, "expanded")])
def test_a_long_step_prefills_in_the_expanded_form(tokens, form):
    work = StepWork(tokens=tokens, kv_tokens_read=4096, query_key_pairs=tokens * 4096)
    time = latent_attention_time(work, DEEPSEEK, V6E)
    gflop = tokens * 4096 * 16 * 2 * 1088 * 61 / 1e9
    each = getattr(LATENT_BUNDLES["TPU v6 lite"], form)
    assert time.instructions_s == pytest.approx(gflop * each / 1.75e9)
    assert time.bound == "MXU"
