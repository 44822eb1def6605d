"""Quantized checkpoints arrive whole on any mesh, in any format, or every problem is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.kernels.quantized_matmul.numbers import dequantized
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model
from tests.checkpoint.quantized_folder import QUANTIZED, changed_copy, read_tensors
from tests.support.long import long

PARTS = ("values", "scales")
FLOATS = QUANTIZED.parent / "qwen3"


def load(folder, *, dp=1, tp=1, quantization="none", load_format=None, **options):
    """With several ranks, each has its part of a layer."""
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "tensor"))
    config = ModelConfig.from_path(folder).quantized(quantization)
    placed = place_model(config, mesh, BuildOptions(jnp.float32, shards_weights=dp > 1))
    return flatten_mapping(
        load_params(placed, folder, load_format or detect_format(folder), **options)
    )


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        assert actual[path].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(actual[path]), np.asarray(array), str(path))


UP = "model.layers.1.mlp.up_proj"
Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "change", "words"),
    [
        ("ct_int8_mixed", f"{UP}.weight_scale", None, "up_proj.weight_scale is missing"),
        (
            "ct_int8_weight_only",
            f"{UP}.weight_scale",
            lambda own: own[:7],
            r"up_proj.weight_scale has shape \[7, 1\] instead of \[192, 1\]",
        ),
        (
            "fp8_block",
            f"{UP}.weight_scale_inv",
            lambda own: own[:1],
            r"weight_scale_inv has shape \[1, 2\] instead of \[3, 2\]",
        ),
        ("ct_int8_weight_only", f"{UP}.weight_scale", lambda own: own * np.nan, "weight_scale' in"),
        ("ct_int4_group32", f"{UP}.weight_scale", lambda own: own * np.inf, "no finite numbers"),
        ("fp8_block", f"{UP}.weight_scale_inv", lambda own: own * np.nan, "no finite numbers"),
        (
            "ct_fp8_static",
            f"{UP}.weight",
            lambda own: np.where(own > 0, own.dtype.type(np.nan), own),
            "up_proj.weight' in .* no finite numbers",
        ),
        (
            "ct_int8_weight_only",
            f"{UP}.weight",
            lambda own: own.astype(np.float32),
            "up_proj.weight' has type F32; supported: I8",
        ),
        (
            "ct_int8_weight_only",
            f"{UP}.weight_scale",
            lambda own: own.astype(np.int32),
            "weight_scale' has type I32; supported: BF16, F16, F32",
        ),
        (
            "awq_group32",
            f"{UP}.qweight",
            lambda own: own.astype(np.int64),
            "qweight' has type I64; supported: I32",
        ),
        (
            "gptq_act_order_group32",
            f"{UP}.g_idx",
            lambda own: own * 0,
            "g_idx does not deal its inputs into groups of 32",
        ),
        (
            "gptq_act_order_group32",
            f"{Q}.g_idx",
            lambda own: own[::-1],
            "q_proj.weight and .*k_proj.weight make one matrix: they need the same order",
        ),
        ("gptq_group32", f"{UP}.qzeros", lambda own: own * 0, "zero points other than 8"),
        (
            "ct_int4_group32",
            f"{UP}.bias",
            lambda own: np.zeros(192, np.float32),
            "bias is unexpected",
        ),
        (
            "gptq_group32",
            f"{UP}.bias",
            lambda own: np.eye(1, 192, dtype=np.float16)[0],
            "up_proj.bias is unexpected",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_its_scheme_is_named_in_one_line(
    name, tensor, change, words, tmp_path
):
    found = read_tensors(QUANTIZED / name).get(tensor)
    changed = None if change is None else change(found)
    folder = changed_copy(tmp_path / name, name, {tensor: changed})
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["ct_int4_group32", "ct_fp8_static", "ct_int8_mixed", "gptq_act_order_group32"]
)
def test_a_converted_checkpoint_is_the_same_on_any_mesh(name, tmp_path):
    convert(QUANTIZED / name, tmp_path / "orbax", "float32")
    assert_same(load(tmp_path / "orbax", tp=2), load(QUANTIZED / name, tp=2))


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_floats_quantized_at_load_may_be_converted_first(quantization, tmp_path):
    convert(FLOATS, tmp_path / "orbax", "float32", quantization)
    whole = load(FLOATS, quantization=quantization)
    assert_same(load(tmp_path / "orbax", quantization=quantization), whole)
    if quantization != "int4":  # whose groups of 128 inputs are cut to the 64 of a chip
        assert_same(load(FLOATS, tp=2, quantization=quantization), whole)
    other = "fp8" if quantization == "int8" else "int8"
    for wrong in (other, "none"):
        with pytest.raises(CheckpointError, match=r"another --quantization|do not match"):
            load(tmp_path / "orbax", quantization=wrong)


def test_biases_of_zeros_beside_gptqs_matrices_are_left_out(tmp_path):
    biases = {f"{UP}.bias": np.zeros(192, np.float16), f"{Q}.bias": np.zeros(128, np.float16)}
    folder = changed_copy(tmp_path / "own", "gptq_group32", biases)
    assert_same(load(folder), load(QUANTIZED / "gptq_group32"))


@pytest.mark.parametrize("name", ["ct_int4_group32", *long("ct_int8_dynamic", "fp8_block")])
def test_dummies_are_as_large_as_those_of_floats(name):
    config = ModelConfig.from_path(QUANTIZED / name)
    params = load(QUANTIZED / name, load_format="dummy")
    values, scales = (params["layers", "0", "mlp", "up", "weight", own] for own in PARTS)
    weight = config.layers[0].rules.of("mlp.up_proj").scheme.weight
    numbers = dequantized(values, scales, None, weight, jnp.float32)
    assert 0.7 < float(numbers.std()) / config.initializer_range < 1.4


@pytest.mark.parametrize(
    ("name", "quantization"), [("deepseek_v3", "int8"), ("quantized/latent_fp8_block", "none")]
)
def test_scales_of_latents_may_be_cut_over_ranks(name, quantization):
    """Few groups of inputs cannot be cut, so outputs are, within heads."""
    folder = QUANTIZED.parent / name
    expected = load(folder, quantization=quantization)
    assert_same(load(folder, dp=4, quantization=quantization), expected)


def test_matrices_of_layers_are_stored_by_rows_and_others_as_the_compiler_likes():
    folder = FLOATS.parent / "gpt_oss_mxfp4"
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(ModelConfig.from_path(folder), mesh, BuildOptions(jnp.float32))
    layouts = {path: own.array.format.layout for path, own in placed.declared.items()}
    by_rows = {path for path, layout in layouts.items() if layout is not None}
    assert {path[-1] for path in by_rows} == {"values", "scales", "weight", "bias"}
    assert {path[-1] for path in layouts.keys() - by_rows} >= {"weight"}  # of norms
    for path in by_rows:
        assert layouts[path].major_to_minor == tuple(range(placed.declared[path].array.ndim))
    expected = flatten_mapping(load_params(placed, folder, "safetensors"))

    # As on a TPU, where the layout of an array that arrives is another.
    for path in by_rows:
        own = placed.declared[path]
        order = tuple(reversed(range(own.array.ndim)))
        layout = Format(Layout(order), own.array.sharding)
        placed.declared[path] = own._replace(array=own.array.update(sharding=layout))
    params = flatten_mapping(load_params(placed, folder, "safetensors"))
    assert_same(params, expected)
    for path in by_rows:
        order = tuple(range(params[path].ndim))
        assert params[path].format.layout.major_to_minor == order[::-1]
        assert expected[path].format.layout.major_to_minor == order
