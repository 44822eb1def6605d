"""How far narrower numbers are from float32, on the demonstration model."""

from typing import Any

import numpy as np
import pytest

from benchmarks.demo_model.precision import ask, report


@pytest.mark.long
@pytest.mark.parametrize(
    "formats", [{"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "int8"}], ids=str
)
def test_eight_bits_change_log_probabilities_little_and_answers_not_at_all(
    formats: dict[str, Any],
) -> None:
    exact = ask("models/demo", 4, seed=2)
    narrow = ask("models/demo", 4, seed=2, **formats)
    change = np.abs(narrow.question_logprobs - exact.question_logprobs)
    print(report("8 bits", narrow, exact))
    assert narrow.question_logprobs.shape == exact.question_logprobs.shape
    assert 1e-4 < change.mean() < 0.02  # it is narrower, and no more than that
    assert narrow.output_ids == exact.output_ids
