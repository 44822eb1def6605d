"""Stop strings are found across borders and never leak."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.text.stop_strings import StopStringChecker


def run(
    stops: list[str], pieces: list[str], *, keep: bool = False, min_pieces: int = 0
) -> tuple[str, str | None]:
    checker = StopStringChecker(stops, keep_stop=keep)
    text = ""
    for number, piece in enumerate(pieces, 1):
        check = checker.feed(piece, may_stop=number >= min_pieces)
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


def test_a_stop_string_may_begin_before_the_minimum() -> None:
    assert run([" tw"], ["on", "e", " t", "w"], min_pieces=4) == ("one", " tw")


def test_one_that_ends_before_the_minimum_is_text() -> None:
    assert run(["aa"], ["a", "a", "b"], min_pieces=3) == ("aab", None)
    assert run(["aa"], ["a", "a", "a"], min_pieces=3) == ("a", "aa")
    assert run(["ab", "xabyz"], ["xab", "yz"], min_pieces=2) == ("", "xabyz")


@given(
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abé", max_size=3), max_size=12),
    min_pieces=st.integers(0, 8),
    keep=st.booleans(),
)
def test_only_matches_that_end_before_the_minimum_are_passed_over(
    stops: list[str], pieces: list[str], min_pieces: int, keep: bool
) -> None:
    text = "".join(pieces)
    earliest = len("".join(pieces[: max(min_pieces - 1, 0)]))
    matches = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > earliest
    ]
    expected: tuple[str, str | None] = (text, None)
    if matches:
        end, start, stop = min(matches)
        expected = (text[: end if keep else start], stop)
    assert run(stops, pieces, keep=keep, min_pieces=min_pieces) == expected


SPECIAL = {"<x>": 7, "<x>y": 8}
UNITS = st.lists(st.sampled_from(["a", "b", *SPECIAL]), min_size=1, max_size=4)


@given(
    stops=st.lists(UNITS, min_size=1, max_size=3),
    units=st.lists(st.sampled_from(["a", "b", *SPECIAL]), max_size=16),
    keep=st.booleans(),
)
def test_hidden_tokens_are_searched_for_whole_and_never_shown(
    stops: list[list[str]], units: list[str], keep: bool
) -> None:
    checker = StopStringChecker(
        ["".join(stop) for stop in stops],
        keep_stop=keep,
        special=SPECIAL,
        hidden=frozenset(SPECIAL.values()),
    )
    text, matched = "", None
    for unit in units:
        check = checker.feed(checker.hidden(SPECIAL[unit]) if unit in SPECIAL else unit)
        text, matched = text + check.text, check.matched
        if matched is not None:
            break
    else:
        text += checker.flush()
    # Tokens that no stop string holds are as good as absent, as in the text that is shown.
    searched = [unit for unit in SPECIAL if any(unit in "".join(stop) for stop in stops)]
    units = [unit for unit in units if unit not in SPECIAL or unit in searched]
    ends = [
        (end, len(units[:end]) - len(stop))
        for end in range(len(units) + 1)
        for stop in stops
        if units[:end][-len(stop) :] == stop
    ]
    end, start = min(ends, default=(len(units), len(units)))
    shown = units[: end if keep else start]
    assert text == "".join(unit for unit in shown if unit not in SPECIAL)
    assert matched == ("".join(units[start:end]) if ends else None)
