"""Files that no decoder of images should be given, made from a seed."""

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

MIB = 2**20


def hostile_files(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` files: first one of each kind below, then damaged images."""
    yield from _KINDS[:count]
    rng = random.Random(seed)
    valid = [_image(kind) for kind in ("png", "jpeg", "webp", "gif", "tiff", "bmp")]
    for _ in range(count - len(_KINDS)):
        yield _damaged(bytearray(rng.choice(valid)), rng)


def _damaged(data: bytearray, rng: random.Random) -> bytes:
    how = rng.randrange(4)
    if how == 0:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice((1, 10, 100))):
        # Half of them in the head, where sizes are.
        end = 64 if how == 1 else len(data)
        data[rng.randrange(min(end, len(data)))] = rng.randrange(256)
    return bytes(data) if how < 3 else bytes(data) * 3


def _image(kind: str, **arguments: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **arguments)
    return file.getvalue()


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def _png(height: int, width: int, rows: bytes = b"", *others: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", head), *others, _chunk(b"IDAT", zlib.compress(rows, 9)))
    return b"".join((b"\x89PNG\r\n\x1a\n", *chunks, _chunk(b"IEND", b"")))


_BOMB = zlib.compress(bytes(200 * MIB), 9)
_KINDS = [
    b"",
    b"GIF89a" + bytes(100),
    b"%PDF-1.7" + bytes(100),
    b"PK\x03\x04" + bytes(100),
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"%!PS\n(/etc/passwd) (r) file",
    b"RIFF\xff\xff\xff\xffWEBP" + bytes(100),
    b"RIFF\x16\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x02\x00\x00\x00\xfe\x3f\x00\xfe\x3f\x00",
    b"\xff\xd8\xff" + bytes(100),
    b"\xff\xd8\xff\xe1\xff\xffExif\0\0" + b"MM\0*" + b"\xff" * 200,
    _png(8000, 8000, bytes(8000 * 24_001)),  # as large as is taken
    _png(8001, 8000, bytes(8000 * 24_001)),
    _png(2**31 - 1, 2**31 - 1),
    _png(1, 60_000_000),
    _png(5000, 5000),  # without rows
    _png(90, 70, bytes(90 * 211), _chunk(b"iCCP", b"a\0\0" + _BOMB)),
    _png(90, 70, bytes(90 * 211), _chunk(b"zTXt", b"a\0\0" + _BOMB)),
    _png(90, 70, bytes(90 * 211), _chunk(b"iTXt", b"a\0\1\0\0\0" + _BOMB)),
    _png(90, 70, bytes(200 * MIB)),
    _png(90, 70, bytes(90 * 211), *[_chunk(b"tEXt", b"a\0b")] * 50_000),
    _png(90, 70, bytes(90 * 211), _chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
]
