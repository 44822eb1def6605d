"""Jobs for text workers and their results: frames of msgpack on a socket.

A worker sends `READY` once; then each side sends frames in turn. A frame is its length in bytes (4
bytes, little-endian) followed by that many bytes of msgpack.
"""

import struct

import msgspec

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


class ProbeTemplate(msgspec.Struct, frozen=True, tag="probe"):
    """Find the abilities of the model's chat template."""

    seconds: float


class TokenIds(msgspec.Struct, frozen=True, tag="ids"):
    """Ids of each text: int32 in the machine's byte order, since both ends run on it."""

    ids: list[bytes]


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    abilities: TemplateAbilities


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The text cannot be encoded. Has the fields of an `InvalidRequestError`."""

    message: str
    param: str | None
    code: str


Job = EncodeTexts | EncodeChat | ProbeTemplate
JobAnswer = TokenIds | Probed | Refused


def frame(message: Job | JobAnswer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
