"""What an engine's shape refuses before anything is loaded."""

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
    ("platform", "args", "unit"),
    [
        ("tpu", {"page_size": 8}, 16),
        ("tpu", {"page_size": 1, "kv_cache_dtype": "float32"}, 8),
        ("cpu", {"page_size": 4, "attention_backend": "pallas"}, 8),
        ("tpu", {"page_size": 512}, 16),
        ("tpu", {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"}, 32),
    ],
)
def test_pages_that_a_tpu_cannot_move_are_refused_with_the_way_out(platform, args, unit):
    with pytest.raises(ValueError, match=f"multiple of {unit} up to 256 .* xla takes any"):
        decide(platform, **args)


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
