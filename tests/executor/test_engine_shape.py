"""What an engine's shape refuses before anything is loaded."""

import dataclasses

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_shape import EngineShape
from sgl_jax.plan.arguments import read_config

LLAMA = read_config("llama-3.1-8b")


def decide(platform, **args):
    return EngineShape.decide(ServerArgs(**args), LLAMA, platform)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match=r"--context-length 200000 exceeds .* of 131072"):
        decide("cpu", context_length=200_000)


@pytest.mark.parametrize(
    ("platform", "args", "least"),
    [
        ("tpu", {"page_size": 8}, 16),
        ("tpu", {"page_size": 1, "kv_cache_dtype": "float32"}, 8),
        ("cpu", {"page_size": 4, "attention_backend": "pallas"}, 8),
        ("tpu", {"page_size": 512}, 16),
        ("tpu", {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"}, 32),
    ],
)
def test_pages_that_a_tpu_cannot_move_are_refused_with_the_way_out(platform, args, least):
    with pytest.raises(ValueError, match=f"one of {least}, .*, 256 with .* xla takes any"):
        decide(platform, **args)


def test_a_request_of_too_many_pages_for_scalar_memory_is_refused_with_the_way_out():
    config = dataclasses.replace(LLAMA, max_position_embeddings=1 << 20)
    with pytest.raises(ValueError, match=r"65536 pages of 16 .* larger --page-size"):
        EngineShape.decide(ServerArgs(page_size=16), config, "tpu")
    assert EngineShape.decide(ServerArgs(page_size=32), config, "tpu").pages_per_row == 32_768
    assert EngineShape.decide(ServerArgs(page_size=16), config, "cpu").pages_per_row == 65_536


def test_xla_takes_any_page():
    assert decide("tpu", page_size=1, attention_backend="xla").pool_layout.page_size == 1
    assert decide("cpu", page_size=1).pool_layout.page_size == 1


def test_a_cache_of_8_bits_takes_half_the_bytes_of_bfloat16():
    wide, narrow = (
        decide("tpu", page_size=32, kv_cache_dtype=name).pool_layout
        for name in ("bfloat16", "fp8_e4m3")
    )
    assert narrow.dtype == "int8"
    assert 2 * narrow.page_bytes == wide.page_bytes
