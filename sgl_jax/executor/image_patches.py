"""The input of the vision tower: patches of an image on each rank, and where its vectors go."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from numpy.typing import NDArray

from sgl_jax.core.step_plan import ImageEncoding, Int32Array
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.models.decoder import CausalLM
from sgl_jax.models.vision_config import VisionConfig

_FEWEST_TOKENS = 64  # of an image's program: the tower is bound by reading its weights
_NUM_SIZES = 2  # words before the rows of the table: height and width in patches
_NO_ROW = 2**31 - 1  # of a token that is padding

Patches = NDArray[np.uint8]


class TowerInput(NamedTuple):
    """The arguments of a program of the tower, an image or none for each rank."""

    patches: Patches  # [dp, N, values of the patches of a token]
    words: Int32Array  # [dp, image_words]: height and width in patches, the row of each token


def image_words(num_tokens: int) -> int:
    return _NUM_SIZES + num_tokens


def padded_tokens(num_tokens: int) -> int:
    """Return the tokens of the smallest program that holds an image of `num_tokens`."""
    return max(_FEWEST_TOKENS, 1 << (num_tokens - 1).bit_length())


def all_padded_tokens(most: int) -> list[int]:
    """Return the sizes of all programs for images of up to `most` tokens, largest first."""
    sizes = [padded_tokens(most)]
    while sizes[-1] > _FEWEST_TOKENS:
        sizes.append(sizes[-1] // 2)
    return sizes


def pack_images(images: Sequence[ImageEncoding | None], config: VisionConfig) -> TowerInput:
    """Return the input of the smallest program that holds each rank's image."""
    num_tokens = padded_tokens(max(len(image.slots) for image in images if image is not None))
    values = config.patches_per_token * config.patch_values
    patches = np.zeros((len(images), num_tokens, values), np.uint8)
    words = np.full((len(images), image_words(num_tokens)), _NO_ROW, np.int32)
    # The program divides by the width.
    words[:, :_NUM_SIZES] = config.images.merge_size
    side = config.images.patch_size
    for rank, image in enumerate(images):
        if image is not None:
            patches[rank, : len(image.slots)] = cut_patches(image, config)
            words[rank, :_NUM_SIZES] = image.height // side, image.width // side
            words[rank, _NUM_SIZES : _NUM_SIZES + len(image.slots)] = image.slots
    return TowerInput(patches, words)


def cut_patches(image: ImageEncoding, config: VisionConfig) -> Patches:
    """Return an image's patches [side, side, 3], a line for each token."""
    side, merge = config.images.patch_size, config.images.merge_size
    rows, columns = image.height // (side * merge), image.width // (side * merge)
    pixels = np.frombuffer(image.pixels, np.uint8)
    cut = pixels.reshape(rows, merge, side, columns, merge, side, 3)
    patches: Patches = cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
    return patches


def write_vectors(
    model: CausalLM, vectors: jax.Array, patches: jax.Array, words: jax.Array
) -> jax.Array:
    """Return the table with the vectors of a rank's image written; traced.

    Args:
        model: merged with this chip's weights.
        vectors: [rows of this chip, width].
        patches: uint8[N, values of the patches of a token].
        words: int32[image_words].
    """
    assert model.tower is not None
    own_patches = patches.reshape(-1, model.tower.config.patch_values)
    new = model.tower(own_patches, words[0], words[1]).astype(vectors.dtype)
    own = words[_NUM_SIZES:] - lax.axis_index(TENSOR_AXIS) * len(vectors)
    return vectors.at[own].set(new, mode="drop", wrap_negative_indices=False)
