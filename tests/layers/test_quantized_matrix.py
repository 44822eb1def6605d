"""Products with quantized matrices on two chips, by inputs and outputs, in any order of inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul.interface import blocked_grouped_matmul
from sgl_jax.kernels.quantized_matmul.xla import xla_quantized_matmul
from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.quantized_matrix import Quantized
from sgl_jax.layers.sources import Tensor
from tests.kernels.quantized_matmul.problems import draw, numbers, rounded
from tests.layers.modules import declared_shapes, declared_specs

INPUTS, OUTPUTS, TOKENS = 128, 24, 5
X = np.random.default_rng(3).normal(size=(TOKENS, INPUTS)).astype(np.float32)


def linear(scheme, split, tp, inputs=INPUTS):
    source = Tensor("w.weight", (inputs, OUTPUTS), transposed=True)
    quantized = Quantized(scheme, xla_quantized_matmul, tp)
    return Linear(source, jnp.float32, split, quantized=quantized)


def product(scheme, split, tp, order=None):
    """X times a drawn matrix on `tp` chips, and the matrix in float64."""
    module, arrays = linear(scheme, split, tp), draw(scheme, INPUTS, OUTPUTS)
    own = {"values": arrays.values[0], "scales": arrays.scales[0]}
    if arrays.zero_points is not None:
        own["zero_points"] = arrays.zero_points[0]
    if arrays.input_scale is not None:
        own["input_scale"] = arrays.input_scale
    if order is not None:
        own["order"] = order.astype(np.int32)
    graphdef = nnx.graphdef(module)
    rows = {"inputs": P(None, "tensor"), "outputs": P()}
    run = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params)(x),
        mesh=Mesh(np.array(jax.devices()[:tp]).reshape(1, tp), ("data", "tensor")),
        in_specs=(declared_specs(module), rows[split]),
        out_specs={"inputs": P(), "outputs": P(None, "tensor")}[split],
        check_vma=False,
    )
    return np.asarray(jax.jit(run)({"weight": own}, X)), numbers(scheme, arrays, layer=0)


@pytest.mark.parametrize("split", ["inputs", "outputs"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "scheme",
    [Scheme("int8"), Scheme("int4", 32, has_zero_points=True), Scheme("mxfp4", 32)],
    ids=lambda own: own.name,
)
def test_chips_share_a_matrix_by_inputs_or_outputs(scheme, tp, split):
    found, matrix = product(scheme, split, tp)
    wanted = X @ matrix
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("split", ["inputs", "outputs"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_order_of_inputs_reaches_across_chips(tp, split):
    order = np.random.default_rng(4).permutation(INPUTS)
    scheme = Scheme("int4", 32, has_input_order=True)
    found, matrix = product(scheme, split, tp, order)
    wanted = X[:, order] @ matrix
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("activation", ["int8", "fp8"])
def test_each_chip_scales_its_own_part_of_activations(activation, tp):
    found, matrix = product(Scheme(activation, activation=activation), "inputs", tp)
    parts = zip(np.split(X, tp, axis=1), np.split(matrix, tp), strict=True)
    wanted = sum(rounded(x, activation) @ rows for x, rows in parts)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_stored_scale_of_activations_is_the_same_on_every_chip():
    scheme = Scheme("int8", activation="int8", has_input_scale=True)
    found, matrix = product(scheme, "inputs", 2)
    wanted = rounded(X, "int8", np.float32([0.03])) @ matrix
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("inputs", "groups"), [(256, 2), (192, 6), (64, 2)])
def test_groups_are_cut_to_those_that_fit_a_chips_inputs(inputs, groups):
    shapes = declared_shapes(linear(Scheme("int4", 128), "inputs", 2, inputs))
    assert shapes["weight"]["scales"].shape == (groups, OUTPUTS)


def test_inputs_that_leave_no_groups_are_refused():
    with pytest.raises(ValueError, match=r"w\.weight is quantized in groups of 128 inputs"):
        linear(Scheme("int4", 128), "inputs", 2, inputs=2 * 132)


def test_experts_in_an_order_of_their_own_are_refused():
    scheme = Scheme("int4", 32, has_input_order=True)
    quantized = Quantized(scheme, xla_quantized_matmul, 1)
    with pytest.raises(ValueError, match=r"experts\.weight: experts in activation order"):
        ExpertLinear(
            Tensor("experts.weight", (4, INPUTS, OUTPUTS), transposed=True),
            *(jnp.float32, blocked_grouped_matmul),
            transposed=False,
            quantized=quantized,
        )
