"""Modules of small sizes, and what they declare as trees."""

import jax.numpy as jnp
from flax.nnx.traversals import unflatten_mapping

from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.mlp import ACTIVATIONS, GatedMLP
from sgl_jax.layers.moe import MixtureOfExperts, silu_gated
from sgl_jax.layers.parameter import declarations
from sgl_jax.layers.sources import Tensor


def declared_shapes(module):
    """A `jax.ShapeDtypeStruct` of each parameter."""
    return unflatten_mapping({path: own.array for path, own in declarations(module).items()})


def declared_specs(module):
    """The PartitionSpec of each parameter."""
    return unflatten_mapping({path: own.spec for path, own in declarations(module).items()})


def gated_mlp(hidden, width, activation="silu"):
    return GatedMLP(
        Linear(Tensor("gate", (hidden, width)), jnp.float32, "outputs"),
        Linear(Tensor("up", (hidden, width)), jnp.float32, "outputs"),
        Linear(Tensor("down", (width, hidden)), jnp.float32, "inputs"),
        ACTIVATIONS[activation],
    )


def mixture_of_experts(
    multiply, *, norm_topk_prob, has_biases=False, gated=silu_gated, shared=None
):
    """Of 5 experts, 2 of them for each token, hidden 8, width 12."""

    def experts(name, *, transposed):
        source = Tensor(name, (5, 12, 8))
        bias = Tensor(f"{name}_bias", (5, 12 if transposed else 8)) if has_biases else None
        return ExpertLinear(source, jnp.float32, multiply, transposed=transposed, bias=bias)

    return MixtureOfExperts(
        Linear(Tensor("router", (8, 5)), jnp.float32),
        experts("gate", transposed=True),
        experts("up", transposed=True),
        experts("down", transposed=False),
        num_experts=5,
        top_k=2,
        norm_topk_prob=norm_topk_prob,
        gated=gated,
        shared=shared,
    )
