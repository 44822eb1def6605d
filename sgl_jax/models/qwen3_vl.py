"""Qwen3-VL's text models, Qwen3 and Qwen3-MoE: vision tensors are not read."""

from functools import partial

from sgl_jax.models.decoder import Architecture
from sgl_jax.models.qwen3 import ExpertNames, qwen3_layer, qwen3_moe_layer

QWEN3_VL = Architecture(
    qwen3_layer, body="model.language_model.", spare_prefixes=("model.visual.",)
)
QWEN3_VL_MOE = QWEN3_VL._replace(
    build_layer=partial(qwen3_moe_layer, names=ExpertNames(layouts="either"))
)
