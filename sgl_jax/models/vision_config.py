"""The vision tower of a model, read from `vision_config` of its config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_fields import (
    CONFIG_FILE,
    ModelConfigError,
    is_int,
    object_field,
    positive_float,
    positive_int,
    read_json,
)
from sgl_jax.models.image_settings import read_image_settings

_ACTIVATION = "gelu_pytorch_tanh"
_FIXED: Mapping[str, Any] = {"hidden_act": _ACTIVATION, "in_channels": 3, "temporal_patch_size": 2}
_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
_READ = (
    *(*_FIXED, *_SIZES, "patch_size", "spatial_merge_size", "num_position_embeddings"),
    *("deepstack_visual_indexes", "rope_parameters"),
)
_IGNORED = ("dtype", "initializer_range", "model_type", "torch_dtype", "transformers_version")
_MAIN_SECTIONS = (24, 20, 20)  # of Qwen3-VL, if its config has none


@dataclass(frozen=True)
class VisionConfig:
    """A tower like Qwen3-VL's, and how the text model reads its results."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    grid_side: int  # of the square grid of learned positions
    # Layers with results that are added after the text model's first layers (arXiv 2406.04334).
    deepstack: tuple[int, ...]
    theta: float  # base of the patches' rotary positions
    # Pairs of a head's dimensions that turn by a token's time, row and column.
    sections: tuple[int, int, int]
    images: ImageSettings

    @property
    def patch_values(self) -> int:
        """Return the numbers of a patch, of all channels."""
        return 3 * self.images.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.images.merge_size**2

    @property
    def row_width(self) -> int:
        """Return the numbers that the text model reads for an image's token."""
        return self.out_hidden_size * (1 + len(self.deepstack))

    def pair_axes(self, num_pairs: int) -> list[int]:
        """Return the axis of each rotated pair: 0 for time, 1 for the row, 2 for the column.

        The three alternate while the rows' and columns' sections last.
        """
        return [
            pair % 3 if pair % 3 and pair < 3 * self.sections[pair % 3] else 0
            for pair in range(num_pairs)
        ]


def read_vision(model_path: Path, hidden_size: int) -> VisionConfig:
    """Read the tower of a model folder; `hidden_size` is the text model's.

    Raises ModelConfigError, with the name of the field, if the folder has no tower or the tower is
    not supported.
    """
    images = read_image_settings(model_path)
    if images is None:
        raise ModelConfigError("--enable-multimodal needs a model with a vision tower")
    config = read_json(model_path if model_path.is_file() else model_path / CONFIG_FILE)
    raw = object_field(config, "vision_config")
    try:
        return _vision(raw, object_field(config, "text_config"), images, hidden_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"vision_config: {error}") from error


def _vision(
    raw: Mapping[str, Any], text: Mapping[str, Any], images: ImageSettings, hidden_size: int
) -> VisionConfig:
    for name, value in raw.items():
        if name in _FIXED and value != _FIXED[name]:
            raise ModelConfigError(f"{name} must be {_FIXED[name]!r}, got {value!r}")
        if name not in (*_READ, *_IGNORED) and value:
            raise ModelConfigError(f"{name} = {value!r} is not supported")
    depth, hidden, width, heads, out = (positive_int(raw, name) for name in _SIZES)
    num_positions = positive_int(raw, "num_position_embeddings")
    side = math.isqrt(num_positions)
    if side**2 != num_positions or side < 2:
        raise ModelConfigError(f"num_position_embeddings must be a square, got {num_positions}")
    if hidden % (4 * heads):
        raise ModelConfigError(
            f"hidden_size ({hidden}) must be a multiple of 4 * num_heads ({heads})"
        )
    if out != hidden_size:
        raise ModelConfigError(f"out_hidden_size is {out}, the text model's is {hidden_size}")
    rope = object_field(raw, "rope_parameters")
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        out_hidden_size=out,
        grid_side=side,
        deepstack=_deepstack(raw, depth),
        theta=positive_float(rope, "rope_theta", default=10000.0),
        sections=_sections(text),
        images=images,
    )


def _deepstack(raw: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    layers = raw.get("deepstack_visual_indexes") or []
    is_valid = isinstance(layers, list) and all(is_int(n) and 0 <= n < depth for n in layers)
    if not is_valid or sorted(set(layers)) != layers:
        raise ModelConfigError(
            f"deepstack_visual_indexes must be ascending layers below {depth}, got {layers!r}"
        )
    return tuple(layers)


def _sections(text: Mapping[str, Any]) -> tuple[int, int, int]:
    rope = object_field(text, "rope_parameters") or object_field(text, "rope_scaling")
    if rope.get("mrope_interleaved") is False:
        raise ModelConfigError("mrope_interleaved must be true")
    given = rope.get("mrope_section") or list(_MAIN_SECTIONS)
    if not isinstance(given, list) or len(given) != 3 or not all(map(is_int, given)):
        raise ModelConfigError(f"mrope_section must be three integers, got {given!r}")
    time, row, column = given
    return time, row, column
