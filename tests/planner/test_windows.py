"""What windows save is said beside what a rank holds."""

import pytest

from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.memory import plan_memory, requests_without_windows
from sgl_jax.planner.topology import has_tpu_compiler

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

LOAD = ["--input-len", "31744", "--output-len", "1024"]  # 32,768 tokens
GEMMA = ["--model-path", "gemma-3-27b", "--topology", "v6e-8", "--tp-size", "8", *LOAD]


@pytest.mark.parametrize(
    ("topology", "tp_size"), [("v5e-32", 32), ("v6e-16", 16), ("v5p-16", 8), ("tpu7x-8", 8)]
)
def test_gpt_oss_120b_runs_far_more_long_requests_than_if_every_layer_kept_all(topology, tp_size):
    words = ["--model-path", "gpt-oss-120b", "--topology", topology, "--tp-size", str(tp_size)]
    request = parse_plan_request([*words, *LOAD])
    full = requests_without_windows(request)
    assert full > 0
    assert plan_memory(request).num_requests >= 1.7 * full


def test_fewer_pages_for_cached_windows_leave_room_for_more_requests():
    default = parse_plan_request(GEMMA)
    small = parse_plan_request([*GEMMA, "--swa-full-tokens-ratio", "0.1"])
    full = requests_without_windows(default)
    assert requests_without_windows(small) == full  # no window, no pool for it
    assert full < plan_memory(default).num_requests < plan_memory(small).num_requests


def test_too_few_pages_for_one_window_are_refused():
    request = parse_plan_request([*GEMMA, "--swa-full-tokens-ratio", "0.001"])
    with pytest.raises(ValueError, match="too few pages for one request"):
        plan_memory(request)


def test_a_model_without_windows_is_compared_with_nothing():
    words = ["--model-path", "qwen3-8b", "--topology", "v6e-4", "--tp-size", "4"]
    assert requests_without_windows(parse_plan_request(words)) is None
