"""How far an 8-bit KV cache is from a float32 one, on the demonstration model."""

import numpy as np
import pytest

from benchmarks.demo_model.kv_cache_accuracy import ask, report


@pytest.mark.long
def test_eight_bits_change_log_probabilities_little_and_answers_not_at_all() -> None:
    exact = ask("models/demo", 4, seed=2, kv_cache_dtype="float32")
    narrow = ask("models/demo", 4, seed=2, kv_cache_dtype="fp8_e4m3")
    change = np.abs(narrow.prompt_logprobs - exact.prompt_logprobs)
    print(report("fp8_e4m3", narrow, exact))
    assert narrow.prompt_logprobs.shape == exact.prompt_logprobs.shape
    assert 1e-4 < change.mean() < 0.02  # it is narrower, and no more than that
    assert narrow.output_ids == exact.output_ids
