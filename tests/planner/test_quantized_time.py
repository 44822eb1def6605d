"""Quantized products take the time of their bytes, products or conversions."""

import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.placement import place_model
from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.kernel_time import MATRIX_SHARE, VECTOR_RATE, quantized_time
from sgl_jax.planner.quantized_products import (
    QuantizedProduct,
    expert_weight,
    quantized_products,
)
from sgl_jax.planner.topology import CHIPS, topology_mesh

V6E = CHIPS["v6e"]
MI = 2**20


def product(scheme, groups=1):
    """Four layers of 2**23 values."""
    return QuantizedProduct(scheme, 4, 4096, groups, 2048, 8 * MI)


def test_bytes_are_read_once_a_layer():
    found = quantized_time((product(Scheme("int8")),), 1, V6E)
    assert found.hbm_s == pytest.approx(4 * 8 * MI / V6E.hbm_bytes_per_s)
    assert found.total_s == found.hbm_s


@pytest.mark.parametrize(
    ("chip", "activation", "rate"),
    [("v5e", "int8", 2), ("v5e", "fp8", 1), ("tpu7x", "int8", 1), ("tpu7x", "fp8", 2)],
)
def test_8_bits_are_multiplied_at_the_rate_of_the_chip(chip, activation, rate):
    own, chip = product(Scheme(activation, activation=activation)), CHIPS[chip]
    least = 4 * 2 * 2048 * 8 * MI / (MATRIX_SHARE * chip.bf16_flops_per_s)
    assert quantized_time((own,), 2048, chip).mxu_s == pytest.approx(least / rate)
    # And 4 bits as numbers.
    grouped = quantized_time((product(Scheme("int4", 128), 32),), 2048, chip)
    assert grouped.mxu_s == pytest.approx(least)


def test_floats_of_8_bits_are_converted_unless_activations_have_8_bits_too():
    found = quantized_time((product(Scheme("fp8")),), 1, V6E)
    assert found.vector_s == pytest.approx(4 * 8 * MI / VECTOR_RATE / V6E.clock_hz)
    assert quantized_time((product(Scheme("fp8", activation="fp8")),), 1, V6E).vector_s == 0
    assert quantized_time((product(Scheme("fp8")),), 1, CHIPS["tpu7x"]).vector_s == 0


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


def test_experts_are_not_among_the_products():
    in_groups = placed("--model-path", "gpt-oss-120b")
    assert quantized_products(in_groups, 8) == ()
    assert expert_weight(in_groups) == "mxfp4"
    whole = placed("--model-path", "qwen3-30b-a3b", "--quantization", "int8")
    assert expert_weight(whole) == "int8"
    assert expert_weight(placed("--model-path", "llama-3.1-8b", "--quantization", "int8")) is None
