"""Quantized products take the time of their bytes, or of their instructions."""

import pytest

from sgl_jax.core.quantization import Scheme
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.placement import place_model
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.quantized_products import (
    ExpertFormat,
    QuantizedProduct,
    expert_format,
    quantized_products,
)
from sgl_jax.planner.quantized_time import PRODUCT_BUNDLES, conversion_bundles, quantized_time
from sgl_jax.planner.topology import CHIPS, topology_mesh

V6E = CHIPS["v6e"]
BUNDLES = PRODUCT_BUNDLES[V6E.device_kind]
MI = 2**20


def product(scheme, groups=1):
    """Four layers of 2**23 values."""
    return QuantizedProduct(scheme, 4, 4096, groups, 2048, 8 * MI)


def test_bytes_are_read_once_a_layer():
    found = quantized_time((product(Scheme("int8")),), 1, V6E)
    assert found.hbm_s == pytest.approx(4 * 8 * MI / V6E.hbm_bytes_per_s)
    assert found.total_s == max(found.hbm_s, found.instructions_s)


def test_values_are_converted_once_and_multiplied_with_each_token():
    few, many = (
        quantized_time((product(Scheme("int4", 128), 32),), tokens, V6E).instructions_s
        for tokens in (100, 200)
    )
    a_token = (many - few) / 100
    assert few - 100 * a_token == pytest.approx(4 * 8 * BUNDLES.conversion["int4"] / V6E.clock_hz)
    assert a_token == pytest.approx(4 * 8 * BUNDLES.per_token / V6E.clock_hz)


def test_activations_of_8_bits_need_no_conversion():
    found = quantized_time((product(Scheme("int8", activation="int8")),), 2048, V6E)
    second = product(Scheme("int8", activation="int8"))._replace(shares_activations=True)
    multiplied = 4 * 8 * BUNDLES.per_token_as_values["int8"] * 2048 / V6E.clock_hz
    assert quantized_time((second,), 2048, V6E).instructions_s == pytest.approx(multiplied)
    quantized = 4 * 4096 * 2 * BUNDLES.activations / V6E.clock_hz
    assert found.instructions_s == pytest.approx(multiplied + quantized)


@pytest.mark.parametrize(
    ("chip", "activation", "rate"),
    [("v5e", "int8", 2), ("v5e", "fp8", 1), ("tpu7x", "int8", 1), ("tpu7x", "fp8", 2)],
)
def test_no_product_is_faster_than_the_matrix_units(chip, activation, rate):
    own, chip = product(Scheme(activation, activation=activation)), CHIPS[chip]
    least = 4 * 2 * 2048 * 8 * MI / (rate * chip.bf16_flops_per_s)
    assert quantized_time((own,), 2048, chip).instructions_s >= least * (1 - 1e-12)
    # And in four bits as numbers.
    grouped = quantized_time((product(Scheme("int4", 128), 32),), 2048, chip)
    assert grouped.instructions_s >= rate * least * (1 - 1e-12)


def test_products_of_xla_are_in_the_program():
    assert quantized_time((product(Scheme("int8")),), 2048, V6E).total_s == 0


def placed(*words):
    words = ("--topology", "v6e-8", "--tp-size", "8", *words)
    request = parse_plan_request(words)
    mesh = topology_mesh(request.topology, 1, 8)
    options = EngineConfig.resolve(request.args, request.config, "tpu").build_options
    return place_model(request.config, mesh, options)


def test_a_devices_part_of_every_matrix_is_found():
    model = placed("--model-path", "llama-3.3-70b", "--quantization", "int4")
    found = quantized_products(model, 8)
    shapes = sorted((own.inputs, own.groups, own.outputs) for own in found)
    width = 28672 // 8
    assert shapes == sorted(
        [(8192, 64, 1280), (1024, 8, 8192), *[(8192, 64, width)] * 2, (width, width // 128, 8192)]
    )
    assert {own.num_layers for own in found} == {80}
    qkv = next(own for own in found if own.outputs == 1280)
    assert qkv.num_bytes == 8192 * 1280 // 2 + 64 * 1280 * 2


def test_experts_are_converted_in_their_own_kernel():
    in_groups = expert_format(placed("--model-path", "gpt-oss-120b"))
    assert in_groups == ExpertFormat("mxfp4", scales_outputs=False)
    assert quantized_products(placed("--model-path", "gpt-oss-120b"), 8) == ()
    assert conversion_bundles(in_groups, V6E) == BUNDLES.conversion["mxfp4"]
    whole = expert_format(placed("--model-path", "qwen3-30b-a3b", "--quantization", "int8"))
    assert whole == ExpertFormat("int8", scales_outputs=True)
    assert conversion_bundles(whole, V6E) == BUNDLES.unscaled["int8"]
    assert conversion_bundles(None, V6E) == 0
