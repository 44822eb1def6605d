"""Images are decoded and resized as transformers' processor does, and hostile files are refused."""

import base64
import io
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageSettings, image_token_ids
from sgl_jax.text.images import decode_image, fitted_size
from sgl_jax.text.jobs import DecodedImage, DecodeImage

GOLDEN = Path(__file__).parents[1] / "golden" / "images.npz"
VOCAB_SIZE = 512
SETTINGS = ImageSettings(
    patch_size=16,
    merge_size=2,
    min_pixels=64 * 64,
    max_pixels=128 * 128,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    image_token_id=7,
)


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as data:
        return dict(data)


FILES = [name[:-5] for name in golden() if name.endswith(".file")]


def decoded(source: str | bytes, **limits: Any) -> DecodedImage:
    given = {"max_area": None, "max_bytes": 2**20, "max_pixels": 2**20, "seconds": 1.0} | limits
    return decode_image(
        DecodeImage(
            name="image 1",
            source=source if isinstance(source, str) else "",
            file=source if isinstance(source, bytes) else b"",
            settings=SETTINGS,
            vocab_size=VOCAB_SIZE,
            **given,
        )
    )


def array_of(image: DecodedImage) -> np.ndarray:
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def file_of(height: int, width: int, kind: str = "png", **arguments: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, kind, **arguments)
    return file.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_pixels_equal_those_of_the_processor_of_transformers(name: str) -> None:
    image = decoded(golden()[f"{name}.file"].tobytes())
    pixels = array_of(image)
    np.testing.assert_array_equal(pixels, golden()[f"{name}.pil"])
    num_tokens = image.height * image.width // 32**2
    ids = image_token_ids(image.height, image.width, image.pixels, num_tokens, VOCAB_SIZE)
    assert np.frombuffer(image.ids, np.int32).tolist() == ids


@pytest.mark.parametrize("name", ["large.png", "tower.png"])
def test_pixels_are_within_a_level_of_the_torchvision_processor(name: str) -> None:
    """Unless a side grows: that form does not clip between its two passes."""
    pixels = array_of(decoded(golden()[f"{name}.file"].tobytes())).astype(int)
    assert np.abs(pixels - golden()[f"{name}.fast"]).max() <= 1


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "DATA:image/PNG;BASE64,",
        " data:image/png;name=a.png;charset=utf-8;base64,",
        "data:;base64,",
        "data:image/jpeg;base64,",  # clients declare wrong types
        "data:application/octet-stream;base64,",
        "",
    ],
)
def test_data_uris_in_many_forms(head: str) -> None:
    data = file_of(50, 70)
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for form in (text, lines, text.rstrip("="), base64.urlsafe_b64encode(data).decode()):
        assert decoded(head + form) == decoded(data)
    quoted = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    if head:
        assert decoded(head + quoted) == decoded(data)


def test_sizes_are_those_of_the_processor() -> None:
    sizes = {(height, width): fitted_size(height, width, SETTINGS) for height, width in SIDES}
    assert sizes == SIDES
    assert fitted_size(500, 500, SETTINGS, max_area=64 * 64) == (64, 64)
    assert fitted_size(500, 500, SETTINGS, max_area=1) == (64, 64)  # not below the model's least


# Printed by `smart_resize` of transformers 5.24.
SIDES = {
    (1, 1): (64, 64),
    (16, 48): (64, 128),
    (1, 200): (32, 928),
    (200, 1): (928, 32),
    (112, 112): (128, 128),
    (80, 80): (64, 64),
    (97, 333): (64, 224),
    (5000, 40): (1408, 32),
    (3000, 4000): (96, 128),
}


def png(height: int, width: int, data: bytes = b"") -> bytes:
    """A PNG of this header and this image data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "must be a PNG, JPEG or WebP"),
        ("data:image/png;base64,", "must be a PNG, JPEG or WebP"),
        ("data:image/png,abc", "must be base64"),
        ("data:text/html;base64,abcd", "of type text/html, not an image"),
        ("file:///etc/passwd", "is not base64"),
        ("é", "is not base64"),
        (file_of(40, 40, "gif"), "must be a PNG, JPEG or WebP"),
        (file_of(40, 40, "tiff"), "must be a PNG, JPEG or WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be a PNG, JPEG or WebP"),
        (file_of(40, 40)[:-30], "cannot be decoded"),
        (file_of(400, 400, "jpeg")[:500], "cannot be decoded"),
        (file_of(40, 40, "webp")[:30], "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "cannot be decoded"),
        (png(2**31 - 1, 2**31 - 1), "at most 1048576 are taken"),
        (png(0, 10), "cannot be decoded"),
        (png(50_000, 50_000, zlib.compress(bytes(10_000_000))), "at most 1048576 are taken"),
        (file_of(1025, 1024), "1024 x 1025 pixels, at most 1048576 are taken"),
        (file_of(1, 201), "at most 200 times the other"),
        ("A" * 2**21, "exceeds the 1048576 bytes"),
    ],
)
def test_what_is_no_image_is_refused_by_name(source: str | bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^image 1: .*{reason}") as caught:
        decoded(source)
    assert caught.value.code == "invalid_image"


def test_detail_bounds_the_area() -> None:
    data = file_of(500, 500)
    assert array_of(decoded(data)).shape == (128, 128, 3)
    assert array_of(decoded(data, max_area=96 * 96)).shape == (96, 96, 3)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    # As transformers' `Gemma4ImageProcessorPil` resizes with 280 tokens of 48 x 48 pixels.
    [(37, 53, (624, 960)), (896, 896, (768, 768)), (10, 700, (96, 6720)), (1, 400, (48, 13440))],
)
def test_a_budget_is_filled_with_the_ratio_of_the_sides(
    height: int, width: int, expected: tuple[int, int]
) -> None:
    sizes = {"patch_size": 16, "merge_size": 3, "max_pixels": 280 * 48**2, "fit": "budget"}
    settings = msgspec.structs.replace(SETTINGS, min_pixels=48**2, **sizes)
    assert fitted_size(height, width, settings) == expected
    square = msgspec.structs.replace(SETTINGS, fit="square")
    assert fitted_size(height, width, square, max_area=64) == (128, 128)


def test_placeholders_are_expanded_as_the_processor_does() -> None:
    settings = msgspec.structs.replace(SETTINGS, written_id=3, expansion=("\n\n", 3, 7, 4, "\n\n"))
    texts = {3: "<begin>", 4: "<end>", 7: "<image>"}
    written = settings.expanded("a\n<begin>b<image>", texts.__getitem__)
    assert written == "a\n\n\n<begin><image><end>\n\nb<image>"
    assert SETTINGS.expanded("<image>", texts.__getitem__) == "<image>"
    assert settings.expanded("hello", lambda _: "") == "hello"  # a tokenizer without such tokens
