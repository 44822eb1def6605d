"""Jobs for text workers and their results: frames of msgpack on a socket.

A worker sends `READY` once; then each side sends frames in turn. A frame is its length in bytes (4,
little-endian) and that many bytes of msgpack.
"""

import struct

import msgspec

from sgl_jax.text.template_abilities import TemplateAbilities

READY = b"+"
LENGTH = struct.Struct("<I")
# After a job of this many bytes a worker ends, which gives the memory back.
LAST_JOB_BYTES = 256 * 1024


class EncodeTexts(msgspec.Struct, frozen=True, tag="encode"):
    """Token ids of each text. `seconds`: the time limit, after which the worker process ends."""

    texts: list[str]
    seconds: float
    add_special_tokens: bool = True


class EncodeChat(msgspec.Struct, frozen=True, tag="chat"):
    """Token ids of a conversation, written by the model's chat template.

    Messages, tools and arguments are JSON, since its integers may be larger than msgpack's.
    """

    messages: bytes
    tools: bytes  # a list, or null
    continue_final_message: bool
    template_args: bytes
    max_chars: int  # that the template may write
    max_tokens: int  # of a request, to be named if it writes more
    seconds: float
    abilities: TemplateAbilities | None = None  # None: the worker finds them


class ProbeTemplate(msgspec.Struct, frozen=True, tag="probe"):
    """Find the abilities of the model's chat template."""

    seconds: float


class TokenIds(msgspec.Struct, frozen=True, tag="ids"):
    """Ids of each text: int32 in the byte order of the machine, on which both ends run."""

    ids: list[bytes]


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    abilities: TemplateAbilities


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The text cannot be encoded; the fields of an `InvalidRequestError`."""

    message: str
    param: str | None
    code: str


Job = EncodeTexts | EncodeChat | ProbeTemplate
JobAnswer = TokenIds | Probed | Refused


def frame(message: Job | JobAnswer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
