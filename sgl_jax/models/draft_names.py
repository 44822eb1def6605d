"""The names of the tensors of models' draft layers (multi-token prediction, MTP)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class DraftNames(NamedTuple):
    """Module names of one architecture's draft layer; "{}" is the model's number of layers.

    Embedding and head are the model's.
    """

    layer: str  # prefix of the decoder layer's tensors, with a dot at its end
    embedding_norm: str
    hidden_norm: str
    join: str  # multiplies both norms' results, side by side
    norm: str  # the last norm


_MTP = DraftNames(
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    join="mtp.fc",
    norm="mtp.norm",
)
_NEXT_LAYER = DraftNames(
    layer="model.layers.{}.",
    embedding_norm="model.layers.{}.enorm",
    hidden_norm="model.layers.{}.hnorm",
    join="model.layers.{}.eh_proj",
    norm="model.layers.{}.shared_head.norm",
)
# By architecture. The draft layer is built like the last layer with full attention.
DRAFT_NAMES: Mapping[str, DraftNames] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": _NEXT_LAYER,
        "DeepseekV3ForCausalLM": _NEXT_LAYER,
        "Glm4MoeForCausalLM": _NEXT_LAYER,
        "GlmMoeDsaForCausalLM": _NEXT_LAYER,
        "Qwen3NextForCausalLM": _MTP,
        "Qwen3_5ForCausalLM": _MTP,
        "Qwen3_5ForConditionalGeneration": _MTP,
        "Qwen3_5MoeForCausalLM": _MTP,
        "Qwen3_5MoeForConditionalGeneration": _MTP,
    }
)
