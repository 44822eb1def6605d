"""What an engine decides, and refuses, before anything is loaded."""

import dataclasses

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.kernels.row_blocks import TPU_BLOCK_ROWS, RowBlocks
from sgl_jax.models.quantization import QuantizationConfig
from sgl_jax.models.served import served_config
from sgl_jax.planner.arguments import read_config
from tests.models.golden_server import GOLDEN

LLAMA = read_config("llama-3.1-8b")


def resolve(platform, **args):
    return EngineConfig.resolve(ServerArgs(**args), LLAMA, platform)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match=r"--context-length 200000 exceeds .* of 131072"):
        resolve("cpu", context_length=200_000)


@pytest.mark.parametrize(
    ("platform", "args", "least"),
    [
        ("tpu", {"page_size": 8}, 16),
        ("tpu", {"page_size": 1, "kv_cache_dtype": "float32"}, 8),
        ("cpu", {"page_size": 4, "attention_backend": "pallas"}, 8),
        ("tpu", {"page_size": 512}, 16),
        ("tpu", {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"}, 32),
    ],
)
def test_pages_that_a_tpu_cannot_move_are_refused_with_the_way_out(platform, args, least):
    with pytest.raises(ValueError, match=f"one of {least}, .*, 256 with .* xla takes any"):
        resolve(platform, **args)


def test_a_request_of_too_many_pages_for_scalar_memory_is_refused_with_the_way_out():
    config = dataclasses.replace(LLAMA, max_position_embeddings=1 << 20)
    with pytest.raises(ValueError, match=r"65536 pages of 16 .* larger --page-size"):
        EngineConfig.resolve(ServerArgs(page_size=16), config, "tpu")
    assert EngineConfig.resolve(ServerArgs(page_size=32), config, "tpu").pages_per_row == 32_768
    assert EngineConfig.resolve(ServerArgs(page_size=16), config, "cpu").pages_per_row == 65_536


def resolve_gemma(family, **settings):
    path = str(GOLDEN / "vision" / family)
    args = ServerArgs(model_path=path, enable_multimodal=True, **settings)
    return EngineConfig.resolve(args, served_config(read_config(path), args), "tpu")


def test_more_images_of_rows_than_scalar_memory_holds_are_refused_with_the_way_out():
    given = {"page_size": 16, "max_running_requests": 256}
    with pytest.raises(ValueError, match=r"32768 .* --max-images-per-request 129 .* 33024"):
        resolve_gemma("gemma3", max_images_per_request=129, **given)
    assert resolve_gemma("gemma3", max_images_per_request=128, **given).images.max_images == 128
    resolve_gemma("gemma3", max_images_per_request=129, attention_backend="xla", **given)
    resolve_gemma("gemma4", max_images_per_request=1024, **given)  # no layer sees images whole


@pytest.mark.parametrize(("chunk_tokens", "is_told"), [(8, True), (16, False)])
def test_images_resized_to_the_tokens_of_a_step_are_warned_of(chunk_tokens, is_told):
    config = resolve_gemma("gemma4_moe", page_size=16, chunked_prefill_size=chunk_tokens)
    texts = config.warnings(config.sizes((100, 100)))
    told = "images are resized to 8 tokens, --chunked-prefill-size, instead of 12"
    assert any(told in text for text in texts) == is_told


def test_xla_takes_any_page():
    assert resolve("tpu", page_size=1, attention_backend="xla").pool_layouts[0].page_size == 1
    assert resolve("cpu", page_size=1).pool_layouts[0].page_size == 1


def test_deterministic_inference_on_a_tpu_needs_its_kernels():
    given = {"enable_deterministic_inference": True}
    config = resolve("tpu", **given)
    assert config.args.attention_backend == "pallas"
    assert config.row_blocks.num_rows == TPU_BLOCK_ROWS
    assert config.row_blocks.multiply is not None
    assert resolve("cpu", **given).row_blocks == RowBlocks()
    assert resolve("cpu").row_blocks is None
    with pytest.raises(ValueError, match="needs --attention-backend pallas, not xla"):
        resolve("tpu", **given, attention_backend="xla")


def test_a_cache_of_8_bits_takes_half_the_bytes_of_bfloat16():
    wide, narrow = (
        resolve("tpu", page_size=32, kv_cache_dtype=name).pool_layouts[0]
        for name in ("bfloat16", "fp8_e4m3")
    )
    assert narrow.dtype == "int8"
    assert 2 * narrow.page_bytes == wide.page_bytes


@pytest.mark.parametrize(
    ("platform", "wanted"),
    [
        ("cpu", ("float32", "float32", "xla", 16, 32, 512)),
        ("gpu", ("bfloat16", "bfloat16", "xla", 16, 256, 2048)),
        ("tpu", ("bfloat16", "bfloat16", "pallas", 128, 256, 2048)),
    ],
)
def test_what_is_left_to_decide_depends_on_the_platform(platform, wanted):
    args = resolve(platform).args
    assert wanted == (
        args.dtype,
        args.kv_cache_dtype,
        args.attention_backend,
        args.page_size,
        args.max_running_requests,
        args.chunked_prefill_size,
    )
    assert (args.device, args.context_length) == (platform, LLAMA.max_position_embeddings)


def test_a_limit_below_the_page_that_is_chosen_is_refused():
    assert resolve("cpu", max_total_tokens=64).pool_layouts[0].page_size == 16
    with pytest.raises(ValueError, match="at least one page of 128 tokens, got 64"):
        resolve("tpu", max_total_tokens=64)
    assert resolve("tpu", max_total_tokens=64, page_size=64).pool_layouts[0].page_size == 64


def test_what_was_asked_for_stays():
    asked = {"dtype": "bfloat16", "max_running_requests": 7, "context_length": 1000}
    config = resolve("cpu", kv_cache_dtype="fp8_e4m3", **asked)
    assert {name: getattr(config.args, name) for name in asked} == asked
    assert config.args.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("args", "dtype", "has_scales"),
    [
        ({}, "fp8_e4m3", True),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3", True),
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16", False),
    ],
    ids=str,
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_checkpoints_kv_scales_choose_a_cache_of_8_bits(platform, args, dtype, has_scales):
    quantization = QuantizationConfig((), has_kv_scales=True)
    model = dataclasses.replace(LLAMA, quantization=quantization)
    config = EngineConfig.resolve(ServerArgs(**args), model, platform)
    assert config.args.kv_cache_dtype == dtype
    assert config.build_options.has_kv_scales == has_scales
    assert not any("as they are" in text for text in config.warnings(config.sizes((100,))))


def test_what_was_decided_is_told_and_nothing_else():
    decided = resolve("cpu", dtype="float32").decided(ServerArgs(dtype="float32"))
    assert decided == {
        "device": "cpu",
        "kv_cache_dtype": "float32",
        "context_length": LLAMA.max_position_embeddings,
        "attention_backend": "xla",
        "page_size": 16,
        "max_running_requests": 32,
        "chunked_prefill_size": 512,
        "warmup": "staged",
    }


def test_hosts_of_a_group_start_with_all_programs_of_steps():
    hosts = {"nnodes": 2, "node_rank": 0, "dist_init_addr": "10.0.0.1:5000", "tp_size": 2}
    assert resolve("tpu", **hosts).args.warmup == "plain"
    with pytest.raises(ValueError, match=r"staged is for one host; .* with --nnodes 2"):
        resolve("tpu", warmup="staged", **hosts)


def test_a_resolved_config_is_resolved_to_itself():
    config = resolve("tpu")
    assert EngineConfig.resolve(config.args, LLAMA, "tpu") == config


@pytest.mark.parametrize(
    ("platform", "tp_size", "loop"),
    [("cpu", 2, (1, False)), ("tpu", 1, (4, False)), ("tpu", 4, (4, True))],
)
def test_a_tpu_runs_several_layers_in_a_turn(platform, tp_size, loop):
    options = resolve(platform, tp_size=tp_size).build_options
    assert (options.unrolled_layers, options.defers_sum) == loop


def test_a_gpu_is_told_that_it_has_no_kernel():
    with pytest.raises(ValueError, match="on a gpu choose xla"):
        resolve("gpu", attention_backend="pallas")


def test_few_snapshots_and_long_pages_are_warned_of():
    model = read_config("qwen3-next-80b-a3b")

    def warnings(num_snapshots, **args):
        config = EngineConfig.resolve(ServerArgs(max_running_requests=8, **args), model, "cpu")
        return config.warnings(config.sizes((10_000, 1 + num_snapshots)))

    assert warnings(8, page_size=64) == []
    (text,) = warnings(7, page_size=64)
    assert "keeps 7 states, fewer than the 8 requests" in text
    (text,) = warnings(8, page_size=128)
    assert "no prompt below 128 tokens" in text
    assert warnings(1, page_size=128, disable_radix_cache=True) == []


@pytest.mark.parametrize(
    ("args", "model", "expected"),
    [
        ({"num_decode_steps": "8"}, "llama-3.1-8b", 8),
        ({"num_decode_steps": "8", "warmup": "none"}, "llama-3.1-8b", 8),
        ({"num_decode_steps": "auto"}, "llama-3.1-8b", 16),
        ({}, "llama-3.1-8b", 1),
        # No program would be there without a wait for it.
        ({"num_decode_steps": "auto", "warmup": "none"}, "llama-3.1-8b", 1),
        ({"num_decode_steps": "8", "speculative_algorithm": "NGRAM"}, "llama-3.1-8b", 1),
        ({"num_decode_steps": "8", "nnodes": 2, "dp_size": 2}, "llama-3.1-8b", 1),
        ({"num_decode_steps": "8"}, "qwen3-next-80b-a3b", 1),
    ],
    ids=str,
)
def test_a_launch_has_several_decode_steps_only_where_it_may(args, model, expected):
    config = EngineConfig.resolve(ServerArgs(**args), read_config(model), "tpu")
    assert config.max_decode_steps == config.sizes((100, 100)).max_decode_steps == expected
