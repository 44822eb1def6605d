"""Make tests/golden/images.npz: image files, and what transformers' processors make of them.

Needs torch, torchvision, Pillow and transformers (never dependencies of the package but Pillow):

    python scripts/make_image_golden.py tests/golden/images.npz

For each file NAME it has `NAME.file`, its bytes, and in uint8 [height, width, 3] the resized pixels
of `Qwen2VLImageProcessorPil` (`NAME.pil`), and for some those of the torchvision form,
`Qwen2VLImageProcessor` (`NAME.fast`).
"""

import io
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

PATCH, MERGE = 16, 2
SETTINGS = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
ORIENTATION = 0x0112
FAST = ("large.png", "tower.png")


def picture(height: int, width: int) -> Image.Image:
    """Return gradients with a few hard edges."""
    y, x = np.mgrid[:height, :width]
    red, green = 255 * x / max(width - 1, 1), 255 * y / max(height - 1, 1)
    blue = 255 * ((x // 9 + y // 7) % 2)
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def veil(height: int, width: int) -> Image.Image:
    """Return an alpha channel from clear to opaque."""
    return Image.fromarray(np.tile(np.linspace(0, 255, width, dtype=np.uint8), (height, 1)))


def images() -> dict[str, tuple[Image.Image, dict[str, Any]]]:
    """Return images by the names of their files, with arguments of `save`."""
    plain, alpha, exif = picture(50, 75), veil(50, 75), Image.Exif()
    exif[ORIENTATION] = 6
    clear = plain.copy()
    clear.putalpha(alpha)
    palette = plain.quantize(16)
    deep = np.arange(60 * 80, dtype=np.uint16).reshape(60, 80) * 13
    frames = {"save_all": True, "append_images": [picture(60, 90).rotate(180)], "duration": 50}
    return {
        "rgb.png": (plain, {}),
        "gray.png": (plain.convert("L"), {}),
        "gray_alpha.png": (clear.convert("LA"), {}),
        "alpha.png": (clear, {}),
        "palette.png": (palette, {}),
        "palette_clear.png": (palette, {"transparency": 3}),
        "bits.png": (plain.convert("1"), {}),
        "deep.png": (Image.fromarray(deep), {}),
        "animated.png": (picture(60, 90), frames),
        "plain.jpg": (plain, {}),
        "turned.jpg": (plain, {"exif": exif}),
        "gray.jpg": (plain.convert("L"), {}),
        "cmyk.jpg": (plain.convert("CMYK"), {}),
        "lossy.webp": (plain, {}),
        "alpha.webp": (clear, {"lossless": True}),
        "animated.webp": (picture(60, 90), frames),
        "dot.png": (picture(1, 1), {}),
        "line.png": (picture(1, 150), {}),
        "tower.png": (picture(640, 20), {}),
        "large.png": (picture(300, 200), {}),
        "fits.png": (picture(96, 128), {}),
    }


def pixels_of(processor: Any, image: Image.Image) -> np.ndarray:
    """Undo the normalization and the cutting of patches."""
    made = processor(image, return_tensors="pt")
    _, height, width = made["image_grid_thw"][0].tolist()
    shape = (height // MERGE, width // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)
    patches = made["pixel_values"].numpy().reshape(shape)[:, :, :, :, :, 0]
    rows = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * PATCH, width * PATCH, 3)
    return np.rint((rows * 0.5 + 0.5) * 255).astype(np.uint8)


def main(path: str) -> None:
    pil, fast = Qwen2VLImageProcessorPil(**SETTINGS), Qwen2VLImageProcessor(**SETTINGS)
    made: dict[str, np.ndarray] = {}
    for name, (image, arguments) in images().items():
        file = io.BytesIO()
        image.save(file, {"jpg": "jpeg"}.get(name[-3:], name.split(".")[1]), **arguments)
        made[f"{name}.file"] = np.frombuffer(file.getvalue(), np.uint8)
        opened = ImageOps.exif_transpose(Image.open(file))
        made[f"{name}.pil"] = pixels_of(pil, opened)
        if name in FAST:
            made[f"{name}.fast"] = pixels_of(fast, opened)
    np.savez_compressed(path, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
