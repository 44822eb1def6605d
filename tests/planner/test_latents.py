"""Models with latents on slices: the requests that fit, and the time of their attention."""

import pytest

from sgl_jax.planner.arguments import parse_plan_request, read_config
from sgl_jax.planner.kernel_time import (
    CHOSEN_CYCLES,
    MATRIX_SHARE,
    DeviceBytes,
    StepWork,
    attention_time,
)
from sgl_jax.planner.memory import plan_memory, requests_with_heads
from sgl_jax.planner.topology import CHIPS, has_tpu_compiler

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


@pytest.mark.parametrize(("tokens", "products"), [(256, 2 * 512 + 64), (2048, 192 + 128 + 128)])
def test_long_steps_prefill_in_the_expanded_form(tokens, products):
    """Absorbed queries meet latents; expanded ones meet keys and values computed from latents."""
    work = StepWork(tokens, 4096, tokens * 4096)
    device = DeviceBytes(0, 0, 0, 2, 61 * 1280, tp_size=8)
    time = attention_time(work, read_config("deepseek-v3"), device, CHIPS["v5e"])
    flops = tokens * 4096 * 16 * 61 * 2 * products
    assert time.mxu_s == pytest.approx(flops / (MATRIX_SHARE * 197e12))
    assert time.bound == "MXU"


def test_decode_of_few_heads_waits_for_memory_and_of_many_for_the_matrix_units():
    work = StepWork(64, 64 * 4096, 64 * 4096, 64, is_prefill=False)

    def bound(tp_size):
        device = DeviceBytes(0, 0, 0, 2, 61 * 1280, tp_size=tp_size)
        return attention_time(work, read_config("deepseek-v3"), device, CHIPS["v5p"]).bound

    assert (bound(8), bound(1)) == ("HBM", "MXU")


def test_decode_of_chosen_tokens_reads_a_share_of_the_keys_and_some_latents():
    context, rows, sizes = 65536, 8, read_config("deepseek-v3.2")
    work = StepWork(rows, rows * context, rows * context, rows, is_prefill=False)
    device = DeviceBytes(0, 0, 0, 2, 61 * (640 + 128) * 2, tp_size=8)
    time = attention_time(work, sizes, device, CHIPS["v6e"])
    token_bytes = 256 * context / 8 + 1536 * 2048 / 8
    seconds = rows * 61 * token_bytes / CHIPS["v6e"].hbm_bytes_per_s
    assert time.hbm_s == pytest.approx(seconds)
    assert time.vector_s >= rows / 8 * 61 * 2048 * CHOSEN_CYCLES / CHIPS["v6e"].clock_hz
    short = StepWork(rows, rows * 2048, rows * 2048, rows, is_prefill=False)
    dense = rows * 2048 * device.kv_token_bytes / CHIPS["v6e"].hbm_bytes_per_s
    assert attention_time(short, sizes, device, CHIPS["v6e"]).hbm_s == pytest.approx(dense)


def test_layers_that_reuse_a_choice_read_no_keys():
    context, work = 131072, StepWork(1, 131072, 131072, 1, is_prefill=False)
    device = DeviceBytes(0, 0, 0, 2, 78 * (640 + 128) * 2, tp_size=1)
    times = [
        attention_time(work, read_config(f"glm-{n}"), device, CHIPS["v6e"]) for n in ("5", "5.2")
    ]
    all_bytes, some_bytes = (own.hbm_s * CHIPS["v6e"].hbm_bytes_per_s for own in times)
    assert all_bytes == pytest.approx(78 * (256 * context + 1536 * 2048))
    assert some_bytes == pytest.approx(21 * 256 * context + 78 * 1536 * 2048)


def test_rows_with_keys_of_an_indexer_are_a_fifth_wider():
    dense, sparse = (
        plan_memory(plan_request(model, "tpu7x-32", 32))
        for model in ("deepseek-v3", "deepseek-v3.2")
    )
    assert sparse.kv_token_bytes * 5 == dense.kv_token_bytes * 6
