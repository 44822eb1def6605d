"""Jobs for workers and their results: frames of msgpack on a socket.

A worker sends `READY` once; then each side sends frames in turn. A frame is its length in bytes (4
bytes, little-endian) followed by that many bytes of msgpack.
"""

import struct
from array import array

import msgspec

from sgl_jax.core.image_input import FittedImage, ImageSettings
from sgl_jax.text.template_abilities import TemplateAbilities

READY = b"+"
LENGTH = struct.Struct("<I")
# After a job of this size a worker ends, which frees its memory.
LAST_JOB_BYTES = 256 * 1024


class EncodeTexts(msgspec.Struct, frozen=True, tag="encode"):
    """Encode texts to token ids. After the time limit `seconds` the worker process ends."""

    texts: list[str]
    seconds: float
    add_special_tokens: bool = True


class EncodeChat(msgspec.Struct, frozen=True, tag="chat"):
    """Encode a conversation, written by the model's chat template, to token ids.

    Messages, tools and arguments are JSON, because msgpack limits the size of integers.
    """

    messages: bytes
    tools: bytes  # a list, or null
    continue_final_message: bool
    template_args: bytes
    max_chars: int  # limit for the template's output
    max_tokens: int  # limit of a request, named in the error
    seconds: float
    abilities: TemplateAbilities | None = None  # None: the worker finds them
    images: ImageSettings | None = None  # None: the model takes no images
    num_images: int = 0  # placeholders that the template must write


class DecodeImage(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """Decode an image, and resize it for the model.

    Args:
        name: of the image, for errors.
        source: a data URI, or base64; "" if there is a `file`.
        file: its bytes, if they were fetched.
        settings: of the model's images.
        vocab_size: of the model.
        max_area: bounds height * width after resizing, in addition to the settings.
        max_bytes: limit for the file.
        max_pixels: limit for height * width in the file.
    """

    name: str
    source: str
    settings: ImageSettings
    vocab_size: int
    max_area: int | None
    max_bytes: int
    max_pixels: int
    seconds: float
    file: bytes = b""


class ProbeTemplate(msgspec.Struct, frozen=True, tag="probe"):
    """Find the abilities of the model's chat template."""

    seconds: float


class TokenIds(msgspec.Struct, frozen=True, tag="ids"):
    """Ids of each text: int32 in the machine's byte order, since both ends run on it."""

    ids: list[bytes]


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    abilities: TemplateAbilities


class DecodedImage(msgspec.Struct, frozen=True, tag="pixels"):
    """An image for the model: sides and pixels as in `ImageInput`, and its pseudo-ids (int32)."""

    height: int
    width: int
    pixels: bytes
    ids: bytes

    @property
    def fitted(self) -> FittedImage:
        return FittedImage(self.height, self.width, self.pixels, array("i", self.ids).tolist())


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The input cannot be encoded. Has the fields of an `InvalidRequestError`."""

    message: str
    param: str | None
    code: str


Job = EncodeTexts | EncodeChat | DecodeImage | ProbeTemplate
JobAnswer = TokenIds | DecodedImage | Probed | Refused


def is_last(job: Job, num_bytes: int) -> bool:
    """Return whether a worker ends after `job`, a message of `num_bytes`.

    The next client's text never meets a process that has decoded an image: a file may exploit a
    defect of the decoders.
    """
    return num_bytes >= LAST_JOB_BYTES or isinstance(job, DecodeImage)


def frame(message: Job | JobAnswer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
