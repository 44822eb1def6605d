"""The building blocks of models against float64 numpy, alone and split over two chips."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.grouped_matmul.interface import blocked_grouped_matmul
from sgl_jax.layers.embedding import (
    Embedding,
    LMHead,
    padded_vocab_size,
)
from sgl_jax.layers.head_sources import paired_order
from sgl_jax.layers.kernels import kernels_of
from sgl_jax.layers.layer_weights import (
    separate_matrices,
    use_stacks,
    use_weight,
    weights_of_layer,
)
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import join_shares
from sgl_jax.layers.moe import SharedExpert, clamped_swiglu
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import stack_layers
from sgl_jax.layers.rotary import rotate, rotation
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Tensor
from sgl_jax.models.rope_config import RopeConfig
from tests.layers.modules import (
    declared_shapes,
    declared_specs,
    gated_mlp,
    mixture_of_experts,
    normalised,
)
from tests.support.long import long

TOLERANCE = 1e-5


WHOLE = P()


def run(module, method, *inputs, tp=1, in_spec=WHOLE, out_spec=WHOLE, params=None):
    """Fill a module with `params` or random numbers and call it on `tp` chips.

    Returns (result, params). Logits come back as whole rows.
    """
    rng = np.random.default_rng(0)
    shapes = declared_shapes(module)
    if params is None:
        params = jax.tree.map(lambda s: rng.normal(size=s.shape), shapes)
    params = jax.tree.map(np.float32, params)
    mesh = Mesh(np.array(jax.devices()[:tp]).reshape(1, tp), ("data", "tensor"))
    graphdef = nnx.graphdef(module)

    def local(params, *inputs):
        result = getattr(nnx.merge(graphdef, params), method)(*inputs)
        if isinstance(result, SplitLogits):
            return join_shares(result.whole_rows(), inputs[0].shape[0])
        return result[0] if isinstance(result, tuple) else result  # without a mixture's choices

    call = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(declared_specs(module), *[in_spec] * len(inputs)),
        out_specs=out_spec,
        check_vma=False,
    )
    return np.asarray(jax.jit(call)(params, *inputs)), jax.tree.map(np.float64, params)


def silu(x):
    return x / (1 + np.exp(-x))


def are_tokens(x):
    """That no row of x is padding."""
    return jnp.ones(len(x), bool)


def test_rms_norm():
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    actual, params = run(RMSNorm(Tensor("norm", (16,)), 1e-3, jnp.float32), "__call__", x)
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(actual, x * scale * params["weight"], atol=TOLERANCE)
    from_one = RMSNorm(Tensor("norm", (16,)), 1e-3, jnp.float32, from_one=True)
    actual, params = run(from_one, "__call__", x)
    np.testing.assert_allclose(actual, x * scale * (1 + params["weight"]), atol=TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
def test_gated_mlp(tp):
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32) / 4
    actual, params = run(gated_mlp(8, 12), "__call__", x, tp=tp)
    gate, up, down = (params[name]["weight"] for name in ("gate", "up", "down"))
    np.testing.assert_allclose(actual, silu(x @ gate) * (x @ up) @ down, atol=TOLERANCE)


@pytest.mark.parametrize("split", ["inputs", "outputs", "neither"])
def test_a_bias_is_added_once_however_the_matrix_is_split(split):
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    bias = Tensor("bias", (4,))
    module = Linear(Tensor("weight", (8, 4)), jnp.float32, split, bias)
    local = {"inputs": P(None, "tensor"), "outputs": P(), "neither": P()}[split]
    result = P(None, "tensor") if split == "outputs" else P()
    actual, params = run(module, "__call__", x, tp=2, in_spec=local, out_spec=result)
    np.testing.assert_allclose(actual, x @ params["weight"] + params["bias"], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("simulate", "tp", "norm_topk_prob"),
    [
        pytest.param(
            *(simulate, tp, norm_topk_prob),
            id=f"{name}-{tp}-{norm_topk_prob}",
            marks=pytest.mark.long if simulate else (),
        )
        for simulate, name in ((False, "XLA"), (True, "the TPU's kernel"))
        for tp in (1, 2)
        for norm_topk_prob in (True, False)
    ],
)
def test_mixture_of_experts(simulate, tp, norm_topk_prob):
    x = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32) / 4
    multiply = kernels_of("cpu", "pallas" if simulate else "xla").multiply_groups
    module = mixture_of_experts(multiply, norm_topk_prob=norm_topk_prob)
    actual, params = run(module, "__call__", x, are_tokens(x), tp=tp)
    expected = np.zeros_like(x, np.float64)
    for token, vector in enumerate(normalised(x)):
        logits = vector @ params["router"]["weight"]
        weights = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-weights)[:2]
        total = weights[chosen].sum() if norm_topk_prob else 1.0
        for expert in chosen:
            gate, up, down = (params[name]["weight"][expert] for name in ("gate", "up", "down"))
            out = silu(gate @ vector) * (up @ vector) @ down
            expected[token] += out * weights[expert] / total
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_shared_expert_serves_every_token_by_its_own_weight(tp):
    x = np.random.default_rng(1).normal(size=(7, 8)).astype(np.float32) / 4
    multiply = blocked_grouped_matmul
    alone = mixture_of_experts(multiply, norm_topk_prob=True)
    shared = SharedExpert(gated_mlp(8, 6), Linear(Tensor("gate", (8, 1)), jnp.float32))
    module = mixture_of_experts(multiply, norm_topk_prob=True, shared=shared)
    actual, params = run(module, "__call__", x, are_tokens(x), tp=tp)
    own = params.pop("shared")
    gate, up, down = (own["expert"][name]["weight"] for name in ("gate", "up", "down"))
    routed, _ = run(alone, "__call__", x, are_tokens(x), params=params)
    x = normalised(x)
    weight = 1 / (1 + np.exp(-(x @ own["gate"]["weight"])))
    expected = routed + weight * (silu(x @ gate) * (x @ up) @ down)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("tp", [2, *long(1)])
@pytest.mark.parametrize("simulate", [False, True], ids=["XLA", "the TPU's kernel"])
def test_experts_with_biases_and_clamped_gates(simulate, tp):
    x = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32) / 2
    multiply = kernels_of("cpu", "pallas" if simulate else "xla").multiply_groups
    gated = partial(clamped_swiglu, limit=0.5, alpha=1.7)
    module = mixture_of_experts(multiply, norm_topk_prob=True, has_biases=True, gated=gated)
    actual, params = run(module, "__call__", x, are_tokens(x), tp=tp)
    expected = np.zeros_like(x, np.float64)
    for token, vector in enumerate(normalised(x)):
        logits = vector @ params["router"]["weight"]
        chosen = np.argsort(-logits)[:2]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            matrices = [params[name]["weight"][expert] for name in ("gate", "up", "down")]
            biases = [params[name]["bias"][expert] for name in ("gate", "up", "down")]
            gate = np.minimum(matrices[0] @ vector + biases[0], 0.5)
            up = np.clip(matrices[1] @ vector + biases[1], -0.5, 0.5)
            inner = gate / (1 + np.exp(-1.7 * gate)) * (up + 1)
            expected[token] += weight * (inner @ matrices[2] + biases[2])
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


class ExpertLayers(nnx.Module):
    """Three layers of experts, run one after the other as a model does."""

    def __init__(self, simulate):
        multiply = kernels_of("cpu", "pallas" if simulate else "xla").multiply_groups
        self.layer = mixture_of_experts(multiply, norm_topk_prob=True)
        stack_layers(self.layer, range(3), data_shards=1)

    def __call__(self, x):
        graphdef, weights = nnx.split(self.layer)

        def run_layer(x, index):
            layer = nnx.merge(graphdef, weights_of_layer(weights, index))
            return (x + layer(x, are_tokens(x))[0]) / 8, None

        return lax.scan(run_layer, x, jnp.arange(3))[0]


def test_the_tpus_kernel_finds_each_layers_experts_in_the_stack():
    x = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    expected, _ = run(ExpertLayers(simulate=False), "__call__", x)
    actual, _ = run(ExpertLayers(simulate=True), "__call__", x)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("tp", [1, 2])
def test_embedding_and_tied_logits_with_a_vocabulary_that_does_not_divide(tp):
    table = Tensor("table", (padded_vocab_size(7, tp), 4))
    module = Embedding(table, 7, 4, jnp.float32, is_head=True)
    tokens = np.array([6, 0, 3, 3], np.int32)
    vectors, params = run(module, "__call__", tokens, tp=tp)
    np.testing.assert_allclose(vectors, params["weight"][tokens], atol=TOLERANCE)
    hidden = np.ones((2, 4), np.float32)
    logits, _ = run(module, "logits", hidden, tp=tp)
    np.testing.assert_allclose(logits, hidden @ params["weight"][:7].T, atol=TOLERANCE)


def test_a_tables_rows_may_be_longer_than_a_tokens_vector():
    module = Embedding(Tensor("table", (7, 6)), 7, 4, jnp.float32, is_head=True)
    tokens = np.array([6, 0], np.int32)
    vectors, params = run(module, "__call__", tokens)
    np.testing.assert_allclose(vectors, params["weight"][tokens, :4], atol=TOLERANCE)
    hidden = np.ones((2, 4), np.float32)
    logits, _ = run(module, "logits", hidden)
    np.testing.assert_allclose(logits, hidden @ params["weight"][:, :4].T, atol=TOLERANCE)


def head(vocab_size, tp):
    source = Tensor("head", (4, padded_vocab_size(vocab_size, tp)))
    return LMHead(source, vocab_size, jnp.float32)


@pytest.mark.parametrize("tp", [1, 2])
def test_head_with_a_vocabulary_that_does_not_divide(tp):
    hidden = np.ones((2, 4), np.float32)
    logits, params = run(head(7, tp), "logits", hidden, tp=tp)
    np.testing.assert_allclose(logits, hidden @ params["weight"][:, :7], atol=TOLERANCE)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_rows_of_any_number_have_the_logits_of_all_chips_in_order(num_rows, tp):
    hidden = np.random.default_rng(1).normal(size=(num_rows, 4)).astype(np.float32)
    logits, params = run(head(11, tp), "logits", hidden, tp=tp)
    np.testing.assert_allclose(logits, hidden @ params["weight"][:, :11], atol=TOLERANCE)


def test_rotation_turns_pairs_by_their_angle():
    frequencies = RopeConfig(100.0).inverse_frequencies(4)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
    x = jnp.array([[[1.0, 0.0, 0.0, 2.0]]])
    turned = np.asarray(rotate(x, rotation(jnp.array([3]), frequencies)))[0, 0]
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    np.testing.assert_allclose(turned, expected, atol=TOLERANCE)


@pytest.mark.parametrize("num_turned", [4, 6, 10])
def test_only_a_heads_first_dimensions_may_be_turned(num_turned):
    x = np.random.default_rng(0).normal(size=(3, 2, 10)).astype(np.float32)
    frequencies, positions = RopeConfig(100.0).inverse_frequencies(num_turned), jnp.array([0, 3, 7])
    expected = x.copy()
    own = rotation(positions, frequencies, 1.25)
    expected[..., :num_turned] = rotate(jnp.asarray(x[..., :num_turned]), own)
    order = list(paired_order(10, num_turned))
    turned = rotate(jnp.asarray(x[..., order]), rotation(positions, frequencies, 1.25, 5))
    np.testing.assert_allclose(turned, expected[..., order], atol=1e-6)
    assert sorted(order) == list(range(10))


def test_linear_scaling_stretches_all_and_llama3_only_the_long_waves():
    plain = RopeConfig(1e4).inverse_frequencies(64)
    np.testing.assert_allclose(
        RopeConfig(1e4, "linear", 4).inverse_frequencies(64), plain / 4, rtol=1e-6
    )
    scaled = RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 256).inverse_frequencies(64)
    wavelengths = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelengths < 64], plain[wavelengths < 64], rtol=1e-6)
    np.testing.assert_allclose(scaled[wavelengths > 256], plain[wavelengths > 256] / 8, rtol=1e-6)
    between = (wavelengths > 64) & (wavelengths < 256)
    assert between.any()
    assert np.all((scaled < plain)[between] & (scaled > plain / 8)[between])


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_leaves_fast_pairs_stretches_slow_ones_and_blends_by_dimension(truncate):
    plain = RopeConfig(1e4).inverse_frequencies(64)
    scaled = RopeConfig(
        *(1e4, "yarn", 8.0), original_max_position_embeddings=256, truncate=truncate
    ).inverse_frequencies(64)
    turns = 256 * plain / (2 * math.pi)
    assert np.all(scaled[turns > 33 * 1.4] == plain[turns > 33 * 1.4])
    np.testing.assert_allclose(scaled[turns < 0.7], plain[turns < 0.7] / 8, rtol=1e-6)
    # Pair number i turns 256 / (2 pi 10^(4 i / 32)) times.
    first, last = (8 * math.log10(256 / (2 * math.pi * turns)) for turns in (32, 1))
    bounds = (math.floor(first), math.ceil(last)) if truncate else (first, last)
    share = (8 - max(bounds[0], 0)) / (bounds[1] - max(bounds[0], 0))
    np.testing.assert_allclose(scaled[8] / plain[8], 1 - share + share / 8, rtol=1e-5)


def test_a_rotation_may_make_longer():
    positions, frequencies = jnp.arange(3), RopeConfig(100.0).inverse_frequencies(4)
    plain, longer = rotation(positions, frequencies), rotation(positions, frequencies, 1.25)
    for one, other in zip(plain[:2], longer[:2], strict=True):
        np.testing.assert_allclose(other, 1.25 * one, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", silu),
        (
            "gelu_pytorch_tanh",
            lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
    ],
)
def test_activations(name, activation):
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32) / 4
    actual, params = run(gated_mlp(8, 12, name), "__call__", x)
    gate, up, down = (params[name]["weight"] for name in ("gate", "up", "down"))
    np.testing.assert_allclose(actual, activation(x @ gate) * (x @ up) @ down, atol=TOLERANCE)


def test_stacked_layers_are_split_over_data_along_the_first_axis_that_divides():
    module = gated_mlp(6, 12)
    stack_layers(module, range(3), data_shards=2)
    assert declared_specs(module) == {
        "gate": {"weight": P(None, "data", "tensor")},
        "up": {"weight": P(None, "data", "tensor")},
        "down": {"weight": P(None, "tensor", "data")},
    }
    assert declared_shapes(module)["down"]["weight"].shape == (3, 12, 6)


def test_a_parameter_that_does_not_divide_stays_whole_on_every_rank():
    module = RMSNorm(Tensor("norm", (5,)), 1e-6, jnp.float32)
    stack_layers(module, range(3), data_shards=2)
    assert declared_specs(module) == {"weight": P(None, None)}


@pytest.mark.parametrize("separate", [False, True])
def test_each_layer_is_given_its_own_weights_however_they_lie(separate):
    rng = np.random.default_rng(0)
    stacked = jnp.asarray(rng.normal(size=(3, 4, 5)).astype(np.float32))
    x = rng.normal(size=(6, 4)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    weights = {"matrix": jax.device_put(stacked, NamedSharding(mesh, P()))}
    if separate:
        separate_matrices(weights)
        assert [array.shape for array in weights["matrix"]] == [(4, 5)] * 3

    def of_stack(stack, layer):
        assert stack.shape[0] == (1 if separate else 3)
        return x @ stack[layer]

    @jax.jit
    def products(weights, layer):
        matrix = nnx.Param(weights_of_layer(weights, layer)["matrix"])
        return use_weight(matrix, lambda own: x @ own), use_stacks((matrix,), of_stack)  # type: ignore[return-value]

    for layer in range(3):
        expected = x @ np.asarray(stacked)[layer]
        for product in products(weights, layer):
            np.testing.assert_allclose(product, expected, atol=TOLERANCE)
