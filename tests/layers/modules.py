"""Modules of small sizes, and what they declare as trees."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from flax.nnx.traversals import unflatten_mapping

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.interface import XLA_MOVES
from sgl_jax.layers.linear import ACTIVATIONS, ExpertLinear, GatedMLP, Linear
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


# Of hidden 8: a mixture normalises its inputs.
NORM = SimpleNamespace(weight=np.full(8, 0.25, np.float32), eps=1e-6, from_one=False)


class NormalisedMixture(MixtureOfExperts):
    """A mixture with `NORM`, which has no parameter."""

    def __call__(self, x, is_token, copies=None):  # type: ignore[override]
        return super().__call__(x, NORM, is_token, copies)


def normalised(x):
    """x by `NORM`, in float64."""
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + NORM.eps) * 0.25


def mixture_of_experts(
    multiply,
    *,
    norm_topk_prob,
    has_biases=False,
    gated=silu_gated,
    shared=None,
    moves=XLA_MOVES,
    expert_axes=None,
    num_stored=5,
):
    """Of 5 experts, 2 of them for each token, hidden 8, width 12; `num_stored` is a multiple of the
    chips across which they are distributed."""

    def experts(name, *, transposed):
        source = Tensor(name, (num_stored, 12, 8))
        bias = Tensor(f"{name}_bias", (num_stored, 12) if transposed else (5, 8))
        return ExpertLinear(
            source,
            jnp.float32,
            multiply,
            transposed=transposed,
            bias=bias if has_biases else None,
            expert_axes=expert_axes,
        )

    return NormalisedMixture(
        Linear(Tensor("router", (8, 5)), jnp.float32),
        experts("gate", transposed=True),
        experts("up", transposed=True),
        experts("down", transposed=False),
        num_experts=5,
        choice=ExpertChoice(2, norm_topk_prob),
        moves=moves,
        gated=gated,
        shared=shared,
    )
