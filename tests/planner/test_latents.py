"""Models with latents on slices: the requests that fit, and the time of their attention."""

import pytest

from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.kernel_time import DeviceBytes, attention_time
from sgl_jax.planner.memory import plan_memory, requests_with_heads
from sgl_jax.planner.step_work import StepWork
from sgl_jax.planner.topology import has_tpu_compiler

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

LOAD = ["--input-len", "31744", "--output-len", "1024"]  # 32,768 tokens


def plan_request(model, topology, dp_size, tp_size=1, load=LOAD):
    sizes = {"dp": dp_size, "tp": tp_size, "ep": dp_size * tp_size}
    words = [word for name, size in sizes.items() for word in (f"--{name}-size", str(size))]
    return parse_plan_request(["--model-path", model, "--topology", topology, *words, *load])


@pytest.mark.parametrize(
    ("topology", "dp_size", "tp_size", "num_requests"),
    [("tpu7x-16", 16, 1, 9), ("tpu7x-32", 32, 1, 17), ("v6e-64", 8, 8, 5)],
)
def test_deepseek_v3_in_fp8_holds_long_requests(topology, dp_size, tp_size, num_requests):
    request = plan_request("deepseek-v3", topology, dp_size, tp_size)
    memory = plan_memory(request)
    assert memory.num_requests == num_requests
    assert requests_with_heads(request, memory) == 0


def test_latents_hold_eight_times_the_requests_of_heads():
    request = plan_request("deepseek-v2-lite", "v6e-4", 4)
    memory = plan_memory(request)
    assert memory.num_requests >= 8 * requests_with_heads(request, memory) > 0


def test_a_rank_of_more_chips_keeps_each_latent_on_all_of_them():
    one, two = (plan_request("deepseek-v2-lite", "v6e-4", 4 // tp, tp) for tp in (1, 2))
    assert plan_memory(one).kv_token_bytes == plan_memory(two).kv_token_bytes


def test_models_with_heads_are_compared_with_nothing():
    words = ["--model-path", "qwen3-8b", "--topology", "v6e-4", "--tp-size", "4"]
    request = parse_plan_request(words)
    assert requests_with_heads(request, plan_memory(request)) is None


def test_decode_of_many_heads_is_bound_by_the_matrix_unit():
    """16 heads read their latents, 128 multiply with them."""

    def bound(model, topology):
        request = plan_request(model, topology, int(topology.split("-")[1]))
        memory = plan_memory(request)
        device = DeviceBytes(0, 0, 0, 2, memory.kv_token_bytes, 2, tp_size=1)
        work = StepWork(64, 64 * 4096, 64 * 4096, 64, is_prefill=False)
        return attention_time(work, request.config, device, request.topology.chip).bound

    assert bound("deepseek-v2-lite", "v6e-4") == "HBM"
    assert bound("deepseek-v3", "tpu7x-16") == "MXU"
