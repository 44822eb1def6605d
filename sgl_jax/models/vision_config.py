"""The vision tower of a model, and Qwen3-VL's, read from `vision_config` of its config.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_fields import (
    ModelConfigError,
    is_int,
    object_field,
    positive_float,
    positive_int,
)

_ACTIVATION = "gelu_pytorch_tanh"
_FIXED: Mapping[str, Any] = {"hidden_act": _ACTIVATION, "in_channels": 3, "temporal_patch_size": 2}
_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
_READ = (
    *(*_SIZES, "patch_size", "spatial_merge_size", "num_position_embeddings"),
    *("deepstack_visual_indexes", "rope_parameters"),
)
_IGNORED = ("dtype", "initializer_range", "model_type", "torch_dtype", "transformers_version")
_MAIN_SECTIONS = (24, 20, 20)  # of Qwen3-VL, if its config has none


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A tower, and how the text model reads its results."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    images: ImageSettings
    # The layers of the text model in which the tokens of an image also see its later tokens.
    whole_images: Literal["", "windows", "all"] = ""
    pad_token_id: int = 0  # the tokens of images in embeddings by layer

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
        return self.out_hidden_size

    @property
    def work_width(self) -> int:
        """Return the numbers of a patch in the tower's largest arrays: hidden states, and the inner
        width."""
        return 8 * self.hidden_size + self.intermediate_size

    @property
    def has_axes(self) -> bool:
        """Return whether a token's position has a time, a row and a column."""
        return False

    def pair_axes(self, num_pairs: int) -> list[int]:
        """Return the axis of each rotated pair: 0 for time, 1 for the row, 2 for the column."""
        return [0] * num_pairs

    def sees_whole(self, sliding_window: int | None) -> bool:
        """Return whether images' tokens see later ones in layers with `sliding_window`, or none."""
        return self.whole_images == "all" or (
            self.whole_images == "windows" and sliding_window is not None
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVision(VisionConfig):
    """A tower like Qwen3-VL's."""

    grid_side: int  # of the square grid of learned positions
    # Layers with results that are added after the text model's first layers (arXiv 2406.04334).
    deepstack: tuple[int, ...]
    theta: float  # base of the patches' rotary positions
    # Pairs of a head's dimensions that turn by a token's time, row and column.
    sections: tuple[int, int, int]

    @property
    def row_width(self) -> int:
        return self.out_hidden_size * (1 + len(self.deepstack))

    @property
    def work_width(self) -> int:
        return super().work_width + self.hidden_size * len(self.deepstack)

    @property
    def has_axes(self) -> bool:
        return True

    def pair_axes(self, num_pairs: int) -> list[int]:
        """Return the axis of each rotated pair: the three alternate while the rows' and columns'
        sections last."""
        return [
            pair % 3 if pair % 3 and pair < 3 * self.sections[pair % 3] else 0
            for pair in range(num_pairs)
        ]


def check_fields(raw: Mapping[str, Any], fixed: Mapping[str, Any], read: Sequence[str]) -> None:
    """Raise ModelConfigError for a field of a tower with another value than the `fixed` one, or
    one that is not `read` and may change the computation."""
    for name, value in raw.items():
        if name in fixed and value != fixed[name]:
            raise ModelConfigError(f"{name} must be {fixed[name]!r}, got {value!r}")
        if name not in (*fixed, *read, *_IGNORED) and value:
            raise ModelConfigError(f"{name} = {value!r} is not supported")


def read_qwen3_vl_vision(
    config: Mapping[str, Any], images: ImageSettings, hidden_size: int
) -> VisionConfig:
    """Read the tower of config.json; `hidden_size` is the text model's."""
    raw, text = object_field(config, "vision_config"), object_field(config, "text_config")
    check_fields(raw, _FIXED, _READ)
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
    return Qwen3VLVision(
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
