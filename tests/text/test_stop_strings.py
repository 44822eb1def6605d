"""Stop strings are found across borders and never leak."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.text.stop_strings import StopStringChecker


def run(stops: list[str], pieces: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    checker = StopStringChecker(stops, keep_stop=keep)
    text = ""
    for piece in pieces:
        check = checker.feed(piece)
        text += check.text
        if check.matched is not None:
            return text, check.matched
    return text + checker.flush(), None


def test_a_stop_string_is_found_across_pieces_and_trimmed() -> None:
    assert run(["END"], ["one E", "N", "D two"]) == ("one ", "END")


def test_it_can_be_kept_but_nothing_after_it() -> None:
    assert run(["END"], ["one E", "N", "D two"], keep=True) == ("one END", "END")


def test_a_false_beginning_is_shown_as_soon_as_it_is_one() -> None:
    checker = StopStringChecker(["\n\nUser:"])
    assert checker.feed("hi\n").text == "hi"
    assert checker.feed("\n").text == ""
    assert checker.feed("there").text == "\n\nthere"
    assert checker.flush() == ""


def test_a_beginning_within_a_false_beginning_is_still_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_held_text_appears_at_the_end() -> None:
    assert run(["stop!"], ["please sto"]) == ("please sto", None)


ALPHABET = st.text(alphabet="ab", min_size=1, max_size=4)


@given(stops=st.lists(ALPHABET, min_size=1, max_size=3), text=st.text("abc", max_size=20))
def test_the_answer_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str) -> None:
    at_once = run(stops, [text])
    assert run(stops, list(text)) == at_once
    if at_once[1] is None:
        assert at_once[0] == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(at_once[0] + at_once[1])
