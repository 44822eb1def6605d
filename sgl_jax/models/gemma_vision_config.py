"""The vision towers of Gemma 3 and Gemma 4, read from config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_fields import (
    ModelConfigError,
    object_field,
    positive_float,
    positive_int,
    switch,
)
from sgl_jax.models.vision_config import VisionConfig, check_fields

_ACTIVATION = "gelu_pytorch_tanh"
# What transformers gives to absent fields.
_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
_SIGLIP_FIXED: Mapping[str, Any] = MappingProxyType(
    {"attention_dropout": 0.0, "hidden_act": _ACTIVATION, "num_channels": 3}
)
_GEMMA4 = {
    "num_hidden_layers": 16,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-6,
}
_GEMMA4_FIXED: Mapping[str, Any] = MappingProxyType(
    {"attention_bias": False, "attention_dropout": 0.0, "hidden_activation": _ACTIVATION}
)
_GEMMA4_READ = (
    *("patch_size", "pooling_kernel_size", "rope_parameters", "standardize"),
    *("use_clipped_linears", "max_position_embeddings"),
)
_AXIAL = {"rope_type": "axial", "rope_theta": 100.0}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class Gemma3Vision(VisionConfig):
    """A SigLIP tower: all images have one size, and tokens are means of patches."""

    eps: float

    @property
    def grid_side(self) -> int:
        """Return the patches of an image in each direction."""
        return math.isqrt(self.images.max_pixels) // self.images.patch_size


def read_gemma3_vision(
    config: Mapping[str, Any], images: ImageSettings, hidden_size: int
) -> VisionConfig:
    """Read the tower of config.json; `hidden_size` is the text model's."""
    given = object_field(config, "vision_config")
    check_fields(given, _SIGLIP_FIXED, (*_SIGLIP, "vision_use_head"))
    raw = _SIGLIP | given
    depth, hidden, width, heads = (positive_int(raw, name) for name in _SIZES)
    if hidden % heads:
        raise ModelConfigError(
            f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})"
        )
    return Gemma3Vision(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        out_hidden_size=hidden_size,
        images=images,
        whole_images="all",
        eps=positive_float(raw, "layer_norm_eps"),
    )


@dataclass(frozen=True, kw_only=True)
class Gemma4Vision(VisionConfig):
    """Gemma 4's tower: images of any ratio within a number of tokens, means of patches."""

    num_kv_heads: int
    head_dim: int
    num_positions: int  # of the tables of rows and columns
    theta: float  # base of the patches' rotary positions
    eps: float
    clips: bool  # inputs and outputs of matrices are clipped
    standardizes: bool

    @property
    def work_width(self) -> int:
        return super().work_width + self.intermediate_size


def read_gemma4_vision(
    config: Mapping[str, Any], images: ImageSettings, hidden_size: int
) -> VisionConfig:
    """Read the tower of config.json; `hidden_size` is the text model's."""
    given, text = object_field(config, "vision_config"), object_field(config, "text_config")
    check_fields(given, _GEMMA4_FIXED, (*_GEMMA4, *_GEMMA4_READ))
    raw = _GEMMA4 | given
    depth, hidden, width, heads = (positive_int(raw, name) for name in _SIZES)
    kv_heads, head_dim = positive_int(raw, "num_key_value_heads"), positive_int(raw, "head_dim")
    if heads % kv_heads or head_dim % 4:
        raise ModelConfigError(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}),"
            f" and head_dim ({head_dim}) of 4"
        )
    rope = _AXIAL | object_field(raw, "rope_parameters")
    if rope["rope_type"] != "axial":
        raise ModelConfigError(f"rope_type must be 'axial', got {rope['rope_type']!r}")
    sees_whole = text.get("use_bidirectional_attention") == "vision"
    return Gemma4Vision(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        out_hidden_size=hidden_size,
        images=images,
        whole_images="windows" if sees_whole else "",
        pad_token_id=text.get("pad_token_id") or 0,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_positions=positive_int(raw, "position_embedding_size"),
        theta=positive_float(rope, "rope_theta"),
        eps=positive_float(raw, "rms_norm_eps"),
        clips=switch(raw, "use_clipped_linears"),
        standardizes=switch(raw, "standardize"),
    )
