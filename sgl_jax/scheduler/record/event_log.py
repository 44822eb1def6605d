"""Writes recordings of a scheduler's events as they happen, and reads them one by one.

A file is a line that names the format, then frames: four bytes of length (little-endian) and a
value in msgpack. The first frame is the layout of the recorded structures, every later frame an
event. Each frame is handed to the operating system at once, so a crash of this process loses none.
"""

import logging
from collections.abc import Iterator
from os import PathLike
from typing import BinaryIO, Self

import msgspec

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.private_files import open_private
from sgl_jax.scheduler.events import LAYOUT, Record, Started

logger = logging.getLogger(__name__)

MAGIC = b"sgl-jax events 5\n"
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 30  # far more than any event; a larger length is an error


class RecordingError(ValueError):
    """The file is not a recording, or has a format that this version cannot read."""


class EventWriter:
    """Appends events to `file`, up to `max_bytes` (None: no limit). If the disk is full, the
    recording ends without an error, and the engine continues."""

    def __init__(self, file: BinaryIO, max_bytes: int | None = None) -> None:
        self._file = file
        self._left = max_bytes
        self._encoder = make_encoder()
        self._has_ended = False
        self._append(MAGIC + _frame(self._encoder.encode(LAYOUT)))

    @classmethod
    def create(cls, path: str | PathLike[str]) -> Self:
        """Return a writer to a new file, readable only for this user: it holds clients' texts.
        Raises `OSError` if the file cannot be created."""
        return cls(open(path, "wb", opener=open_private))

    def write(self, record: Record) -> None:
        if not self._has_ended:
            self._append(_frame(self._encoder.encode(record)))

    def close(self) -> None:
        """End the recording, after one more attempt to write the buffered rest."""
        has_failed, self._has_ended = self._has_ended, True
        try:
            self._file.close()
        except OSError as error:
            if not has_failed:
                logger.error("the recording of events may lack its end: %s", error)

    def _append(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self._has_ended = True
                return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            logger.error("events are recorded no longer: %s", error)
            self._has_ended = True


class EventReader:
    """Reads the events of `file` in order; holds one of them at a time.

    Raises `RecordingError` for any other file. A last frame that was cut off by a crash during the
    write ends the events and sets `is_truncated`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = make_decoder(Record)
        self.is_truncated = False
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError("this is no recording of scheduler events")
        layout = self._next_frame()
        if layout is None or layout != msgspec.msgpack.encode(LAYOUT):
            raise RecordingError("the recording is cut off or of another version of sgl_jax")
        started = next(iter(self), None)
        if not isinstance(started, Started):
            raise RecordingError("the recording does not begin with the scheduler's sizes")
        self.started = started

    def __iter__(self) -> Iterator[Record]:
        """Yield the records not read yet."""
        while (payload := self._next_frame()) is not None:
            try:
                event = self._decoder.decode(payload)
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                raise RecordingError(f"an event cannot be read: {error}") from error
            yield event

    def _next_frame(self) -> bytes | None:
        header = self._file.read(_LENGTH_BYTES)
        length = int.from_bytes(header, "little")
        if length > _MAX_FRAME_BYTES:
            raise RecordingError(f"an event of {length} bytes cannot be")
        payload = self._file.read(length) if len(header) == _LENGTH_BYTES else b""
        if header and (len(header) < _LENGTH_BYTES or len(payload) < length):
            self.is_truncated = True
            return None
        return payload if header else None


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
