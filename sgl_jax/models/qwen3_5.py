"""Qwen3.5's text model: Qwen3-Next with a tensor for each projection."""

from functools import partial

from sgl_jax.core.recurrence import GatedDeltaConfig
from sgl_jax.layers.head_sources import ByHead, HeadRows
from sgl_jax.layers.sources import Source, Tensor
from sgl_jax.models.qwen3_next import QWEN3_NEXT, flat_rows, hybrid_layer


def _flat(own: GatedDeltaConfig, hidden: int) -> tuple[Source, Source, Source]:
    heads, values, group = own.num_key_heads, own.num_value_heads, own.group
    gates = tuple(
        HeadRows(f"linear_attn.in_proj_{x}.weight", values, 0, group, group) for x in "ba"
    )
    width = values * own.value_dim
    return (
        ByHead(flat_rows("linear_attn.in_proj_qkv.weight", own), heads, (hidden,)),
        Tensor("linear_attn.in_proj_z.weight", (hidden, width), transposed=True),
        ByHead(gates, heads, (hidden,)),
    )


QWEN3_5_TEXT = QWEN3_NEXT._replace(build_layer=partial(hybrid_layer, projections=_flat))
# The multimodal model: its vision tensors are not read.
QWEN3_5 = QWEN3_5_TEXT._replace(
    body="model.language_model.", spare_prefixes=("mtp.", "model.visual.")
)
