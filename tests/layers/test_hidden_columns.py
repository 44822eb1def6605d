"""The rule for which layers can run with columns of the hidden states on each chip."""

import dataclasses

import jax.numpy as jnp
import pytest

from sgl_jax.models.decoder import BuildOptions
from sgl_jax.models.registry import build_model
from sgl_jax.planner.arguments import read_config


def has_columns(config, **settings):
    options = BuildOptions(jnp.bfloat16, splits_hidden=True, **settings)
    config = dataclasses.replace(config, layers=config.layers[:6])
    return build_model(config, options).has_columns


@pytest.mark.parametrize(
    ("model", "tp_size"), [("llama-3.3-70b", 8), ("qwen3-32b", 8), ("qwen3-8b", 4)]
)
@pytest.mark.parametrize("scheme", [None, "int8", "fp8", "w8a8_int8", "w8a8_fp8"])
def test_dense_models_of_floats_or_8_bit_weights_have_columns(model, tp_size, scheme):
    config = read_config(model).quantized(scheme)
    ring = BuildOptions(jnp.bfloat16).ring_products._replace(multiple=128)
    assert has_columns(config, tp_size=tp_size, ring_products=ring)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("qwen3-32b", "int4"),  # scales of groups
        ("gemma-3-27b", None),  # normalises the terms that it adds
        ("qwen3-30b-a3b", None),  # experts
        ("gpt-oss-20b", None),
        ("qwen3-next-80b-a3b", None),  # a recurrence
    ],
)
def test_others_have_none(model, scheme):
    assert not has_columns(read_config(model).quantized(scheme), tp_size=2)


def test_a_chips_columns_must_be_whole_rows_of_lanes():
    ring = BuildOptions(jnp.bfloat16).ring_products._replace(multiple=128)
    config = dataclasses.replace(read_config("qwen3-8b"), hidden_size=4096 + 256)
    assert has_columns(config, tp_size=2, ring_products=ring)
    assert not has_columns(config, tp_size=4, ring_products=ring)
