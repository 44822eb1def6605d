"""Layers with a recurrence: what their states take, and the time to move them."""

import math

import pytest

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.layers.parameter import declarations
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.registry import build_model
from sgl_jax.planner.arguments import parse_plan_request, read_config
from sgl_jax.planner.kernel_time import VECTOR_RATE, DeviceBytes, StepWork
from sgl_jax.planner.memory import plan_memory
from sgl_jax.planner.program_cost import ProgramCost
from sgl_jax.planner.step_time import estimate_step
from sgl_jax.planner.topology import CHIPS, has_tpu_compiler

CHIP = CHIPS["v6e"]
NEXT = read_config("qwen3-next-80b-a3b")
STATE_BYTES = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # float32, and bfloat16 activations
NO_CYCLES = ProgramCost(0, 0, 0, 0, 0, 0, (), ())


def device(tp_size=1):
    return DeviceBytes(0, 0, 0, 2, 0, tp_size, state_bytes=STATE_BYTES // tp_size)


def num_parameters(name):
    model = build_model(read_config(name), BuildOptions("bfloat16"))
    return sum(math.prod(own.array.shape) for own in declarations(model).values())


def test_a_published_hybrid_has_as_many_parameters_as_its_name_says():
    hidden = 2048
    # q, k, v, gate and output; q, k, v, output gate and output, gates, convolution, rates.
    attention = hidden * (16 + 2 * 2 + 16) * 256 + 16 * 256 * hidden + 2 * 256
    delta_net = hidden * (2 * 2048 + 2 * 4096) + 4096 * hidden + hidden * 64 + 4 * 8192 + 64 + 128
    experts = 3 * hidden * 512 * (512 + 1) + hidden * (512 + 1)
    layers = 12 * attention + 36 * delta_net + 48 * (experts + 2 * hidden)
    assert num_parameters("qwen3-next-80b-a3b") == layers + 2 * 151936 * hidden + hidden
    assert num_parameters("qwen3.5-35b-a3b") == pytest.approx(34.7e9, rel=0.01)
    assert num_parameters("qwen3.5-27b") == pytest.approx(26.9e9, rel=0.01)


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed")
def test_the_states_of_rows_and_snapshots_have_their_share_of_the_memory():
    words = ["--model-path", "qwen3-next-80b-a3b", "--topology", "v6e-8", "--tp-size", "8"]
    words += ["--input-len", "4096", "--max-running-requests", "32"]
    memory = plan_memory(parse_plan_request(words))
    snapshots = memory.pool_pages[-1]
    assert snapshots > 0
    # The null slots of the pool and of the rows, and two slots of each row.
    assert memory.state_bytes == (snapshots + 1 + 2 * (32 + 1)) * STATE_BYTES // 8
    assert memory.kv_token_bytes == 12 * 2 * 256 * 2  # K and V of a head, copied to each device
    pages = memory.pool_pages[0] + 1
    assert memory.kv_bytes == pages * memory.page_size * memory.kv_token_bytes
    used = memory.weight_bytes + memory.table_bytes + memory.kv_bytes + memory.state_bytes
    assert 0.95 < (used + memory.reserved_bytes) / memory.usable_hbm_bytes <= 1.0


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed")
def test_latents_and_states_share_the_memory():
    words = ["--model-path", "kimi-linear-48b-a3b", "--topology", "v6e-8", "--tp-size", "8"]
    memory = plan_memory(parse_plan_request([*words, "--max-running-requests", "32"]))
    states = 20 * (32 * 128 * 128 * 4 + 3 * 12288 * 2)
    assert memory.state_bytes == (memory.pool_pages[-1] + 1 + 2 * (32 + 1)) * states // 8
    assert memory.kv_token_bytes == 7 * 640 * 2  # a latent on each chip
    used = memory.weight_bytes + memory.table_bytes + memory.kv_bytes + memory.state_bytes
    assert 0.95 < (used + memory.reserved_bytes) / memory.usable_hbm_bytes <= 1.0
    assert num_parameters("kimi-linear-48b-a3b") == pytest.approx(49.1e9, rel=0.01)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_decode_step_reads_each_rows_state_and_writes_another(tp_size):
    work = StepWork(8, 0, 0, rows=8, is_prefill=False)
    time = estimate_step(NO_CYCLES, 8, work, NEXT, device(tp_size), CHIP)
    assert time.recurrences_s == pytest.approx(2 * 8 * STATE_BYTES / tp_size / 1640e9)


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_a_prefill_chunk_computes_the_chunks_of_each_head(tp_size):
    time = estimate_step(NO_CYCLES, 2048, StepWork(2048, 0, 0, rows=1), NEXT, device(tp_size), CHIP)
    numbers = 36 * 2048 * 32 / tp_size * CHUNK_TOKENS / 2 * 128
    assert time.recurrences_s == pytest.approx(numbers / VECTOR_RATE / CHIP.clock_hz)


def test_only_layers_with_attention_wait_for_it():
    work = StepWork(2048, 0, 2048 * 512)
    hybrid = estimate_step(NO_CYCLES, 2048, work, NEXT, device(), CHIP)
    dense = estimate_step(NO_CYCLES, 2048, work, read_config("qwen3-8b"), device(), CHIP)
    # The scores of 12 layers of 16 heads, and of 36 layers of 32 heads.
    assert hybrid.attention_s / dense.attention_s == pytest.approx(12 * 16 / (36 * 32))
    assert dense.recurrences_s == 0
