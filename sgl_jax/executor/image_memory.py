"""The memory of images on the devices: the table of their vectors, and the vision tower's work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import IMAGE_FIELDS
from sgl_jax.executor.image_patches import all_padded_tokens
from sgl_jax.layers.mesh_axes import DATA_AXIS, MESH_AXES
from sgl_jax.models.image_tokens import RowImages
from sgl_jax.models.vision_config import VisionConfig
from sgl_jax.models.vision_tower import SCORE_BYTES

# A larger image would take longer than many steps, and more memory than the vectors.
_MOST_TOKENS = 4096


class ImageMemory(NamedTuple):
    """The limits of images of an engine."""

    vision: VisionConfig
    dtype: jnp.dtype
    num_slots: int  # rows of a rank's table, a multiple of its chips
    most_tokens: int  # of an image
    max_images: int  # of a request
    tp_size: int

    @classmethod
    def choose(cls, args: ServerArgs, vision: VisionConfig, most_rows: int) -> "ImageMemory":
        """Return the memory that `args` give; `most_rows` rows of the table suffice for any batch.

        Raises ValueError if it has no room for an image.
        """
        dtype = jnp.dtype(args.dtype)
        in_bytes = int(args.image_cache_size * 1e9) // (vision.row_width * dtype.itemsize)
        num_slots = min(in_bytes, most_rows)
        num_slots -= num_slots % args.tp_size
        images = vision.images
        assert args.context_length is not None, "resolved"
        most = min(num_slots, args.context_length, _MOST_TOKENS, images.max_tokens)
        if vision.whole_images:
            most = min(most, args.chunked_prefill_size)
        if most * images.side_multiple**2 < images.min_pixels:
            raise ValueError(
                f"--image-cache-size {args.image_cache_size}, --context-length "
                f"{args.context_length} and --chunked-prefill-size {args.chunked_prefill_size} "
                "must have room for the model's smallest image: "
                f"{images.min_pixels // images.side_multiple**2} tokens"
            )
        return cls(vision, dtype, num_slots, most, args.max_images_per_request, args.tp_size)

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the fields of `EngineSizes`."""
        return {
            "image_slots": self.num_slots,
            "max_images": self.max_images,
            "max_image_tokens": self.most_tokens,
            "image_token_side": self.vision.images.side_multiple,
            "whole_images": bool(self.vision.whole_images),
        }

    @property
    def settings(self) -> ImageSettings:
        """Return what images must be like, within this memory."""
        images = self.vision.images
        # A multiple of a token's pixels, so that resized images have no more tokens.
        return msgspec.structs.replace(
            images, max_pixels=self.most_tokens * images.side_multiple**2
        )

    @property
    def shapes(self) -> list[int]:
        """Return the tokens of the programs of the tower, largest first."""
        return all_padded_tokens(self.most_tokens)

    @property
    def device_bytes(self) -> int:
        """Return the bytes on each device for the table and the largest arrays of the tower."""
        vision = self.vision
        num_patches = self.shapes[0] * vision.patches_per_token
        table = self.num_slots // self.tp_size * vision.row_width
        return self.dtype.itemsize * (table + num_patches * vision.work_width) + 3 * SCORE_BYTES

    def arrays(self, dp_size: int, num_rows: int, mesh: Mesh) -> Any:
        """Return `RowImages` of sharded `jax.ShapeDtypeStruct`s."""
        lists = (dp_size * num_rows, self.max_images, IMAGE_FIELDS)
        by_rank, by_chip = (NamedSharding(mesh, P(axes)) for axes in (DATA_AXIS, MESH_AXES))
        vectors: Any = jax.ShapeDtypeStruct(
            (dp_size * self.num_slots, self.vision.row_width), self.dtype, sharding=by_chip
        )
        of_rows: Any = jax.ShapeDtypeStruct(lists, jnp.int32, sharding=by_rank)
        return RowImages(of_rows, vectors)
