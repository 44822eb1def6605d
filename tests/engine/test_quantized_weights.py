"""Engines of quantized checkpoints generate the reference's tokens.

Golden data: tests/golden, made by scripts/make_quantized_golden.py and scripts/make_golden.py.
"""

from pathlib import Path

import numpy as np
import pytest

from sgl_jax.engine.offline import Engine

GOLDEN = Path(__file__).parents[1] / "golden"
QUANTIZED = sorted(f"quantized/{own.name}" for own in (GOLDEN / "quantized").iterdir())
BY_DEFAULT = ("quantized/awq_group32",)
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "float32",  # as the reference, also where the file has scales of 8-bit KV
    "context_length": 128,
    "max_running_requests": 1,
    "max_total_tokens": 256,
    "chunked_prefill_size": 64,
    "warmup": "none",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long)
        for name in (*QUANTIZED, "gpt_oss_mxfp4")
    ],
)
def test_greedy_tokens_are_the_references(name: str) -> None:
    with np.load(GOLDEN / name / "golden.npz") as golden:
        prompt, expected = golden["prompt"].tolist(), golden["greedy"].tolist()
    greedy = {"temperature": 0, "max_new_tokens": len(expected), "ignore_eos": True}
    with Engine(str(GOLDEN / name), **SETTINGS) as engine:
        (answer,) = engine.generate(input_ids=[prompt], sampling_params=greedy, progress=False)
    assert answer.output_ids == expected
