"""The images with vectors in a rank's table on the device: a cache by content and namespace.

The vectors of an image are computed once, before the step of the plan that has its encoding, and
stay for later requests with the image until others need the rows: least recently used first. A
request pins its images until the steps that read them are launched. Steps and encodings run on the
device in launch order, so rows may be given to another image then.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.step_plan import IMAGE_FIELDS, ImageEncoding, Int32Array
from sgl_jax.mem_cache.errors import LedgerError

_KEY_TOKENS = 8  # pseudo-ids of 31 bits that identify an image


class _Entry:
    """An image in the table; `slots` are its rows."""

    __slots__ = ("key", "num_pins", "slots")

    def __init__(self, key: bytes, slots: Int32Array) -> None:
        self.key, self.slots, self.num_pins = key, slots, 0


class ImageCache:
    """The table of one rank.

    Args:
        num_slots: rows of the table.
        most_new: tokens of images to compute before one step, except that any single request may
            start. Decoding requests wait for them.

    Attributes:
        num_encoded: images computed.
        num_hits: images of admitted requests that were in the table.
    """

    def __init__(self, num_slots: int, most_new: int) -> None:
        self._most_new = most_new
        self._num_slots = num_slots
        self._free: Int32Array = np.arange(num_slots, dtype=np.int32)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._pinned: dict[int, tuple[int, list[_Entry]]] = {}  # by row, and where its images end
        self._unsent: list[ImageEncoding] = []
        self.num_encoded = self.num_hits = 0

    def has_room(
        self, images: Sequence[ImageInput], tokens: Int32Array, start: int, namespace: str = ""
    ) -> bool:
        """Return whether a request may start that computes its `tokens` from `start` on."""
        own = {
            _key(image, tokens, namespace): image.num_tokens
            for image in images
            if _end(image) > start
        }
        num_new = sum(size for key, size in own.items() if key not in self._entries)
        num_unsent = sum(len(each.slots) for each in self._unsent)
        # Without a pin, perhaps no request runs, and no step would come.
        if num_new and num_unsent and self._pinned and num_unsent + num_new > self._most_new:
            return False
        own_keys = set(own)
        num_evictable = sum(
            len(entry.slots)
            for key, entry in self._entries.items()
            if not entry.num_pins and key not in own_keys
        )
        return num_new <= len(self._free) + num_evictable

    def pin(
        self,
        row: int,
        images: Sequence[ImageInput],
        tokens: Int32Array,
        start: int,
        namespace: str = "",
    ) -> dict[int, Int32Array]:
        """Pin the images of the request in `row` that it computes or reads from `start` on. Return
        their rows of the table, by first token. There must be room."""
        needed = [image for image in images if _end(image) > start]
        keys = [_key(image, tokens, namespace) for image in needed]
        entries = [self._entries.get(key) for key in keys]
        # Pin the images in the table first, so that none is evicted to add another.
        for entry in entries:
            if entry is not None:
                entry.num_pins += 1
                self._entries.move_to_end(entry.key)
                self.num_hits += 1
        pinned = []
        for image, key, entry in zip(needed, keys, entries, strict=True):
            if entry is None:
                entry = self._entries.get(key) or self._add(image, key)
                entry.num_pins += 1
            pinned.append(entry)
        if pinned:
            self._pinned[row] = max(map(_end, needed)), pinned
        return {image.start: entry.slots for image, entry in zip(needed, pinned, strict=True)}

    def unpin(self, row: int) -> None:
        """Unpin the images of the request in `row`, if any."""
        _, entries = self._pinned.pop(row, (0, ()))
        for entry in entries:
            entry.num_pins -= 1
            if not entry.num_pins and self._entries.get(entry.key) is not entry:
                self._free = np.concatenate([self._free, entry.slots])

    def unpin_computed(self, committed_len: Int32Array) -> None:
        """Unpin the images of rows whose launched steps have read them all."""
        ended = [row for row, (end, _) in self._pinned.items() if committed_len[row] >= end]
        for row in ended:
            self.unpin(row)

    def take_encodings(self) -> tuple[ImageEncoding, ...]:
        """Return the images to compute before the next step; none is left."""
        taken = tuple(self._unsent)
        self._unsent.clear()
        return taken

    def forget(self) -> None:
        """Find no image again: weights have changed, or the device's table is lost."""
        for entry in self._entries.values():
            if not entry.num_pins:
                self._free = np.concatenate([self._free, entry.slots])
        self._entries.clear()

    def audit(self, rows: Sequence[int]) -> None:
        """Check that every row of the table has one owner, and that only `rows` pin images. Raises
        `LedgerError`."""
        pins = [entry for _, entries in self._pinned.values() for entry in entries]
        entries = {id(entry): entry for entry in (*self._entries.values(), *pins)}.values()
        owned = np.concatenate([self._free, *(entry.slots for entry in entries)])
        if not np.array_equal(np.sort(owned), np.arange(self._num_slots)):
            raise LedgerError("a row of the table of images has no owner, or more than one")
        wrong = [entry for entry in entries if entry.num_pins != sum(p is entry for p in pins)]
        if wrong or not set(self._pinned) <= set(rows):
            raise LedgerError("pins of images differ from those of the running requests")

    def _add(self, image: ImageInput, key: bytes) -> _Entry:
        num = image.num_tokens
        for other in list(self._entries):
            if len(self._free) >= num:
                break
            if not self._entries[other].num_pins:
                self._free = np.concatenate([self._free, self._entries.pop(other).slots])
        assert len(self._free) >= num, "there is room"
        slots, self._free = self._free[:num], self._free[num:]
        entry = self._entries[key] = _Entry(key, slots)
        self._unsent.append(ImageEncoding(image.height, image.width, image.pixels, slots))
        self.num_encoded += 1
        return entry


