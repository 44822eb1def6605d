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
