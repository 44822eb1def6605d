"""The rule for which layers can run with columns of the hidden states on each chip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.layers.hidden_columns import are_supported
from sgl_jax.layers.mesh_axes import scatter_sum
from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.registry import build_model
from sgl_jax.planner.arguments import read_config


def has_columns(config, **settings):
    options = BuildOptions(jnp.bfloat16, splits_hidden=True, **settings)
    config = dataclasses.replace(config, layers=config.layers[:6])
    return build_model(config, options).has_columns


@pytest.mark.parametrize(
    ("model", "tp_size"),
    [("llama-3.3-70b", 8), ("qwen3-32b", 8), ("qwen3-8b", 4), ("qwen3-30b-a3b", 4)],
)
@pytest.mark.parametrize("scheme", [None, "int8", "fp8", "w8a8_int8", "w8a8_fp8"])
def test_models_of_floats_or_8_bit_weights_have_columns(model, tp_size, scheme):
    config = read_config(model).quantized(scheme)
    ring = BuildOptions(jnp.bfloat16).ring_products._replace(multiple=128)
    assert has_columns(config, tp_size=tp_size, ring_products=ring)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("qwen3-32b", "int4"),  # scales of groups
        ("gemma-3-27b", None),  # normalises the terms that it adds
        ("gpt-oss-20b", None),  # adds biases to the sums
        ("qwen3-next-80b-a3b", None),  # a recurrence
    ],
)
def test_others_have_none(model, scheme):
    assert not has_columns(read_config(model).quantized(scheme), tp_size=2)


def test_matrices_of_two_formats_are_not_multiplied_at_once():
    config = dataclasses.replace(read_config("qwen3-8b"), layers=read_config("qwen3-8b").layers[:1])
    plain, quantized = (
        build_model(config.quantized(scheme), BuildOptions(jnp.bfloat16)).layers["0"].mlp
        for scheme in (None, "int8")
    )
    assert are_supported((quantized.gate, quantized.up), 2, 128)
    assert not are_supported((quantized.gate, plain.up), 2, 128)


@pytest.mark.parametrize("num_chips", [1, 2, 4])
def test_each_chip_has_its_columns_of_the_sum(num_chips):
    mesh = Mesh(np.array(jax.devices()[:num_chips]).reshape(1, -1), ("data", "tensor"))
    parts = jnp.arange(num_chips * 3.0 * 8).reshape(num_chips * 3, 8)
    run = jax.shard_map(
        scatter_sum, mesh=mesh, in_specs=P("tensor"), out_specs=P(None, "tensor"), check_vma=False
    )
    np.testing.assert_array_equal(run(parts), parts.reshape(num_chips, 3, 8).sum(0))


def test_a_chips_columns_must_be_whole_rows_of_lanes():
    ring = BuildOptions(jnp.bfloat16).ring_products._replace(multiple=128)
    config = dataclasses.replace(read_config("qwen3-8b"), hidden_size=4096 + 256)
    assert has_columns(config, tp_size=2, ring_products=ring)
    assert not has_columns(config, tp_size=4, ring_products=ring)
