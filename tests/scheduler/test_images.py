"""Requests with images on the oracle: every token of an image reads its own row of the table."""

import random

import numpy as np
import pytest

from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Configure
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes

FIRST_ID = 1 << 20  # of pseudo-ids: above the vocabulary and the rows of the table
SLOTS = 12  # the five images have 14 tokens


def request(rid: str, rng: random.Random, max_new_tokens: int = 6) -> GenerateRequest:
    """A prompt of texts and up to three of five images; prefixes are often shared."""
    tokens, images = [1] * rng.randrange(1, 5), list[ImageInput]()
    for _ in range(rng.randrange(4)):
        content = rng.randrange(5)
        num_tokens = 2 + content % 3
        ids = np.arange(FIRST_ID + 100 * content, FIRST_ID + 100 * content + num_tokens)
        images.append(
            ImageInput(
                start=len(tokens),
                num_tokens=num_tokens,
                height=8,
                width=8 * num_tokens,
                pixels=ids.astype(np.int32).tobytes().ljust(3 * 64 * num_tokens),
            )
        )
        tokens += [*ids.tolist(), *([2] * rng.randrange(1, 4))]
    return generate(rid, tokens, max_new_tokens, images=tuple(images))


@pytest.mark.parametrize("whole_images", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_images_are_read_where_they_were_written(seed: int, *, whole_images: bool) -> None:
    """With `whole_images`, the oracle checks that no step computes a part of an image, also where
    steps have fewer prompt tokens than an image, or a shape would be filled exactly without it."""
    rng = random.Random(seed)
    sizes = make_sizes(
        dp_size=rng.choice([1, 2]),
        page_size=rng.choice([1, 4]),
        num_pages=rng.choice([24, 60]),
        num_rows=5,
        max_chunk_tokens=rng.choice([4 if whole_images else 3, 8]),
        max_draft_tokens=rng.choice([0, 2]),
        max_context_len=64,
    )
    sizes = sizes._replace(
        image_slots=SLOTS,
        max_images=4,
        max_image_tokens=8,
        image_token_side=8,
        whole_images=whole_images,
        step_token_shapes=(*range(2, sizes.max_step_tokens, 4), sizes.max_step_tokens),
    )
    args = SchedulerArgs(**forced_retract(rng.choice([0, 2, 3])))
    driver = Driver(sizes, args, max_unread=rng.choice([0, 1, 2]))
    for number in range(60):
        driver.submit(request(f"r{number}", rng))
        if rng.random() < 0.1:
            chunk_tokens = rng.randint(1, sizes.max_chunk_tokens)
            driver.scheduler.handle(Configure(args, chunk_tokens))
        for _ in range(rng.randrange(4)):
            driver.step()
        if rng.random() < 0.1:
            driver.abort(f"r{rng.randrange(number + 1)}")
        for rank in driver.scheduler.ranks:
            rank.images.audit(rank.running.active.tolist())
    driver.scheduler.handle(Configure(args, 1))
    driver.run()
    for rid, finish in driver.finish.items():
        expected = driver.oracle.expected_output(driver.prompts[rid], 6)
        found = driver.tokens[rid]
        assert found == expected[: len(found)]
        assert finish.type == "abort" or len(found) == 6
    counters = driver.scheduler.counters()
    assert counters["image_cache_hits"] > 0
    assert counters["image_encodings"] > 5


def test_recordings_have_no_pixels() -> None:
    sizes = make_sizes()._replace(
        image_slots=SLOTS, max_images=4, max_image_tokens=8, image_token_side=8
    )
    driver, rng = Driver(sizes), random.Random(3)
    sent = [request(f"r{number}", rng) for number in range(4)]
    for message in sent:
        driver.submit(message)
    driver.run()
    recorded = driver.recording.getvalue()
    assert any(message.images for message in sent)
    for message in sent:
        assert all(image.pixels not in recorded for image in message.images)
