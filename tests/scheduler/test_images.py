"""Requests with images on the oracle: every token of an image reads its own row of the table."""

import random

import numpy as np
import pytest

from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.events import Configure
from sgl_jax.scheduler.waiting.wait_reason import WaitReason
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes
from tests.scheduler.test_shared_chunks import count_chunks

FIRST_ID = 1 << 20  # of pseudo-ids: above the vocabulary and the rows of the table
SLOTS = 12  # the five images have 14 tokens


def request(rid: str, rng: random.Random, max_new_tokens: int = 6) -> GenerateRequest:
    """A prompt of texts and up to three of five images; prefixes are often shared."""
    tokens, images = [1] * rng.randrange(1, 5), list[ImageInput]()
    for _ in range(rng.randrange(4)):
        content = rng.randrange(5)
        images.append(add_image(tokens, content, 2 + content % 3))
        tokens += [2] * rng.randrange(1, 4)
    return generate(rid, tokens, max_new_tokens, images=tuple(images))


def add_image(tokens: list[int], content: int, num_tokens: int) -> ImageInput:
    ids = np.arange(FIRST_ID + 100 * content, FIRST_ID + 100 * content + num_tokens)
    image = ImageInput(
        start=len(tokens),
        num_tokens=num_tokens,
        height=8,
        width=8 * num_tokens,
        pixels=ids.astype(np.int32).tobytes().ljust(3 * 64 * num_tokens),
    )
    tokens += ids.tolist()
    return image


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


def test_a_request_waits_for_room_in_the_table_of_images() -> None:
    """Also one that would fit, after another that does not."""
    sizes = make_sizes(num_rows=6, num_pages=2000, max_chunk_tokens=32, max_context_len=3100)
    sizes = sizes._replace(image_slots=8, max_images=4, max_image_tokens=6, image_token_side=8)
    driver = Driver(sizes)
    contents = {"first": (1, 4), "second": (2, 5), "third": (0,), "text": ()}
    for rid, own in contents.items():
        tokens = (np.arange(3000 if rid == "first" else 1) % 40).tolist()
        images = [add_image(tokens, content, 2 + content % 3) for content in own]
        driver.submit(generate(rid, [*tokens, 2], 6, images=tuple(images)))
        driver.step()
    scheduler = driver.scheduler
    for rid in ("second", "third"):
        assert scheduler.why_waiting(rid) == WaitReason("images", dp_rank=0)
    assert "table of rank 0" in scheduler.why_waiting("second").in_words()
    counts = {kind: count for kind, count in scheduler.count_waiting().items() if count}
    assert counts == {"images": 2}
    driver.run()
    assert all(finish.type == "length" for finish in driver.finish.values())


def test_a_request_whose_images_are_too_many_for_a_step_waits_for_the_next() -> None:
    sizes = make_sizes(num_rows=6, num_pages=200, max_chunk_tokens=4, max_context_len=64)
    sizes = sizes._replace(image_slots=20, max_images=4, max_image_tokens=6, image_token_side=8)
    driver = Driver(sizes)
    for rid, content in (("first", 2), ("second", 1)):
        tokens = [1]
        images = (add_image(tokens, content, 2 + content % 3),)
        driver.submit(generate(rid, [*tokens, 2], 6, images=images))
    driver.step()
    assert driver.scheduler.why_waiting("second").kind == "step"
    assert driver.scheduler.count_waiting()["step"] == 1


CHUNK, IMAGE, LONG = 32, 16, 3000


def whole_images_driver(fair_share: str, chunk_tokens: int = CHUNK) -> Driver:
    """A request decodes, and a long prompt is computed."""
    sizes = make_sizes(
        page_size=4,
        num_pages=2000,
        num_rows=8,
        max_chunk_tokens=CHUNK,
        max_context_len=LONG + 100,
    )
    sizes = sizes._replace(
        image_slots=64, max_images=8, max_image_tokens=IMAGE, image_token_side=8, whole_images=True
    )
    args = SchedulerArgs(fair_share=fair_share)
    driver = Driver(sizes, args, overlap=False)
    driver.scheduler.handle(Configure(args, chunk_tokens))
    driver.submit(generate("decoding", [1, 2], 2000, tenant=Tenant(name="a")))
    driver.step()
    driver.submit(generate("long", (np.arange(LONG) % 40).tolist(), 1, tenant=Tenant(name="a")))
    driver.step()
    return driver


def with_image(rid: str, content: int, weight: float) -> GenerateRequest:
    tokens = [3, 4, 5]
    image = add_image(tokens, content, IMAGE)
    tenant = Tenant(name="b", weight=weight)
    return generate(rid, [*tokens, 6], 1, images=(image,), tenant=tenant)


@pytest.mark.parametrize("chunk_tokens", [CHUNK, 12])
@pytest.mark.parametrize(("fair_share", "weight"), [("off", 1), ("tokens", 1), ("tokens", 0.1)])
def test_an_image_larger_than_its_part_of_a_step_waits_for_few_steps(
    fair_share: str, weight: float, chunk_tokens: int
) -> None:
    driver = whole_images_driver(fair_share, chunk_tokens)
    driver.submit(with_image("image", 0, weight))
    num_steps = 0
    while not driver.tokens["image"] and num_steps < 100:
        driver.step()
        num_steps += 1
    assert num_steps <= 8
    driver.check_tokens("image")


@pytest.mark.parametrize(
    ("fair_share", "weight", "most"), [("off", 1, 0.25), ("tokens", 1, 0.5), ("tokens", 0.1, 0.25)]
)
def test_images_beyond_their_part_are_made_up_for(
    fair_share: str, weight: float, most: float
) -> None:
    """A flood of images gets its part of the tokens, and the long prompt the rest."""
    driver, num_images = whole_images_driver(fair_share), 0
    while not driver.tokens["long"] and len(driver.plans) < 300:
        while driver.scheduler.num_waiting < 2:
            driver.submit(with_image(f"image {num_images}", num_images, weight))
            num_images += 1
        driver.step()
    ends = [driver.prompts[rid] for rid in driver.finish if rid != "long"]
    num_tokens = sum(count_chunks(plan) for plan in driver.plans)
    assert 0.1 < sum(map(len, ends)) / num_tokens < most


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
