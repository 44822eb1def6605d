"""The calls of layers that TPUs have Pallas kernels for, and the only place that selects them.

All implementations of a call have the same signature, the protocol in its package's interface, and
the same semantics.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from sgl_jax.kernels.attention import xla as xla_attention
from sgl_jax.kernels.attention.api import RaggedPagedAttention
from sgl_jax.kernels.expert_dispatch.interface import XLA_MOVES, DispatchKernels
from sgl_jax.kernels.gated_delta import xla as xla_gated_delta
from sgl_jax.kernels.gated_delta.api import CausalConv, GatedDelta
from sgl_jax.kernels.gated_delta.by_token import recur_by_token
from sgl_jax.kernels.grouped_matmul.interface import (
    GroupedMatmul,
    blocked_grouped_matmul,
    ragged_grouped_matmul,
)
from sgl_jax.kernels.latent_attention import xla as xla_latent_attention
from sgl_jax.kernels.latent_attention.interface import PagedLatentAttention
from sgl_jax.kernels.quantized_matmul.numbers import QuantizedMatmul
from sgl_jax.kernels.quantized_matmul.xla import cpu_quantized_matmul, xla_quantized_matmul
from sgl_jax.kernels.row_blocks import RowBlocks, block_rows_of
from sgl_jax.kernels.state_space import xla as xla_state_space
from sgl_jax.kernels.state_space.api import StateSpace
from sgl_jax.layers.qkv_heads import QKVHeads, pallas_qkv_heads, xla_qkv_heads


class Kernels(NamedTuple):
    """An implementation of each call; the defaults are a CPU's."""

    attend: RaggedPagedAttention = xla_attention.ragged_paged_attention
    attend_latents: PagedLatentAttention = xla_latent_attention.latent_attention
    qkv_heads: QKVHeads = xla_qkv_heads
    multiply_quantized: QuantizedMatmul = cpu_quantized_matmul
    multiply_groups: GroupedMatmul = blocked_grouped_matmul
    expert_dispatch: DispatchKernels = XLA_MOVES
    gated_delta: GatedDelta = xla_gated_delta.gated_delta
    causal_conv: CausalConv = xla_gated_delta.causal_conv
    state_space: StateSpace = xla_state_space.state_space


_DISPATCH = "expert_dispatch"


def calls_of(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return each call by its name: a field, or `expert_dispatch.` and a field of that."""
    calls = kernels._asdict()
    moves: DispatchKernels = calls.pop(_DISPATCH)
    return calls | {f"{_DISPATCH}.{name}": call for name, call in moves._asdict().items()}


def kernels_from(calls: Mapping[str, Callable[..., Any]]) -> Kernels:
    """Return the kernels of all calls by their names, as `calls_of` returns them."""
    moves = {name: calls[f"{_DISPATCH}.{name}"] for name in DispatchKernels._fields}
    plain = {name: calls[name] for name in Kernels._fields if name != _DISPATCH}
    return Kernels(**plain, expert_dispatch=DispatchKernels(**moves))


def invariant_kernels(platform: str, backend: str) -> Kernels:
    """Return the kernels of `kernels_of` with results that depend, to the bit, only on the tokens
    before a token in its request. See `kernels.row_blocks` for other layers."""
    kernels = kernels_of(platform, backend)
    if backend == "pallas":
        products = "multiply_quantized", "multiply_groups"
        names = "attend", "attend_latents", *products, "gated_delta", "state_space"
        own = {name: partial(getattr(kernels, name), is_invariant=True) for name in names}
        # A product that adds a token's lines orders them by their places in the step, and kernels
        # compute gates in float32 in short steps only.
        moves = kernels.expert_dispatch._replace(gate=XLA_MOVES.gate, add=XLA_MOVES.add)
        return kernels._replace(**own, expert_dispatch=moves)
    attend = xla_attention.attend_invariantly
    return kernels._replace(
        attend=partial(xla_attention.ragged_paged_attention, attend=attend),
        attend_latents=partial(xla_latent_attention.latent_attention, attend=attend),
        multiply_groups=blocked_grouped_matmul,
        gated_delta=partial(recur_by_token, xla_gated_delta.DELTA_RULE),
        state_space=partial(recur_by_token, xla_state_space.SPACE_RULE),
    )


def invariant_row_blocks(platform: str, backend: str) -> RowBlocks:
    """Return the blocks of rows, and their products, that belong to `invariant_kernels`."""
    if backend == "xla":
        return RowBlocks()
    from sgl_jax.kernels.grouped_matmul.tpu import multiply_rows
    from sgl_jax.kernels.pallas_tpu import simulated

    multiply = multiply_rows if platform == "tpu" else simulated(multiply_rows)
    return RowBlocks(block_rows_of(backend), multiply)


def kernels_of(platform: str, backend: str) -> Kernels:
    """Return the kernels for "cpu", "gpu" or "tpu" and the backend "pallas" or "xla".

    On a CPU, "pallas" interprets the TPU's kernels with their DMAs and semaphores, slowly.
    """
    if backend == "xla":
        if platform == "cpu":
            return Kernels()
        return Kernels(
            multiply_quantized=xla_quantized_matmul, multiply_groups=ragged_grouped_matmul
        )
    # Imported late: a process without Pallas does not wait for its import.
    from sgl_jax.kernels.attention import tpu as attention
    from sgl_jax.kernels.expert_dispatch import tpu as experts
    from sgl_jax.kernels.gated_delta import tpu as gated_delta
    from sgl_jax.kernels.grouped_matmul.tpu import tpu_grouped_matmul
    from sgl_jax.kernels.latent_attention import tpu as latent_attention
    from sgl_jax.kernels.pallas_tpu import simulated
    from sgl_jax.kernels.quantized_matmul.tpu import tpu_quantized_matmul
    from sgl_jax.kernels.state_space import tpu as state_space

    kernels = Kernels(
        attention.ragged_paged_attention,
        latent_attention.latent_attention,
        pallas_qkv_heads,
        tpu_quantized_matmul,
        tpu_grouped_matmul,
        DispatchKernels(
            experts.tpu_choose,
            experts.tpu_sort,
            experts.tpu_gather,
            experts.tpu_gate,
            experts.tpu_add,
        ),
        gated_delta.gated_delta,
        gated_delta.causal_conv,
        state_space.state_space,
    )
    interpreted: Kernels = jax.tree.map(simulated, kernels)
    return kernels if platform == "tpu" else interpreted
