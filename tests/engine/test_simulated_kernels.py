"""The TPU's attention kernels, simulated on the CPU, serve the same greedy tokens as XLA does."""

from pathlib import Path

import pytest

from sgl_jax.engine.offline import Engine

DEMO = Path(__file__).parents[2] / "models" / "demo"
# More than a page, and more than a chunk; and a single token, which decodes beside that.
PROMPTS = [
    "<|im_start|>user\nThe code of Anna is 471.<|im_end|>\n"
    "<|im_start|>user\nWhat is the code of Anna?<|im_end|>\n<|im_start|>assistant\n",
    "A",
]
SETTINGS = {
    "device": "cpu",
    "page_size": 16,
    "max_total_tokens": 512,
    "max_running_requests": 2,
    "chunked_prefill_size": 32,
    "context_length": 128,
    "check_memory": "busy",
    "memory_error_action": "crash",
    "skip_warmup": True,  # few of the shapes are met
    "compilation_cache_dir": "none",
}


def greedy(backend, **settings):
    """Texts, and the tokens they are made of."""
    with Engine(str(DEMO), attention_backend=backend, **(SETTINGS | settings)) as engine:
        wanted = {"temperature": 0, "max_new_tokens": 4}
        answers = engine.generate(PROMPTS, wanted)
    return [(answer.text, list(answer.output_ids)) for answer in answers]


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"tp_size": 2}, marks=pytest.mark.long)], ids=["one-chip", "tp-2"]
)
def test_simulated_kernels_serve_the_tokens_that_xla_does(settings):
    expected = greedy("xla", **settings)
    assert expected[0][0].startswith("It is")
    assert greedy("pallas", **settings) == expected
