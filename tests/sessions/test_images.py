"""The images of a history are found by their tokens, wherever they stand."""

import numpy as np
import pytest

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput, image_token_ids
from sgl_jax.core.messages import OpenSession, SessionTurn
from sgl_jax.sessions.images import KnownImage, find_images, known_images
from sgl_jax.sessions.saving import restore_session, save_session
from sgl_jax.sessions.store import SessionsFullError, SessionStore
from tests.scheduler.driver import generate

VOCAB = 50


def image(content: int, num_tokens: int, start: int = 0) -> ImageInput:
    return ImageInput(
        start=start, num_tokens=num_tokens, height=8, width=8 * num_tokens, pixels=bytes([content])
    )


def ids_of(own: ImageInput) -> list[int]:
    return image_token_ids(own.height, own.width, own.pixels, own.num_tokens, VOCAB)


def test_images_are_found_after_tokens_were_dropped_or_put_before_them() -> None:
    one, other = image(1, 3), image(2, 4)
    prompt = [7, *ids_of(one), *ids_of(other), 8]
    placed = (image(1, 3, start=1), image(2, 4, start=4))
    known = known_images(generate("a", prompt, 1, images=placed))
    history = np.array([5, 6, *prompt, 9, *ids_of(one)], np.int32)
    found = find_images(history, known, VOCAB)
    assert [(own.start, own.num_tokens, own.pixels) for own in found] == [
        (3, 3, b"\1"),
        (6, 4, b"\2"),
        (12, 3, b"\1"),
    ]
    assert find_images(np.array([1, 2, 3], np.int32), known, VOCAB) == ()


def test_an_image_that_is_not_known_is_refused() -> None:
    one = image(1, 3)
    known = known_images(generate("a", ids_of(one), 1, images=(one,)))
    for prompt in (ids_of(image(2, 3)), ids_of(one)[1:]):
        with pytest.raises(InvalidRequestError, match="no longer there"):
            find_images(np.array([1, *prompt], np.int32), known, VOCAB)
    with pytest.raises(InvalidRequestError, match="offset keeps 2 of the 3 tokens of an image"):
        find_images(np.array([1, *ids_of(one)[:2], 4], np.int32), known, VOCAB)


def test_a_session_keeps_the_images_of_its_history_only() -> None:
    store = SessionStore(max_sessions=4, max_tokens=1000)
    for streaming in (True, False):
        session_id = f"streaming {streaming}"
        store.open(OpenSession(rid="", session_id=session_id, streaming=streaming))
        kept = take_turn(store, session_id, image(1, 3), succeeds=True)
        for content in range(2, 6):
            take_turn(store, session_id, image(content, 3), succeeds=False)
            assert list(store.images_of(store.get(session_id))) == [kept]


def test_pixels_of_all_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_jax.sessions.store.MAX_PIXEL_BYTES", 2)  # an image here has one byte
    store = SessionStore(max_sessions=4, max_tokens=1000)
    for session_id in ("a", "b"):
        store.open(OpenSession(rid="", session_id=session_id, streaming=True))
        take_turn(store, session_id, image(1, 3), succeeds=True)
    third = image(3, 3)
    message = generate("c", ids_of(third), 1, images=(third,), session=SessionTurn(id="a"))
    with pytest.raises(SessionsFullError, match="2 bytes of images, and at most 2 are kept"):
        store.check_pixels(message)
    store.check_pixels(generate("d", [1], 1, session=SessionTurn(id="a")))
    store.close("b")
    store.check_pixels(message)


@pytest.mark.parametrize("streaming", [True, False])
def test_saved_sessions_have_their_images(
    monkeypatch: pytest.MonkeyPatch, *, streaming: bool
) -> None:
    """Each is saved once, those of the newest sessions first, as long as there are few enough."""
    monkeypatch.setattr("sgl_jax.sessions.store.MAX_SAVED_PIXEL_BYTES", 2)
    store = SessionStore(max_sessions=4, max_tokens=1000)
    for session_id, contents in (("old", (1,)), ("a", (2, 3)), ("b", (3,))):
        store.open(OpenSession(rid="", session_id=session_id, streaming=streaming))
        for content in contents:
            take_turn(store, session_id, image(content, 3), succeeds=True)
    packed = make_encoder().encode(store.saved_images())
    images = make_decoder(list[KnownImage]).decode(packed)
    assert [own.image.pixels for own in images] == [b"\3", b"\2"]
    known = {int(own.tokens[0]): own for own in images}
    other = SessionStore(max_sessions=4, max_tokens=1000)
    for session, *_ in store.all():
        assert other.restore(restore_session(save_session(session)), known)
    history = np.array([5, *ids_of(image(2, 3)), *ids_of(image(3, 3))], np.int32)
    found = find_images(history, other.images_of(other.get("a")), VOCAB)
    assert [(own.start, own.pixels) for own in found] == [(1, b"\2"), (4, b"\3")]
    assert list(other.images_of(other.get("b"))) == ids_of(image(3, 3))[:1]
    prompt = np.array(ids_of(image(1, 3)), np.int32)
    with pytest.raises(InvalidRequestError, match="no longer there"):
        find_images(prompt, other.images_of(other.get("old")), VOCAB)


def take_turn(store: SessionStore, session_id: str, own: ImageInput, *, succeeds: bool) -> int:
    """Begin and end a turn with one image; return the first of its tokens."""
    rid = f"turn {own.pixels!r}"
    prompt = ids_of(own)
    turn = SessionTurn(id=session_id)
    message = generate(rid, prompt, 1, images=(own,), session=turn)
    session, whole, _ = store.compose_turn(message)
    session.hold(message, whole)
    store.add_images(session, message)
    store.note_use(session)
    assert prompt[0] in store.images_of(session)
    session.enter(rid)
    session.end(rid, whole if succeeds else None)
    store.note_use(session)
    return prompt[0]
