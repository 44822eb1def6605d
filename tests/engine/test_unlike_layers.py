"""A model whose layers are not all of one kind is served: the tokens of its golden data."""

from pathlib import Path

import numpy as np
import pytest

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.offline import Engine

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_moe_mixed"


@pytest.mark.parametrize("settings", [{}, {"tp_size": 2}, {"dp_size": 2, "page_size": 1}], ids=str)
def test_dense_layers_among_sparse_ones_are_served(settings):
    data = np.load(FOLDER / "golden.npz")
    prompt, expected = data["prompt"].tolist(), data["greedy"].tolist()
    with Engine(
        str(FOLDER),
        device="cpu",
        max_running_requests=4,
        max_total_tokens=512,
        chunked_prefill_size=32,
        skip_warmup=True,
        check_memory="busy",
        **settings,
    ) as engine:
        greedy = SamplingParams(temperature=0.0, max_new_tokens=len(expected), ignore_eos=True)
        prompts = [prompt, prompt + expected[:3]]
        answers = engine.generate(input_ids=prompts, sampling_params=greedy)
    assert answers[0].output_ids == expected
    assert answers[1].output_ids[: len(expected) - 3] == expected[3:]