def _end(image: ImageInput) -> int:
    return image.start + image.num_tokens


def _key(image: ImageInput, tokens: Int32Array, namespace: str) -> bytes:
    first = tokens[image.start : image.start + min(_KEY_TOKENS, image.num_tokens)]
    # With the namespace: a fast first token would tell one client what another has sent.
    return b"%d %d %s %s" % (image.height, image.width, first.tobytes(), namespace.encode())


def whole_images_end(images: Sequence[ImageInput], end: int) -> int:
    """Return the most tokens, up to `end`, that end within no image."""
    return next((image.start for image in images if image.start < end < _end(image)), end)


def image_ahead(images: Sequence[ImageInput], start: int) -> int:
    """Return the tokens from `start` to the end of the image there; 0 if it is not in an image."""
    ends = (_end(image) for image in images if image.start <= start < _end(image))
    return next((end - start for end in ends), 0)


def image_lists(images: Sequence[ImageInput], token_side: int) -> Int32Array:
    """Return `RowAdmission.images`; a token has `token_side` pixels in each direction."""
    lists = np.zeros((len(images), IMAGE_FIELDS), np.int32)
    moved = 0
    for own, image in zip(lists, images, strict=True):
        tall, wide = image.height // token_side, image.width // token_side
        own[:] = image.start, image.num_tokens, wide, moved
        moved += max(tall, wide) - image.num_tokens
    return lists


def check_images(
    images: Sequence[ImageInput], logprob_start_len: int, num_slots: int, max_images: int
) -> None:
    """Raise `InvalidRequestError` if a request with these images can never be served."""
    if len(images) > max_images:
        raise InvalidRequestError(
            f"the prompt has {len(images)} images, more than {max_images} "
            "(--max-images-per-request)",
            "images",
        )
    total = sum(image.num_tokens for image in images)
    if total > num_slots:
        raise InvalidRequestError(
            f"the images have {total} tokens, more than the {num_slots} that fit in memory at once "
            "(--image-cache-size)",
            "images",
        )
    if images and 0 <= logprob_start_len < _end(images[-1]):
        raise InvalidRequestError(
            f"logprob_start_len must be at least {_end(images[-1])}, the end of the last image, "
            f"or -1, got {logprob_start_len}",
            "logprob_start_len",
        )
