"""The rows of a rank's table of images: shared by content, pinned, evicted, all accounted for."""

import random

import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.scheduler.image_cache import ImageCache, check_images, image_lists

Prompt = tuple[list[ImageInput], Int32Array]


def prompt(*images: tuple[int, int], gap: int = 3) -> Prompt:
    """Return a prompt with images (content, tokens), after `gap` tokens of text each."""
    inputs, tokens = list[ImageInput](), list[int]()
    for content, num_tokens in images:
        tokens += [1] * gap
        image = ImageInput(
            start=len(tokens), num_tokens=num_tokens, height=8, width=8 * num_tokens, pixels=b""
        )
        inputs.append(image)
        tokens += range(1000 * content, 1000 * content + num_tokens)
    return inputs, np.array([*tokens, 1], np.int32)


def test_an_image_is_computed_once_and_shared() -> None:
    cache = ImageCache(20, 100)
    images, tokens = prompt((1, 4), (2, 5), (1, 4))
    slots = cache.pin(1, images, tokens, 0)
    assert slots[images[0].start].tolist() == slots[images[2].start].tolist()
    assert len(set(slots[images[1].start]) | set(slots[images[0].start])) == 9
    assert [len(each.slots) for each in cache.take_encodings()] == [4, 5]
    again = cache.pin(2, *prompt((2, 5)), 0)
    assert again[3].tolist() == slots[images[1].start].tolist()
    assert cache.take_encodings() == ()
    assert (cache.num_encoded, cache.num_hits) == (2, 1)
    cache.audit([1, 2])


def test_no_image_of_another_namespace_is_found() -> None:
    cache = ImageCache(20, 100)
    own = cache.pin(1, *prompt((1, 4)), 0, "a")[3]
    other = cache.pin(2, *prompt((1, 4)), 0, "b")[3]
    assert not set(own.tolist()) & set(other.tolist())
    assert cache.pin(3, *prompt((1, 4)), 0, "a")[3].tolist() == own.tolist()
    assert (cache.num_encoded, cache.num_hits) == (2, 1)
    cache.audit([1, 2, 3])


def test_images_before_the_computed_part_are_not_needed() -> None:
    cache = ImageCache(4, 100)
    images, tokens = prompt((1, 4), (2, 4))
    assert not cache.has_room(images, tokens, 0)
    assert cache.has_room(images, tokens, 7)  # the end of the first
    assert not cache.has_room(images, tokens, 6)  # a prefix that ends within it
    assert list(cache.pin(1, images, tokens, 7)) == [images[1].start]


def test_the_least_recently_used_image_makes_room() -> None:
    cache = ImageCache(10, 100)
    for row, content in enumerate((1, 2)):
        cache.pin(row, *prompt((content, 5)), 0)
        cache.unpin(row)
    cache.pin(1, *prompt((1, 5)), 0)
    cache.unpin(1)
    cache.pin(1, *prompt((3, 5)), 0)  # in place of the second
    cache.take_encodings()
    cache.pin(2, *prompt((1, 5)), 0)
    assert cache.take_encodings() == ()


def test_pinned_images_stay_until_their_tokens_are_computed() -> None:
    cache = ImageCache(6, 100)
    images, tokens = prompt((1, 4))
    cache.pin(1, images, tokens, 0)
    other = prompt((2, 4))
    assert not cache.has_room(*other, 0)
    committed = np.array([0, 6], np.int32)
    cache.unpin_computed(committed)
    assert not cache.has_room(*other, 0)
    cache.unpin_computed(committed + 1)
    assert cache.has_room(*other, 0)
    cache.pin(2, *other, 0)
    assert not cache.has_room(images, tokens, 0)


def test_few_images_are_computed_before_one_step() -> None:
    cache = ImageCache(100, 10)
    cache.pin(1, *prompt((1, 30)), 0)  # any single request may start
    assert not cache.has_room(*prompt((2, 1)), 0)
    assert cache.has_room(*prompt((1, 30)), 0)
    cache.take_encodings()
    assert cache.has_room(*prompt((2, 1)), 0)


def test_a_request_starts_beside_the_images_of_requests_that_ended_before_their_step() -> None:
    cache = ImageCache(100, 10)
    cache.pin(1, *prompt((1, 30)), 0)
    cache.unpin(1)  # no request runs, so no step would compute the image
    assert cache.has_room(*prompt((2, 1)), 0)


def test_forgotten_images_are_computed_again_and_their_rows_return() -> None:
    cache = ImageCache(10, 100)
    cache.pin(1, *prompt((1, 4)), 0)
    cache.pin(2, *prompt((2, 4)), 0)
    cache.unpin(2)
    cache.forget()
    cache.audit([1])
    assert not cache.has_room(*prompt((1, 7)), 0)
    cache.unpin(1)
    cache.audit([])
    assert cache.has_room(*prompt((1, 10)), 0)


def test_a_lost_row_is_found() -> None:
    cache = ImageCache(10, 100)
    cache.pin(1, *prompt((1, 4)), 0)
    with pytest.raises(LedgerError, match="running"):
        cache.audit([2])
    cache.unpin(1)
    cache.unpin(1)
    cache._free = cache._free[1:]
    with pytest.raises(LedgerError, match="owner"):
        cache.audit([])


def test_random_requests_keep_the_rows_accounted_for() -> None:
    for seed in range(20):
        rng, cache, running = random.Random(seed), ImageCache(24, 12), set[int]()
        for _ in range(200):
            row = rng.randrange(1, 6)
            if row in running:
                cache.unpin(row)
                running.discard(row)
            else:
                contents = [(n := rng.randrange(1, 9), n) for _ in range(rng.randrange(3))]
                images, tokens = prompt(*contents)
                start = rng.randrange(len(tokens))
                if cache.has_room(images, tokens, start):
                    held = cache.pin(row, images, tokens, start)
                    assert all(len(slots) for slots in held.values())
                    running.add(row)
            if rng.random() < 0.3:
                cache.take_encodings()
            if rng.random() < 0.02:
                cache.forget()
            cache.audit(sorted(running))


def test_positions_of_a_row_are_moved_by_its_images() -> None:
    square = ImageInput(start=5, num_tokens=6, height=16, width=24, pixels=b"")
    tall = ImageInput(start=20, num_tokens=3, height=24, width=8, pixels=b"")
    assert image_lists([square, tall], 8).tolist() == [[5, 6, 3, 0], [20, 3, 1, -3]]


@pytest.mark.parametrize(
    ("slots", "most", "start_len", "named"),
    [(8, 9, -1, "image-cache-size"), (20, 1, -1, "max-images"), (20, 9, 14, "logprob_start_len")],
)
def test_requests_that_can_never_run_are_refused(
    slots: int, most: int, start_len: int, named: str
) -> None:
    images, _ = prompt((1, 4), (2, 5))  # the last ends at 15
    check_images(images, 15, 9, 2)
    check_images(images, -1, 9, 2)
    with pytest.raises(InvalidRequestError, match=named):
        check_images(images, start_len, slots, most)
